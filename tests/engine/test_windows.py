"""Models with windows in leases that hold only what their windows reach: tokens, pages and the prefix cache."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from engines.real_engine import real_engine
from engines.token_stream import greedy, submit, tokens_of
from engines.toy import until
from models.hf_models import VOCAB_SIZE, save_model

from fastdecode.engine.state.pages import PageBook, PageGroups, PageTable
from fastdecode.kernels._native import page_bytes
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS
from fastdecode.region.geometry import geometry_tuple, region_layout
from fastdecode.spart.backend import choose_backend

ROWS = 64


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def memory_of(directory: Path, n_pages: int) -> int:
    """Bytes of an R-node that can lease `n_pages` pages to an engine of ROWS rows and two mini-batches."""
    config = choose_backend("auto", directory).config
    geometry = config.hello_geometry(2, ROWS, "fp32")
    options = config.options.stored(config.windows)
    one_page = page_bytes(geometry_tuple(geometry), KV_DTYPES.index("fp32"), **options)
    return region_layout(geometry).region_bytes + n_pages * one_page


@torch.inference_mode()
def expected(directory: Path, prompts: list[list[int]], n: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": n}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]


@pytest.mark.parametrize(
    ("model_type", "scheme"), [("mistral", "shm"), ("cohere2", "tcp"), ("gemma3_text", "shm"), ("gpt_oss", "tcp")]
)
async def test_tokens_equal_transformers_where_pages_are_short(model_type, scheme, checkpoints, tmp_path):
    """Contexts many windows long, prompts that share beginnings, choices, and more sequences than there is room for."""
    directory, n_new, rng = save_model(model_type, checkpoints), 40, random.Random(3)
    first = [rng.randrange(3, VOCAB_SIZE) for _ in range(500)]
    prompts = [first, first[:400] + first[:90], first[:256] + [5] * 300, first[7:], first[:30], first[3:290]]
    wanted = await asyncio.to_thread(expected, directory, prompts, n_new)
    n_pages = {"mistral": 9, "gemma3_text": 9}.get(model_type, 16)
    memory = memory_of(directory, n_pages)
    url = "tcp://127.0.0.1:0" if scheme == "tcp" else None
    options = {"max_batch_tokens": ROWS, "max_batch_size": 4, "prefix_cache": True}
    async with real_engine(directory, tmp_path, url=url, kv_bytes=memory, backend="auto", **options) as engine:
        [node] = engine.cluster.nodes
        assert node.n_pages == n_pages
        for _ in range(2):  # the second time from what the prefix cache has
            streams = [submit(engine, prompt, greedy(n_new)) for prompt in prompts]
            got = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert got == wanted
        outputs: dict[str, list[int]] = {f"choice-{i}": [] for i in range(3)}

        def output_of(tokens):
            return lambda event: tokens.append(event.token)

        engine.submit_choices(prompts[0], greedy(n_new), {name: output_of(t) for name, t in outputs.items()})
        await until(lambda: all(len(tokens) == n_new for tokens in outputs.values()))
        assert list(outputs.values()) == [wanted[0]] * 3
        await until(lambda: node.free_pages + node.pages_evictable == node.n_pages)
        stats = await node.link.stats()
        assert (stats["seqs"], stats["pages_used"]) == (len(node.prefixes), node.pages_evictable)


async def test_a_lease_of_a_window_serves_the_whole_context(checkpoints, tmp_path):
    """A prompt of seven pages in a lease of three, and the tokens after it."""
    directory, n_new = save_model("mistral", checkpoints), 60
    prompt = [3 + i % 50 for i in range(900)]
    [wanted] = await asyncio.to_thread(expected, directory, [prompt], n_new)
    async with real_engine(
        directory, tmp_path, kv_bytes=memory_of(directory, 3), backend="auto", max_batch_tokens=ROWS, max_batch_size=4
    ) as engine:
        assert engine.cluster.nodes[0].n_pages == 3 and engine.longest_sequence == 1024
        for _ in range(2):
            assert await tokens_of(submit(engine, prompt, greedy(n_new))) == wanted
        assert engine.stats.totals.preemptions == 0


def test_groups_say_how_many_pages_sequences_need():
    full = PageGroups()
    assert [full.pages_for(n) for n in (1, 128, 129, 12800)] == [1, 1, 2, 100]
    assert full.capacity(7) == 7 * PAGE_TOKENS
    windowed = PageGroups(0, 1, reach=1024, step_rows=512)
    assert windowed.pages_for(100_000) == 13 and windowed.pages_for(100_000, shared=99_968) == 1
    assert windowed.capacity(13) > 10**9 and windowed.capacity(12) == 12 * PAGE_TOKENS
    mixed = PageGroups(1, 5, reach=1024, step_rows=512)
    assert mixed.pages_for(128 * 100) == 100 + 5 * 13
    assert mixed.capacity(100 + 5 * 13) == 100 * PAGE_TOKENS
    assert mixed.capacity(30) == 5 * PAGE_TOKENS


@pytest.mark.parametrize("seed", range(5))
def test_pages_that_are_given_back_are_counted_once(seed):
    """Random sequences that share, slide and end, against sets of pages."""
    rng, groups, total = random.Random(seed), PageGroups(1, 2, reach=200, step_rows=64), 120
    book, running, going = PageBook(total), [], []
    for _ in range(1500):
        action, table = rng.random(), rng.choice(running)[0] if running else None
        if action < 0.1 or table is None:
            source = rng.choice(running) if running and rng.random() < 0.5 else None
            length = rng.randrange(source[0].floor, source[1] + 1) if source else 0
            shared = source[0].share(length) if source and length >= PAGE_TOKENS else PageTable(groups)
            length = length if shared.covered else 0
            if shared.lacking(length) <= book.free:  # the last, partly used page is a page of its own
                book.share(shared)
                book.extend(shared, shared.missing(length))
                running.append([shared, length])
        elif action < 0.8:
            entry = rng.choice(running)
            table, length = entry
            tokens = length + rng.randint(1, 64)
            lacking = table.lacking(tokens)
            if rng.random() < 0.5:
                lacking -= table.reusable(length, tokens)
                if lacking > book.free:
                    continue
                going.append(book.slide(table, length, tokens))
                assert table.lacking(tokens) == lacking and not any(table.unseen(length))
            if lacking > book.free:
                continue
            book.extend(table, table.missing(tokens))
            entry[1] = tokens
            assert table.covered >= tokens
        elif action < 0.9 and going:
            book.freed(going.pop(rng.randrange(len(going))))
        elif action > 0.95:
            table, _ = running.pop(rng.randrange(len(running)))
            book.release(table)
            going.append(list(table))
        used = {page for table, _ in running for page in table}
        leaving = {page for pages in going for page in pages} - used
        assert book.freeing == sum(page.size for page in leaving)
        assert book.free == total - sum(page.size for page in used | leaving) >= 0
