"""Wrong data frames and replies: the link ends, or the call is refused, and no other link notices."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest
from link_driver import LARGE, SMALL, hello
from wire_peers import (
    HANG_S,
    MAGIC,
    ONE_ROW,
    Q_BYTES,
    Caller,
    FakeRNode,
    attach,
    attach_message,
    call,
    frame,
    open_link,
)

from fastdecode.region.geometry import geometry_tuple
from fastdecode.region.region import Region
from fastdecode.transports._native import Port
from fastdecode.transports.base import LinkDown, TransportError
from fastdecode.transports.registry import connect

# ---- data frames over TCP ----


@pytest.mark.quick
@pytest.mark.parametrize(
    ("data", "error_text"),
    [
        (frame(call(), ONE_ROW, magic=MAGIC + 1), "magic number"),
        (b"GET / HTTP/1.1\r\n" + b"x" * 64, "magic number"),
        (frame(call(), ONE_ROW, slot=2), "slot beyond the region"),
        (frame(call(), ONE_ROW, slot=2**32 - 1), "slot beyond the region"),
        (frame(call(), ONE_ROW, length=64), "length does not match"),
        (frame(call(), ONE_ROW, length=64 + len(ONE_ROW) + 1), "length does not match"),
        (frame(call(), ONE_ROW, length=2**64 - 1), "length does not match"),
        (frame(call(counts=(1, 2, 1)), ONE_ROW), "length does not match"),
        (frame(call(counts=(1, 2**32 - 1, 1)), ONE_ROW), "rows outside the slot"),
        (frame(call(counts=(1, 33, 1)), ONE_ROW), "rows outside the slot"),
        (frame(call(counts=(1, 0, 0)), ONE_ROW), "rows outside the slot"),
        (frame(call(counts=(1, 1, 2)), ONE_ROW), "more attending rows"),
        (frame(call(counts=(2**31, 1, 1)), ONE_ROW), "row table longer"),
        (frame(call(layer=2), ONE_ROW), "layer beyond the model"),
        (frame(call(flags=3), ONE_ROW), "unknown call flag"),
        (frame(call(reserved=1), ONE_ROW), "reserved field"),
        (frame(call(number=2), ONE_ROW), "out of order"),
        (frame(call(number=0), ONE_ROW), "out of order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_data_frames_end_their_link(r_node, bystander, data, error_text):
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    caller.send(data)
    error = await control.read_message()
    assert (error["type"], error["id"]) == ("ERROR", 0) and error_text in error["message"]
    assert await control.read_to_end() == b""
    await caller.read_to_end()
    await caller.close()
    await control.close()


@pytest.mark.parametrize("n", [1, 15, 16, 79, 80, 81, 103, 104, 500])
async def test_data_frames_cut_short_end_their_link(r_node, bystander, n):
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    caller.send(frame(call(), ONE_ROW)[:n])
    caller.writer.write_eof()
    assert "within a frame" in (await control.read_message())["message"]
    await caller.close()
    await control.close()


async def test_data_connection_closed_between_frames_ends_the_link(r_node, bystander):
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    await caller.close()
    assert "closed the data connection" in (await control.read_message())["message"]
    await control.close()


async def test_a_row_table_with_a_sequence_outside_the_lease_is_refused(r_node, bystander):
    """The transport does not check row tables: the R-engine refuses the call, and the link stays usable."""
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    caller.send(frame(call(), struct.pack("<6I", 2**32 - 1, 1, 0, 1, 1, 0) + ONE_ROW[24:]))
    caller.send(frame(call(), ONE_ROW, slot=1))
    replies = {}
    async with asyncio.timeout(HANG_S):
        for _ in range(2):
            magic, slot, length = struct.unpack("<IIQ", await caller.reader.readexactly(16))
            assert magic == MAGIC
            reply = await caller.reader.readexactly(length)
            replies[slot] = (*struct.unpack_from("<QII", reply), length)
    assert replies == {0: (1, 2, 0, 256), 1: (1, 0, 1, 256 + Q_BYTES)}
    await control.close()
    await caller.read_to_end()
    await caller.close()


async def test_a_peer_that_reads_no_replies_holds_up_only_itself(r_node, bystander):
    """Its replies fill the sockets. Then a call for a slot whose reply is not yet sent ends the link."""
    control, token = await open_link(r_node.tcp, LARGE, kv_bytes=32 << 20, max_seqs=32)
    with socket.create_connection(("127.0.0.1", int(r_node.tcp.rpartition(":")[2]))) as sock:
        sock.setblocking(False)
        caller = Caller(*await asyncio.open_connection(sock=sock))
        await caller.read_message()
        caller.send_message(attach_message(token))
        assert (await caller.read_message())["type"] == "ATTACHED"
        caller.writer.transport.pause_reading()
        rows = LARGE.max_rows
        row_bytes = (LARGE.n_q_heads + 2 * LARGE.n_kv_heads) * LARGE.head_size * 4
        reason = None
        async with asyncio.timeout(HANG_S):
            for seq_index in range(32):  # each reply has 2 MiB
                table = struct.pack("<6I", seq_index, 1, 0, rows, 1, 0)
                caller.send(frame(call(seq_index + 1, counts=(1, rows, rows)), table + bytes(rows * row_bytes)))
                served = False
                while not served and reason is None:
                    control.send_message({"type": "STATS", "id": 1})
                    answer = await control.read_message()
                    reason = answer.get("message")
                    served = reason is None and answer["stats"]["calls"] > seq_index
                if reason:
                    break
        assert reason and "last call is not answered" in reason
        caller.writer.transport.abort()
        await asyncio.sleep(0)
    await control.close()


# ---- wrong replies, S side ----


def reply(number: int = 1, status: int = 0, rows: int = 1, message: bytes = b"") -> bytes:
    return struct.pack("<QIIQQ224s", number, status, rows, 1, 2, message)


O_ROW = bytes(Q_BYTES)


@pytest.mark.parametrize(
    ("data", "error_text"),
    [
        (frame(reply(), O_ROW, magic=7), "magic number"),
        (frame(reply(), O_ROW, slot=9), "slot beyond the region"),
        (frame(reply(), O_ROW, slot=1), "answers no call"),
        (frame(reply(number=2), O_ROW), "answers no call"),
        (frame(reply(number=0), O_ROW), "answers no call"),
        (frame(reply(rows=2), O_ROW * 2), "rows do not match"),
        (frame(reply(rows=2**32 - 1), O_ROW), "rows do not match"),
        (frame(reply(status=2), O_ROW), "rows do not match"),
        (frame(reply(), O_ROW, length=256), "length does not match"),
        (frame(reply(), O_ROW, length=2**63), "length does not match"),
        (frame(reply(status=99, rows=0), b""), "unknown status"),
        (frame(reply(), O_ROW) * 2, "answers no call"),
        (frame(reply(), O_ROW)[:300], None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_replies_end_the_link(data, error_text):
    fake = FakeRNode()
    fake.reply = data
    async with fake as url:
        link = await connect(url, hello(), None)
        link.post(0, 0, 1, 1, 1, False)
        if error_text is None:  # the rest of the reply never arrives, and `wait` returns no part of it
            with pytest.raises(LinkDown, match="no reply"):
                await asyncio.to_thread(link.wait, 0, 0.2)
        else:
            async with asyncio.timeout(HANG_S):
                with pytest.raises(LinkDown, match=error_text):
                    await asyncio.to_thread(link.wait, 0, HANG_S)
                    link.post(0, 0, 1, 1, 1, False)  # the next wait finds the second reply to the first call
                    await asyncio.to_thread(link.wait, 0, HANG_S)
                assert error_text in str(await link.closed())
        await link.close()


async def test_a_refusals_message_need_not_be_text():
    fake = FakeRNode()
    fake.reply = frame(reply(status=6, rows=0, message=b"\xff" * 224), b"")
    async with fake as url:
        link = await connect(url, hello(), None)
        link.post(0, 0, 1, 1, 1, False)
        with pytest.raises(TransportError, match="\ufffd" * 223):
            await asyncio.to_thread(link.wait, 0, HANG_S)
        await link.close()


@pytest.mark.parametrize(
    ("answer", "error_text"),
    [
        (reply(number=2), "does not carry its call's number"),
        (reply(rows=3), "rows do not match"),
        (reply(status=1), "rows do not match"),
        (reply(status=2**32 - 1, rows=0), "unknown status"),
    ],
)
def test_wrong_replies_in_shared_memory(answer, error_text):
    region = Region.create(SMALL)
    wake = os.eventfd(0)
    port = Port(region.view, geometry_tuple(SMALL), 0, wake_fd=wake)
    port.post(0, 0, 1, 1, 1, True)
    slot = region.layout.slot(0)
    region.view[slot + 256 : slot + 512] = answer
    region.view[slot + 128 : slot + 136] = struct.pack("<Q", 1)
    with pytest.raises(ConnectionError, match=error_text):
        port.wait(0, HANG_S)
    with pytest.raises(ConnectionError, match=error_text):
        port.post(1, 0, 1, 1, 1, True)
    port.close()
    os.close(wake)
    region.close()
