"""The shared secret: it lets nodes in, and a machine between two nodes that have it can end their links and no more."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from wire.frame_proxy import FrameProxy, Sender
from wire.link_driver import HANG_S, Driver, hello, until
from wire.wire_peers import Caller, FakeRNode, Keys, attach_message, hello_message

from fastdecode.daemon.rnode import RNode
from fastdecode.transports.base import Link, LinkRefused, TransportError
from fastdecode.transports.frames import FrameSocket
from fastdecode.transports.messages import MAX_HANDLES, Free, PingMessage
from fastdecode.transports.registry import connect, probe, serve
from fastdecode.transports.session import Seal, hkdf_expand, hkdf_extract

KV_BYTES = 64 << 20
SECRET = b"a secret of the two nodes"


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RNode]:
    node = RNode(threads=1, kv_bytes=KV_BYTES, name="guarded")
    node.shm, node.tcp = await node.serve([f"shm://{tmp_path}/g.sock", "tcp://127.0.0.1:0"], SECRET)
    yield node
    await node.close()


async def step(link: Link) -> None:
    """A step of one sequence, compared with float64, and a FREE."""
    driver = Driver(link, hello())
    await asyncio.to_thread(driver.step, 0, [(0, 2, True)])
    await driver.free_seq(0)


@pytest.mark.quick
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_same_secret_opens_a_link(guarded, transport):
    link = await connect(getattr(guarded, transport), hello(), SECRET)
    await step(link)
    await link.close()


@pytest.mark.quick
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("ask", ["connect", "probe"])
async def test_secrets_that_differ(r_node, guarded, transport, ask, caplog):
    """The S-node's error names the R-node, and the R-node logs the reason, too."""
    for there, secret, error_text in [
        (guarded, None, r"asks for a shared secret \(--secret-file\), and its peer has none"),
        (guarded, SECRET + b"!", "the shared secrets of the two nodes differ"),
        (r_node, SECRET, r"has no shared secret \(--secret-file\), and its peer has one"),
    ]:
        url = getattr(there, transport)
        with pytest.raises(LinkRefused, match=rf"^{url} refuses: .*{error_text}") as refused:
            await (connect(url, hello(), secret) if ask == "connect" else probe(url, secret))
        assert re.search(rf"{url} refused .*{error_text}", caplog.messages[-1])
        assert SECRET.decode() not in str(refused.value)
    assert guarded.kv_free == KV_BYTES


@pytest.mark.quick
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_probe_opens_nothing(r_node, guarded, transport, caplog):
    for there, secret in ((guarded, SECRET), (r_node, None)):
        await probe(getattr(there, transport), secret)
        assert there.kv_free == KV_BYTES
    assert not caplog.messages


@pytest.mark.quick
async def test_a_secret_that_can_be_guessed_is_refused(guarded):
    for secret, sentence in (
        (b"\n", "the shared secret is empty"),
        (SECRET[:15], "the shared secret has 15 bytes and needs 16 or more"),
    ):
        with pytest.raises(TransportError, match=sentence):
            await serve("tcp://127.0.0.1:0", guarded, secret)
        with pytest.raises(TransportError, match=sentence):
            await connect(guarded.tcp, hello(), secret)


# ---- proofs ----


@pytest.mark.parametrize(
    ("secret", "salt", "info", "prk", "okm"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)).hex(),
            bytes(range(0x60, 0xB0)).hex(),
            bytes(range(0xB0, 0x100)).hex(),
            "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22,
            "",
            "",
            "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_hkdf_gives_the_vectors_of_rfc_5869(secret, salt, info, prk, okm):
    """Test cases 1 to 3 of appendix A."""
    assert hkdf_extract(bytes.fromhex(salt), bytes.fromhex(secret)).hex() == prk
    assert hkdf_expand(bytes.fromhex(prk), bytes.fromhex(info)).hex() == okm[:64]


async def greeted(url: str, make_mac) -> tuple[Caller, dict, dict, dict]:
    """Send HELLO with the MAC `make_mac(challenge, hello)`. Returns the connection, CHALLENGE, HELLO and the answer."""
    caller = await Caller.dial(url)
    challenge = await caller.read_message()
    message = hello_message()
    message["mac"] = make_mac(challenge, message)
    caller.send_message(message)
    return caller, challenge, message, await caller.read_message()


def right_mac(challenge: dict, message: dict) -> str:
    return Keys(SECRET, message["nonce"], challenge["nonce"]).proof("S-node HELLO", challenge, message)


