"""Wrong data frames, verdicts and replies: the link ends, or the step is refused, and no other link notices."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import numpy as np
import pytest
from wire.link_driver import LARGE, SMALL, hello
from wire.wire_peers import (
    HANG_S,
    LAYER,
    MAGIC,
    Q_BYTES,
    REPLY,
    VERDICT,
    Caller,
    FakeRNode,
    arm,
    arm_header,
    attach,
    attach_message,
    frame,
    layer,
    open_link,
    reply,
    report,
    verdict,
)

from fastdecode.region.contract import POISON, ROW_DTYPE
from fastdecode.region.geometry import geometry_tuple
from fastdecode.region.region import Region
from fastdecode.transports._native import Port
from fastdecode.transports.base import CallRefused, DataPath, LinkDown
from fastdecode.transports.registry import connect

# ---- data frames over TCP ----


ONE_ROW = np.array([(0, 1, 0, 1, 1, 0)], ROW_DTYPE)


async def read_frame(caller: Caller) -> tuple[int, int, int, bytes]:
    """kind, slot, word and body of the next frame from the R-node."""
    magic, kind, slot, word, reserved, length = struct.unpack("<IHHIIQ", await caller.reader.readexactly(24))
    assert (magic, reserved) == (MAGIC, 0)
    return kind, slot, word, await caller.reader.readexactly(length)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("data", "error_text"),
    [
        (arm(magic=MAGIC + 1), "magic number"),
        (b"GET / HTTP/1.1\r\n" + b"x" * 64, "magic number"),
        (arm(slot=2), "slot beyond the region"),
        (arm(slot=2**16 - 1), "slot beyond the region"),
        (arm(reserved=1), "reserved field"),
        (frame(VERDICT, report()), "unknown kind"),
        (frame(REPLY, bytes(Q_BYTES), word=1), "unknown kind"),
        (frame(2**16 - 1, b""), "unknown kind"),
        (arm(word=1), "rings a layer that it does not carry"),
        (arm(length=64), "length does not match"),
        (arm(length=64 + 24 + 1), "length does not match"),
        (arm(length=2**64 - 1), "length does not match"),
        (arm(arm_header(counts=(2, 2, 1))), "length does not match"),
        (arm(arm_header(counts=(1, 2**32 - 1, 1))), "rows outside the slot"),
        (arm(arm_header(counts=(1, 33, 1))), "rows outside the slot"),
        (arm(arm_header(counts=(1, 0, 0))), "rows outside the slot"),
        (arm(arm_header(counts=(1, 1, 2))), "more attending rows"),
        (arm(arm_header(counts=(2**31, 1, 1))), "row table longer"),
        (arm(arm_header(reserved=1)), "reserved field"),
        (arm(arm_header(n_layers=0)), "layers beyond the model"),
        (arm(arm_header(n_layers=SMALL.n_layers + 1)), "layers beyond the model"),
        (arm(arm_header(n_layers=2**32 - 1)), "layers beyond the model"),
        (arm(arm_header(number=2)), "step is out of order"),
        (arm(arm_header(number=0)), "step is out of order"),
        (layer(), "slot that has no step"),
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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("data", "error_text"),
    [
        (layer(word=0), "layer is out of order"),
        (layer(word=2), "layer is out of order"),
        (layer(word=POISON), "layer is out of order"),
        (layer(length=1), "length does not match"),
        (layer(body=bytes(Q_BYTES)), "length does not match"),
        (layer(slot=1), "slot that has no step"),
        (arm(arm_header(number=3)), "step is out of order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_frames_after_a_step_was_armed_end_their_link(r_node, bystander, data, error_text):
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    caller.send(arm())
    async with asyncio.timeout(HANG_S):
        assert (await read_frame(caller))[:3] == (VERDICT, 0, 0)
    caller.send(data)
    error = await control.read_message()
    assert (error["type"], error["id"]) == ("ERROR", 0) and error_text in error["message"]
    await caller.read_to_end()
    await caller.close()
    await control.close()


async def test_a_layer_beyond_the_model_ends_the_link(r_node, bystander):
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    caller.send(arm())
    async with asyncio.timeout(HANG_S):
        assert (await read_frame(caller))[0] == VERDICT
        for word in range(1, SMALL.n_layers + 1):
            caller.send(layer(word))
            kind, slot, answered, body = await read_frame(caller)
            last = word == SMALL.n_layers
            assert (kind, slot, answered, len(body)) == (REPLY, 0, word, Q_BYTES + 256 * last)
    caller.send(layer(SMALL.n_layers + 1))
    assert "layer is out of order" in (await control.read_message())["message"]
    await caller.close()
    await control.close()


@pytest.mark.parametrize("n", [1, 15, 23, 24, 25, 87, 88, 89, 111])
async def test_data_frames_cut_short_end_their_link(r_node, bystander, n):
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    caller.send(arm()[:n])
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
    """The transport does not check row tables: the R-engine refuses the step, and the link stays usable."""
    control, token = await open_link(r_node.tcp)
    caller = await attach(r_node.tcp, token)
    caller.send(arm(table=struct.pack("<6I", 2**32 - 1, 1, 0, 1, 1, 0)))
    caller.send(arm(slot=1))
    verdicts = {}
    async with asyncio.timeout(HANG_S):
        for _ in range(2):
            kind, slot, word, body = await read_frame(caller)
            assert (kind, word, len(body)) == (VERDICT, 0, 256)
            verdicts[slot] = struct.unpack_from("<QI", body)
        assert verdicts == {0: (1, 2), 1: (1, 0)}
        caller.send(arm(arm_header(number=2)))  # its sequence is in the other slot's step, but has no token yet
        assert (await read_frame(caller))[0] == VERDICT
    await control.close()
    await caller.read_to_end()
    await caller.close()


async def test_a_peer_that_reads_no_replies_holds_up_only_itself(r_node, bystander):
    """Its replies fill the sockets. When it goes on in a slot whose answers are not sent, its link ends."""
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

        async def counted(calls: int, seqs: int) -> str | None:
            """Wait until the R-node has counted so much; returns the reason if the link has ended."""
            while True:
                control.send_message({"type": "STATS", "id": 1})
                answer = await control.read_message()
                if "stats" not in answer:
                    return answer["message"]
                if (answer["stats"]["calls"], answer["stats"]["seqs"]) == (calls, seqs):
                    await asyncio.sleep(0.05)  # the R-engine counts a little before it answers
                    return None

        async with asyncio.timeout(HANG_S):
            for seq_index in range(32):  # each reply has 2 MiB; this end guesses that its steps were accepted
                table = struct.pack("<6I", seq_index, 1, 0, rows, 1, 0)
                caller.send(arm(arm_header(seq_index + 1, (1, rows, rows), n_layers=LARGE.n_layers), table))
                reason = await counted(seq_index, seq_index + 1)
                if reason is None:
                    caller.send(layer(1, bytes(rows * row_bytes)))
                    reason = await counted(seq_index + 1, seq_index + 1)
                if reason is not None:
                    break
        assert reason == "the peer goes on without reading its answers"
        caller.writer.transport.abort()
        await asyncio.sleep(0)
    await control.close()


# ---- wrong replies, S side ----


LAST = reply(SMALL.n_layers, bytes(Q_BYTES) + report(n_layers=SMALL.n_layers))


@pytest.mark.parametrize(
    ("data", "error_text"),
    [
        (verdict(magic=7), "magic number"),
        (verdict(slot=9), "slot beyond the region"),
        (verdict(slot=1), "answers nothing"),
        (verdict(reserved=1), "reserved field"),
        (verdict(report(number=2)), "does not carry its step's number"),
        (verdict(report(number=0)), "does not carry its step's number"),
        (verdict(report(status=99)), "unknown status"),
        (verdict(word=1), "rings a layer that it does not carry"),
        (verdict(length=255), "length does not match"),
        (verdict(length=2**63), "length does not match"),
        (verdict() * 2, "answers nothing"),
        (reply(), "answers nothing"),
        (arm(), "unknown kind"),
        (frame(LAYER, b""), "unknown kind"),
        (verdict()[:200], None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_verdicts_end_the_link(data, error_text):
    fake = FakeRNode()
    fake.verdict = data
    async with fake as url:
        link = await connect(url, hello(), None)
        link.arm(0, ONE_ROW)
        if error_text is None:  # the rest of the verdict never arrives
            with pytest.raises(LinkDown, match="the verdict of step 1 in slot 0 has not come"):
                await asyncio.to_thread(link.wait, 0, 0.2)
        else:
            async with asyncio.timeout(HANG_S):
                with pytest.raises(LinkDown, match=error_text):
                    await asyncio.to_thread(link.wait, 0, HANG_S)
                    link.ring(0, 0)  # the next wait finds the second verdict
                    await asyncio.to_thread(link.wait, 0, HANG_S)
                assert error_text in str(await link.closed())
        await link.close()


@pytest.mark.parametrize(
    ("data", "error_text"),
    [
        (reply(magic=7), "magic number"),
        (reply(slot=1), "answers nothing"),
        (reply(0), "answers nothing"),
        (reply(2), "answers nothing"),
        (reply(POISON - 1), "answers nothing"),
        (LAST, "answers nothing"),
        (reply(body=bytes(2 * Q_BYTES)), "length does not match"),
        (reply(length=2**63), "length does not match"),
        (reply(POISON, b""), "length does not match"),
        (reply(POISON, report()), "status does not match"),
        (reply(POISON, report(number=2, status=6)), "does not carry its step's number"),
        (reply(POISON, report(status=99)), "unknown status"),
        (reply() * 2, "answers nothing"),
        (verdict(), "answers nothing"),
        (reply()[:200], None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_replies_end_the_link(data, error_text):
    fake = FakeRNode()
    fake.reply = data
    async with fake as url:
        link = await connect(url, hello(), None)
        link.arm(0, ONE_ROW)
        await asyncio.to_thread(link.wait, 0, HANG_S)
        link.ring(0, 0)
        if error_text is None:  # the rest of the reply never arrives, and `wait` returns no part of it
            with pytest.raises(LinkDown, match="the reply to layer 0 of step 1 in slot 0 has not come"):
                await asyncio.to_thread(link.wait, 0, 0.2)
        else:
            async with asyncio.timeout(HANG_S):
                with pytest.raises(LinkDown, match=error_text):
                    await asyncio.to_thread(link.wait, 0, HANG_S)
                    link.ring(0, 1)  # the next wait finds the second reply to the first layer
                    await asyncio.to_thread(link.wait, 0, HANG_S)
                assert error_text in str(await link.closed())
        await link.close()


@pytest.mark.parametrize("when", ["verdict", "reply"])
async def test_a_refusals_message_need_not_be_text(when):
    fake = FakeRNode()
    refusal = report(status=6, message=b"\xff" * 224)
    if when == "verdict":
        fake.verdict = verdict(refusal)
    fake.reply = reply(POISON, refusal)
    async with fake as url:
        link = await connect(url, hello(), None)
        link.arm(0, ONE_ROW)
        with pytest.raises(CallRefused, match="\ufffd" * 223):
            await asyncio.to_thread(link.wait, 0, HANG_S)
            link.ring(0, 0)
            await asyncio.to_thread(link.wait, 0, HANG_S)
        await link.close()


@pytest.fixture
def path():
    """A data path over memory that no R-engine serves, its region, and the offset of slot 0."""
    region = Region.create(SMALL)
    wake = os.eventfd(0)
    port = Port(region.view, geometry_tuple(SMALL), 0, wake_fd=wake)
    yield DataPath("shm://r-node", region, port), region.view, region.layout.slot(0)
    port.close()
    os.close(wake)
    region.close()


ARMED_BELL, LAYER_REPLY, REPORT = 192, 256, 320  # offsets in a slot's head


@pytest.mark.parametrize(
    ("answer", "bell", "error_text"),
    [
        (report(number=2), 1, "does not carry its step's number"),
        (report(status=2**32 - 1), 1, "unknown status"),
        (report(), 2, "the armed bell shows a step that was not armed"),
    ],
)
def test_wrong_verdicts_in_shared_memory(path, answer, bell, error_text):
    path, memory, slot = path
    path.arm(0, ONE_ROW)
    memory[slot + REPORT : slot + REPORT + 256] = answer
    memory[slot + ARMED_BELL : slot + ARMED_BELL + 8] = struct.pack("<Q", bell)
    with pytest.raises(LinkDown, match=error_text):
        path.wait(0, HANG_S)
    with pytest.raises(LinkDown, match=error_text):
        path.arm(1, ONE_ROW)


@pytest.mark.parametrize(
    ("word", "answer", "error_text"),
    [
        (2, report(), "reply arrived for a layer that was not asked for"),
        (2**32 - 1, report(), "reply arrived for a layer that was not asked for"),
        (POISON, report(), "status does not match"),
        (POISON, report(number=7, status=1), "does not carry its step's number"),
    ],
)
def test_wrong_replies_in_shared_memory(path, word, answer, error_text):
    path, memory, slot = path
    path.arm(0, ONE_ROW)
    memory[slot + REPORT : slot + REPORT + 256] = report()
    memory[slot + ARMED_BELL : slot + ARMED_BELL + 8] = struct.pack("<Q", 1)
    path.wait(0, HANG_S)
    path.ring(0, 0)
    memory[slot + REPORT : slot + REPORT + 256] = answer
    memory[slot + LAYER_REPLY : slot + LAYER_REPLY + 4] = struct.pack("<I", word)
    with pytest.raises(LinkDown, match=error_text):
        path.wait(0, HANG_S)


def test_a_late_reply_does_not_undo_the_poison_for_a_waiter(path):
    """A device's gate may close again, which its watchdog mends; a thread looks at the port as well."""
    path, memory, slot = path
    path.arm(0, ONE_ROW)
    memory[slot + REPORT : slot + REPORT + 256] = report()
    memory[slot + ARMED_BELL : slot + ARMED_BELL + 8] = struct.pack("<Q", 1)
    path.wait(0, HANG_S)
    path.ring(0, 0)
    path.port.kill("it died")

    def reply_word() -> int:
        return int.from_bytes(memory[slot + LAYER_REPLY : slot + LAYER_REPLY + 4], "little")

    assert reply_word() == POISON
    memory[slot + LAYER_REPLY : slot + LAYER_REPLY + 4] = bytes(4)
    with pytest.raises(LinkDown, match="it died"):
        path.wait(0, HANG_S)
