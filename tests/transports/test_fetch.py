"""Pages of a sequence that an S-node fetches from an R-node. Where another R-node attends to what was fetched, every O
row is compared with float64."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
from wire.link_driver import in_thread
from wire.moving import SECRET, r_nodes, token, two_links

from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.transports.base import CallRefused, LinkDown, LinkRefused
from fastdecode.transports.migration import MigrationSender, PageFetcher, receive_bytes, send_bytes

LENGTH = 3 * PAGE_TOKENS + 50
N_PAGES = 4


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_an_r_node_attends_to_pages_that_were_fetched_from_another(secret):
    """While the first one goes on with the sequence."""
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2, secret=secret) as urls, two_links(*urls, secret=secret) as links:
        source, target = links
        page_bytes = source.link.lease.page_bytes
        await in_thread(source.fill, 0, LENGTH)
        shadow, offered, admitted = source.shadows[0], token(), token()
        await source.link.offer((0, shadow.tag), offered)
        fetcher = await PageFetcher.open(urls[0], offered, page_bytes, secret)
        data = memoryview(bytearray(N_PAGES * page_bytes))
        for pages in (range(1, 3), range(1), range(3, N_PAGES)):
            part = data[pages.start * page_bytes : pages.stop * page_bytes]
            await fetcher.fetch(pages.start, len(pages), partial(receive_bytes, part))
            await in_thread(source.step, 0, [(0, 2, True)])
        fetcher.close()
        await target.link.admit_migration((3, 9), LENGTH, admitted)
        sender = await MigrationSender.open(urls[1], admitted, page_bytes, secret)
        await sender.send(0, N_PAGES, LENGTH, partial(send_bytes, data))
        sender.close()
        target.shadows[3] = type(shadow)(9, *shadow.cut(LENGTH))
        await in_thread(target.step, 0, [(3, 4, True)])


async def test_pages_that_are_not_offered_cannot_be_fetched():
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2) as (a, b), two_links(a, b) as (source, target):
        page_bytes = source.link.lease.page_bytes
        await in_thread(source.fill, 0, LENGTH)
        handle = (0, source.shadows[0].tag)

        async def offered() -> str:
            fresh = token()
            await source.link.offer(handle, fresh)
            return fresh

        async def refused(url: str, presented: str, why: str, first: int = 0) -> None:
            with pytest.raises((LinkRefused, CallRefused), match=why):
                fetcher = await PageFetcher.open(url, presented, page_bytes, None)
                try:
                    await fetcher.fetch(first, 1, lambda fd, offset: pytest.fail("bytes have come"))
                finally:
                    fetcher.close()

        for seq, why in (((1, 1), "is empty"), ((0, handle[1] + 1), "tag"), ((99, 1), "outside")):
            with pytest.raises(CallRefused, match=why):
                await source.link.offer(seq, token())
        await refused(a, token(), "no sequence waits")
        await refused(a, await offered(), "has 4 pages", first=N_PAGES)
        used = await offered()
        (await PageFetcher.open(a, used, page_bytes, None)).close()
        await refused(a, used, "no sequence waits")
        replaced = await offered()
        with pytest.raises(CallRefused, match="token is in use"):
            await source.link.offer(handle, replaced)
        await offered()
        await refused(a, replaced, "no sequence waits")
        await in_thread(target.fill, 0, 20)
        with pytest.raises(CallRefused):
            await target.link.migrate((0, target.shadows[0].tag), range(1), 0, a, await offered())
        with pytest.raises(CallRefused, match="receives no pages"):  # the R-node copies in its memory
            await source.link.migrate(handle, range(1), 0, a, await offered())
        admitted, freed = token(), await offered()
        await target.link.admit_migration((3, 9), 100, admitted)
        for url, presented in ((b, admitted), (a, freed)):
            with contextlib.closing(await PageFetcher.open(url, presented, page_bytes, None)) as fetcher:
                if presented == freed:
                    await source.free_seq(0)
                with pytest.raises(LinkDown):
                    await fetcher.fetch(0, 1, partial(receive_bytes, memoryview(bytearray(page_bytes))))
        await in_thread(target.step, 0, [(0, 3, True)])