async def test_wrong_proofs_in_hello_are_refused(guarded):
    """None; an invented one; one for another challenge, role, HELLO or name of the R-node; one that was overheard."""
    caller, challenge, message, welcome = await greeted(guarded.tcp, right_mac)
    keys = Keys(SECRET, message["nonce"], challenge["nonce"])
    assert welcome["mac"] == keys.proof("R-node WELCOME", challenge, message, welcome)
    await caller.close()

    def purpose(name: str):
        return lambda c, m: Keys(SECRET, m["nonce"], c["nonce"]).proof(name, c, m)

    for wrong, error_text in [
        (lambda c, m: None, "asks for a shared secret"),
        (lambda c, m: "00" * 32, "differ"),
        (lambda c, m: message["mac"], "differ"),
        (purpose("R-node WELCOME"), "differ"),
        (purpose("R-node HELLO"), "differ"),
        (purpose("S-node ATTACH"), "differ"),
        (lambda c, m: right_mac(c | {"nonce": "00" * 32}, m), "differ"),
        (lambda c, m: right_mac(c | {"node": "another"}, m), "differ"),
        (lambda c, m: right_mac(c, m | {"kv_bytes": 1}), "differ"),
    ]:
        caller, _, _, answer = await greeted(guarded.tcp, wrong)
        assert answer["type"] == "REFUSED" and error_text in answer["reason"]
        assert await caller.read_to_end() == b""
        await caller.close()
    # A caller without proof does not learn whether the R-node would grant its request.
    caller = await Caller.dial(guarded.tcp)
    await caller.read_message()
    caller.send_message(hello_message(kv_bytes=0))
    assert "shared secret" in (await caller.read_message())["reason"]
    await caller.close()


@pytest.mark.parametrize("proof", [None, "00" * 32, "reflected"])
async def test_impostor_that_does_not_know_the_secret(proof):
    """It proves nothing, invents a proof, or sends the S-node's own proof back."""

    class Impostor(FakeRNode):
        def answer(self, message: dict) -> dict:
            return super().answer(message) | {"mac": message["mac"] if proof == "reflected" else proof}

    async with Impostor() as url:
        with pytest.raises(LinkRefused, match="could not prove that it knows the shared secret"):
            await connect(url, hello(), SECRET)


# ---- the data connection ----


async def attach_refusal(url: str, make_message) -> str:
    caller = await Caller.dial(url)
    caller.send_message(make_message(await caller.read_message()))
    answer = await caller.read_message()
    assert answer["type"] == "REFUSED", answer
    assert await caller.read_to_end() == b""
    await caller.close()
    return answer["reason"]


async def test_an_attach_that_is_forged_costs_the_link_nothing(guarded):
    """By a machine that has read the token in WELCOME, or has a link of its own."""
    callers = [await greeted(guarded.tcp, right_mac) for _ in range(2)]
    keys, other = (Keys(SECRET, message["nonce"], challenge["nonce"]) for _, challenge, message, _ in callers)
    token = callers[0][3]["token"]

    def forged(make_mac):
        return lambda challenge: attach_message(token, make_mac(challenge, attach_message(token)))

    for make_mac in [
        lambda c, m: None,
        lambda c, m: "00" * 32,
        lambda c, m: callers[0][2]["mac"],
        lambda c, m: other.proof("S-node ATTACH", c, m),
        lambda c, m: keys.proof("R-node ATTACHED", c, m),
        lambda c, m: keys.proof("S-node HELLO", c, m),
        lambda c, m: keys.proof("S-node ATTACH", c | {"nonce": "00" * 32}, m),
        lambda c, m: keys.proof("S-node ATTACH", c, m | {"token": callers[1][3]["token"]}),
    ]:
        assert "proof in ATTACH" in await attach_refusal(guarded.tcp, forged(make_mac))

    data = await Caller.dial(guarded.tcp)
    challenge = await data.read_message()
    message = attach_message(token)
    message["mac"] = keys.proof("S-node ATTACH", challenge, message)
    data.send_message(message)
    answer = await data.read_message()
    assert answer == {"type": "ATTACHED", "mac": keys.proof("R-node ATTACHED", challenge, message, answer)}
    for caller in (data, *(c[0] for c in callers)):
        await caller.close()


async def test_an_attach_that_is_replayed_costs_the_link_nothing(guarded):
    """Somebody between the nodes holds the S-node's ATTACH and sends it on a connection of its own, before or after."""
    reasons = []

    async def replay(connection: int, sender: Sender, number: int, body: bytes) -> list[bytes]:
        if connection == 1 and sender == "S-node" and number == 0:
            reasons.append(await attach_refusal(guarded.tcp, lambda _: body))
            replayed.append(body)
        return [body]

    replayed: list[bytes] = []
    async with FrameProxy(guarded.tcp, replay) as proxy:
        link = await connect(proxy.url, hello(), SECRET)
        await step(link)
        reasons.append(await attach_refusal(guarded.tcp, lambda _: replayed[0]))
        await step(link)
        await link.close()
    assert "proof in ATTACH" in reasons[0] and "no link waits" in reasons[1]


@pytest.mark.parametrize("reflected", [False, True])
async def test_a_data_connection_that_leads_to_somebody_else(guarded, reflected):
    """Somebody between the nodes answers ATTACH himself: without a proof, and with the S-node's."""

    async def keep(connection: int, sender: Sender, number: int, body: bytes) -> list[bytes]:
        if connection == 1 and sender == "S-node":
            mac = json.loads(body)["mac"] if reflected else "00" * 32
            proxy.send(1, "S-node", json.dumps({"type": "ATTACHED", "mac": mac}).encode())
            return []
        return [body]

    async with FrameProxy(guarded.tcp, keep) as proxy:
        with pytest.raises(LinkRefused, match="data connection leads to somebody else than R-node guarded"):
            await connect(proxy.url, hello(), SECRET)


