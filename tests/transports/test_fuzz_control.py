"""Control frames with something wrong about them, thousands of them, before and after the hand-shake.

They go to a real R-node and to a real S-node. Nothing hangs, no other connection notices, no exception is left
unhandled, and no descriptor, region, lease or memory stays behind. FASTDECODE_FUZZ_S=600 lets each test go on for ten
minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import time
import typing
from collections.abc import Callable, Iterator
from itertools import pairwise

import orjson
import pytest
from nodes.rnode_process import Held, needed_bytes, start_executor_threads
from wire.hostile_frames import BY_TYPE, MESSAGES, hostile_frame
from wire.link_driver import FEWER, HANG_S, hello, until
from wire.wire_peers import Caller, FakeRNode, Keys, attach_message, hello_message

from fastdecode.transports.base import TransportError
from fastdecode.transports.messages import Message, decode, encode
from fastdecode.transports.registry import connect

SECRET = b"a secret of the two nodes"
SECONDS = int(os.environ.get("FASTDECODE_FUZZ_S", "0"))
ROUNDS = 400 // FEWER

#: Longest hostile frames on an open link.
LONG = 1_000_000
#: Bytes by which this process, which holds both ends, may grow in a third of the rounds. In that time 6 MiB of hostile
#: frames arrive in every test, and up to 35 MiB.
GROWTH = 3 << 20

REQUESTS = [
    BY_TYPE[name]
    for name in ("FREE", "TRIM", "FORK", "RECEIVE", "PUSH", "OFFER", "KEEP", "FIND", "ADOPT", "RESIZE", "STATS", "PING")
]
ANSWERS = [BY_TYPE[name] for name in ("OK", "ERROR")]

pytestmark = pytest.mark.timeout(300 + 2 * SECONDS)


def rounds(n: int = ROUNDS) -> Iterator[random.Random]:
    """A generator of random numbers for each round. Memory must not grow both in the second third of the rounds and in
    the last."""
    began, resident = time.monotonic(), []

    for seed in itertools.count():
        done = (time.monotonic() - began) / SECONDS if SECONDS else seed / n
        if done >= 1:
            break
        if done >= (1 + len(resident)) / 3:
            resident.append(needed_bytes())
        yield random.Random(seed)
    resident.append(needed_bytes())
    assert min(after - before for before, after in pairwise(resident)) < GROWTH, resident


@contextlib.asynccontextmanager
async def nothing_stays(caplog: pytest.LogCaptureFixture):
    start_executor_threads()
    caplog.set_level(logging.ERROR)
    before = Held.by(os.getpid())

    async def clean() -> bool:
        held = Held.by(os.getpid())
        return held.fds <= before.fds and held.threads <= before.threads and held.regions <= before.regions

    yield
    await until(clean, HANG_S)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def end(caller: Caller) -> None:
    """Say that nothing follows; the R-node must then close the connection."""
    with contextlib.suppress(ConnectionError, OSError):
        caller.writer.write_eof()
    await caller.read_to_end()
    await caller.close()


def test_the_fuzzer_knows_every_message():
    assert set(BY_TYPE) == {message.TYPE for message in typing.get_args(Message)}
    for message in MESSAGES:
        assert encode(decode(orjson.dumps(message)))


# ---- to an R-node ----


async def test_an_r_node_survives_hostile_frames_before_the_hand_shake(r_node, bystander, caplog):
    (guarded,) = await r_node.serve(["tcp://127.0.0.1:0"], SECRET)
    async with nothing_stays(caplog):
        for rng in rounds(4 * ROUNDS):
            caller = await Caller.dial(rng.choice([guarded, r_node.tcp, r_node.shm]))
            for _ in range(rng.choice((1, 1, 3))):
                message = rng.choice([BY_TYPE["HELLO"], BY_TYPE["ATTACH"], rng.choice(MESSAGES)])
                caller.send(hostile_frame(rng, message))
            await end(caller)


async def open_link(url: str, secret: bytes | None) -> tuple[Caller, Callable[[bytes], bytes] | None, str]:
    """Open a link. Returns its control connection, what puts MACs behind frames, and the token of WELCOME."""
    caller = await Caller.dial(url)
    challenge = await caller.read_message()
    message = hello_message()
    keys = secret and Keys(secret, message["nonce"], challenge["nonce"])
    if keys:
        message["mac"] = keys.proof("S-node HELLO", challenge, message)
    caller.send_message(message)
    welcome = await caller.read_message()
    assert welcome["type"] == "WELCOME", welcome
    counts = itertools.count()
    return caller, keys and (lambda b: keys.seal("S-node", challenge["nonce"], next(counts), b)), welcome["token"]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
async def test_an_r_node_survives_hostile_frames_on_an_open_link(r_node, bystander, caplog, secret):
    """From an S-node that knows the secret, and puts the right MAC behind most of them."""
    (url,) = await r_node.serve(["tcp://127.0.0.1:0"], secret)
    async with nothing_stays(caplog):
        for rng in rounds():
            caller, seal, token = await open_link(url, secret)
            data = None
            if not secret and rng.random() < 0.5:
                data = await Caller.dial(url)
                data.send_message(attach_message(token))
            for _ in range(rng.choice((1, 2, 8))):
                message = rng.choice([*REQUESTS, *REQUESTS, rng.choice(MESSAGES)])
                caller.send(hostile_frame(rng, message, seal, LONG))
            await end(caller)
            if data:
                await end(data)


# ---- to an S-node ----

STAGES = ["CHALLENGE", "WELCOME", "CHALLENGE to ATTACH", "ATTACHED", "answers"]


class HostileRNode(FakeRNode):
    """Knows the secret, and sends hostile frames at one stage of each link; after them nothing."""

    def __init__(self, secret: bytes | None):
        super().__init__()
        self._secret = secret
        self.begin(random.Random(0))

    def begin(self, rng: random.Random) -> None:
        """Begin a round."""
        self._rng, self._stage, self._keys = rng, rng.choice(STAGES), None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Caller(reader, writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._talk(peer)
            await peer.reader.read()
        await peer.close()

    async def _talk(self, peer: Caller) -> None:
        """Until a hostile frame has been sent."""
        rng, prefix = self._rng, "CHALLENGE to ATTACH" if self._keys else "CHALLENGE"
        if self._stage == prefix:
            return self._send_hostile(peer, self.challenge)
        peer.send_message(self.challenge)
        message = await peer.read_message()
        answer = self.answer(message)
        if message["type"] == "HELLO":
            self._keys = Keys(self._secret or b"", message["nonce"], self.challenge["nonce"])
        if self._secret:
            purpose = f"R-node {answer['type']}"
            answer = answer | {"mac": self._keys.proof(purpose, self.challenge, message, answer)}
        if self._stage == answer["type"]:
            return self._send_hostile(peer, answer)
        peer.send_message(answer)
        if message["type"] == "HELLO" and self._stage == "answers":
            counts = itertools.count()
            nonce = self.challenge["nonce"]
            seal = self._secret and (lambda body: self._keys.seal("R-node", nonce, next(counts), body))
            for _ in range(rng.choice((1, 2, 8))):
                self._send_hostile(peer, rng.choice([*ANSWERS, *ANSWERS, rng.choice(MESSAGES)]), seal, last=False)
            peer.writer.write_eof()

    def _send_hostile(self, peer: Caller, message: dict, seal=None, last: bool = True) -> None:
        peer.send(hostile_frame(self._rng, message, seal, LONG if self._stage == "answers" else 60_000))
        if last:
            peer.writer.write_eof()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
async def test_an_s_node_survives_hostile_frames(bystander, caplog, secret):
    fake = HostileRNode(secret)
    opened = 0
    async with fake as url, nothing_stays(caplog):
        for rng in rounds():
            fake.begin(rng)
            async with asyncio.timeout(HANG_S):
                try:
                    link = await connect(url, hello(), secret)
                except TransportError:
                    continue
                opened += 1
                with contextlib.suppress(TransportError):
                    await link.stats()
                    await link.resize(5)
                assert await link.closed()
    assert opened > 10