# ---- the frames of an open link ----

OTHER: dict[Sender, Sender] = {"S-node": "R-node", "R-node": "S-node"}
FORGED = {"S-node": b'{"id":9,"type":"PING"}', "R-node": b'{"id":0,"message":"go away","status":1,"type":"ERROR"}'}


@pytest.mark.parametrize("sender", ["S-node", "R-node"])
@pytest.mark.parametrize(
    "attack",
    ["alter", "alter the MAC", "shorten", "replay", "leave out", "reorder", "put in", "put in with a MAC", "reflect"],
)
async def test_control_frames_that_somebody_between_the_nodes_changes_end_the_link(guarded, sender, attack):
    """And no other link: the frames are those of PING and STATS, after the hand-shake."""
    first_frame = 1 if sender == "S-node" else 2
    seen: list[bytes] = []

    async def interfere(connection: int, by: Sender, number: int, body: bytes) -> list[bytes]:
        if connection or by != sender or number < first_frame:
            return [body]
        seen.append(body)
        if len(seen) > 2:
            return [body]
        match attack, len(seen):
            case "alter", 1:
                return [re.sub(rb'"id":\d', b'"id":7', body)]
            case "alter the MAC", 1:
                return [body[:-1] + bytes([body[-1] ^ 1])]
            case "shorten", 1:
                return [body[:20]]
            case "replay", 1:
                return [body, body]
            case (("leave out" | "reorder"), 1):
                return []
            case "reorder", 2:
                return [body, seen[0]]
            case "put in", 1:
                return [FORGED[sender], body]
            case "put in with a MAC", 1:
                return [FORGED[sender] + body[-32:], body]
            case "reflect", 1:
                proxy.send(0, sender, body)
        return [body]

    other = await connect(guarded.tcp, hello(), SECRET)
    async with FrameProxy(guarded.tcp, interfere) as proxy:
        link = await connect(proxy.url, hello(), SECRET)
        async with asyncio.timeout(HANG_S):
            error = await link.closed()
        assert "a control frame has a wrong MAC" in str(error)
    await step(other)
    await other.close()
    await until(lambda: all_free(guarded), HANG_S)


async def all_free(node: RNode) -> bool:
    return node.kv_free == KV_BYTES


async def test_control_frames_of_an_earlier_link_end_the_link(guarded):
    """The first frame after the hand-shake of each link is the same PING, with another MAC."""
    recorded: list[bytes] = []

    async def replace(connection: int, sender: Sender, number: int, body: bytes) -> list[bytes]:
        if connection % 2 == 0 and sender == "S-node" and number == 1:
            recorded.append(body)
            return [recorded[0]]
        return [body]

    async with FrameProxy(guarded.tcp, replace) as proxy:
        first = await connect(proxy.url, hello(), SECRET)
        await step(first)
        second = await connect(proxy.url, hello(), SECRET)
        async with asyncio.timeout(HANG_S):
            assert "a control frame has a wrong MAC" in str(await second.closed())
        assert recorded[0][:-32] == recorded[1][:-32] and recorded[0] != recorded[1]
        await step(first)
        await first.close()


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_write_that_is_cancelled_halfway_leaves_the_connection_usable(sealed):
    """The frame is larger than the buffers of both sockets, and nobody reads until the write is cancelled."""
    ends = [FrameSocket(sock) for sock in socket.socketpair()]
    if sealed:
        ends[0].seal(Seal(b"S-node"), Seal(b"R-node"))
        ends[1].seal(Seal(b"R-node"), Seal(b"S-node"))
    for end in ends:
        end.max_frame = 1 << 20
        end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    large, small = Free(id=1, handles=[(7, 7)] * MAX_HANDLES), PingMessage(id=2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await ends[0].write(large)
    writing = asyncio.create_task(ends[0].write(small))
    async with asyncio.timeout(HANG_S):
        assert [await ends[1].read(), await ends[1].read()] == [large, small]
        await writing
    for end in ends:
        end.close()


async def test_the_macs_of_control_frames_are_those_of_the_documents(guarded):
    """A peer that is written from the comments alone talks to the R-node."""
    caller, challenge, message, _ = await greeted(guarded.tcp, right_mac)
    keys = Keys(SECRET, message["nonce"], challenge["nonce"])
    for count in range(3):
        body = json.dumps({"type": "PING", "id": count + 1}).encode()
        caller.send_message(keys.seal("S-node", challenge["nonce"], count, body))
        answer = b'{"id":%d,"stats":null,"type":"OK"}' % (count + 1)
        expected = keys.seal("R-node", challenge["nonce"], count, answer)
        async with asyncio.timeout(HANG_S):
            assert await caller.reader.readexactly(4 + len(expected)) == len(expected).to_bytes(4, "little") + expected
    await caller.close()
