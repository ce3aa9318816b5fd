"""The hand-shake that opens a link, and the proofs of the shared secret.

    R  CHALLENGE  version, nonce, the R-node's name
    S  HELLO      version, nonce, proof, and the request for a link (base.Hello)
    R  WELCOME    proof, the lease (base.Lease), a token   - or -   REFUSED  a reason in plain text

    on a second connection:
    R  CHALLENGE  as above, with a nonce of its own
    S  ATTACH     version, proof, the token
    R  ATTACHED   proof   - or -   REFUSED  a reason in plain text

on a connection that asks whether the R-node would open a link, before the S-node reads its weights:
    R  CHALLENGE  as above
    S  PROBE      version, nonce, proof
    R  ACCEPTED   proof   - or -   REFUSED  a reason in plain text

on a migration connection, from one R-node, or an S-node, to another R-node (migration.py):
    R  CHALLENGE  as above
    R  DELIVER    version, nonce, proof, the token of a RECEIVE or an OFFER
    R  ACCEPTED   proof   - or -   REFUSED  a reason in plain text

between two S-nodes (fastdecode/daemon/prefill_nodes.py), the first of which takes the part of the R-node:
    S  CHALLENGE  as above
    S  ENTRUST    version, nonce, proof, a digest of the model
    S  ACCEPTED   proof   - or -   REFUSED  a reason in plain text

After that the second connection belongs to the transport's data path: the pump of TCP takes the socket, shared memory
passes descriptors, RDMA exchanges addresses.

Each proof is a MAC over the connection's messages so far, its own last, with a key of its own (`session.Session`). It
covers a nonce that the other end has just drawn. So each end proves that it knows the secret at this moment, that it
plays this role, and that these messages are unchanged. From then on every control frame of the connection carries
a MAC, too (`session.Seal`). ATTACH proves more than knowledge of the secret: its key is that of the one link that the
token belongs to. Nothing is encrypted.

Without a secret there are no proofs and no MACs, and every process that can reach the R-node can use it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TypeVar

from fastdecode.region.contract import PROTOCOL_VERSION
from fastdecode.region.geometry import GeometryError, region_layout

from .base import Hello, Lease, LinkRefused, TransportError
from .frames import MAX_FRAME_AFTER_AUTH, FrameSocket
from .messages import (
    Accepted,
    Attach,
    Attached,
    Challenge,
    Deliver,
    Entrust,
    HelloMessage,
    Probe,
    Question,
    RefusedMessage,
    VersionMismatch,
    Welcome,
)
from .session import Session

#: Seconds that each end allows for the hand-shake.
DEADLINE_S = 10.0

_Question = TypeVar("_Question", HelloMessage, Attach, Probe, Deliver, Entrust)
_Stranger = TypeVar("_Stranger", HelloMessage, Probe, Deliver, Entrust)  # knows no session yet
_Answer = TypeVar("_Answer", Welcome, Attached, Accepted)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What WELCOME gives an S-node, for its ATTACH."""

    token: str
    session: Session | None  # None: the nodes have no secret


# ---- S side ----


async def _read_challenge(conn: FrameSocket) -> Challenge:
    try:
        message = await conn.read()
    except VersionMismatch as error:
        raise LinkRefused(str(error)) from None
    if isinstance(message, RefusedMessage):
        raise LinkRefused(message.reason)
    if not isinstance(message, Challenge):
        raise LinkRefused(f"the peer began with {message.TYPE}, not with CHALLENGE; is it an R-node?")
    return message


async def _answer(
    conn: FrameSocket,
    challenge: Challenge,
    message: _Question,
    expected: type[_Answer],
    session: Session | None,
    unproved: str,
) -> _Answer:
    """Send a message and return its answer. With a `session`, both are proved, and a MAC follows each later frame.

    Raises LinkRefused, with the reason `unproved` for an answer without a valid proof; LinkDown, ProtocolError.
    """
    if session:
        message = session.prove(message, challenge)
    await conn.write(message)
    answer = await conn.read()
    if isinstance(answer, RefusedMessage):
        raise LinkRefused(answer.reason)
    if not isinstance(answer, expected):
        raise LinkRefused(f"the R-node answered {message.TYPE} with {answer.TYPE}")
    if session:
        if not session.is_proved(answer, challenge, message):
            raise LinkRefused(unproved)
        conn.seal(*session.seals(challenge))
    return answer


async def say_hello(conn: FrameSocket, hello: Hello, secret: bytes | None) -> tuple[Lease, Ticket]:
    """Ask the R-node for a link. Returns the lease and the ticket for `attach`.

    Raises LinkRefused, LinkDown, ProtocolError.
    """
    try:
        region_bytes = region_layout(hello.geometry).region_bytes
    except GeometryError as error:
        raise TransportError(str(error)) from None
    nonce = secrets.token_hex(32)
    message = HelloMessage(version=PROTOCOL_VERSION, nonce=nonce, mac=None, region_bytes=region_bytes, hello=hello)
    answer, session = await _introduce(conn, message, Welcome, secret)
    conn.max_frame = MAX_FRAME_AFTER_AUTH
    lease = answer.lease
    # The S-node allocates by these numbers, so an R-node may grant less than was asked for and no more.
    if lease.max_seqs > hello.max_seqs:
        raise LinkRefused(f"the R-node grants {lease.max_seqs} sequences, asked for were {hello.max_seqs}")
    if hello.kv_bytes is not None and lease.n_pages * lease.page_bytes > hello.kv_bytes:
        granted = lease.n_pages * lease.page_bytes
        raise LinkRefused(f"the R-node grants {granted} bytes of KV-cache, asked for were {hello.kv_bytes}")
    if not lease.full_sections + lease.limited_sections or (lease.limited_sections > 0) != (lease.reach > 0):
        raise LinkRefused(
            f"the R-node divides the layers into {lease.full_sections} and {lease.limited_sections} sections, the "
            f"latter with a reach of {lease.reach}"
        )
    if lease.max_pages < lease.n_pages:
        raise LinkRefused(f"the R-node grants {lease.n_pages} pages and says that {lease.max_pages} are its most")
    return lease, Ticket(answer.token, session)


async def attach(conn: FrameSocket, ticket: Ticket) -> None:
    """Make `conn` the data connection of the link that `ticket` belongs to.

    Raises LinkRefused, LinkDown, ProtocolError.
    """
    challenge = await _read_challenge(conn)
    message = Attach(version=PROTOCOL_VERSION, mac=None, token=ticket.token)
    stranger = f"the data connection leads to somebody else than R-node {challenge.node}"
    await _answer(conn, challenge, message, Attached, ticket.session, stranger)


async def probe(conn: FrameSocket, secret: bytes | None) -> None:
    """Ask the R-node whether it would open a link to an S-node with this secret.

    Raises LinkRefused, LinkDown, ProtocolError.
    """
    message = Probe(version=PROTOCOL_VERSION, nonce=secrets.token_hex(32), mac=None)
    await _introduce(conn, message, Accepted, secret)


async def open_migration(conn: FrameSocket, token: str, page_bytes: int, secret: bytes | None) -> None:
    """Make `conn` a migration connection to the R-node that has admitted `token`, for pages of `page_bytes`.

    Raises LinkRefused, LinkDown, ProtocolError.
    """
    nonce = secrets.token_hex(32)
    message = Deliver(version=PROTOCOL_VERSION, nonce=nonce, mac=None, token=token, page_bytes=page_bytes)
    await _introduce(conn, message, Accepted, secret)


async def open_prefill(conn: FrameSocket, model: str, secret: bytes | None) -> None:
    """Make `conn` a connection to a prefill S-node, which must serve the model with the digest `model`.

    Raises LinkRefused, LinkDown, ProtocolError.
    """
    message = Entrust(version=PROTOCOL_VERSION, nonce=secrets.token_hex(32), mac=None, model=model)
    await _introduce(conn, message, Accepted, secret)
    conn.max_frame = MAX_FRAME_AFTER_AUTH


async def _introduce(
    conn: FrameSocket, message: _Stranger, expected: type[_Answer], secret: bytes | None
) -> tuple[_Answer, Session | None]:
    """Send the first message of a node that the peer does not know. Returns the answer, and the session that both prove
    if there is a secret. Where only one node has a secret, the peer refuses, so that both nodes say why."""
    challenge = await _read_challenge(conn)
    session = None if secret is None else Session(secret, message.nonce, challenge.nonce)
    unproved = f"{challenge.node} could not prove that it knows the shared secret"
    return await _answer(conn, challenge, message, expected, session, unproved), session


# ---- R side ----


class Handshake:
    """One connection's hand-shake at the R side: CHALLENGE has been sent, and the S-node's `answer` has arrived."""

    def __init__(self, conn: FrameSocket, challenge: Challenge, answer: Question):
        self.conn = conn
        self.answer = answer
        self.session: Session | None = None  # of the link; None until it is proved, and without a secret
        self._challenge = challenge

    def verify_hello(self, secret: bytes | None) -> Hello:
        """Check the proof and the geometry of HELLO, and return the request. Raises LinkRefused."""
        message = self.verify(HelloMessage, secret)
        geometry = message.hello.geometry
        try:
            region_bytes = region_layout(geometry).region_bytes
        except GeometryError as error:
            raise LinkRefused(str(error)) from None
        if region_bytes != message.region_bytes:
            raise LinkRefused(
                f"the two nodes lay regions out differently: {message.region_bytes} bytes at the S-node, "
                f"{region_bytes} here ({geometry})"
            )
        return message.hello

    def verify(self, kind: type[_Stranger], secret: bytes | None) -> _Stranger:
        """The peer's message, which is of this kind, after a check of its proof. Raises LinkRefused."""
        message = self.answer
        assert isinstance(message, kind)
        if secret is not None:
            if message.mac is None:
                raise LinkRefused("the node asks for a shared secret (--secret-file), and its peer has none")
            session = Session(secret, message.nonce, self._challenge.nonce)
            if not session.is_proved(message, self._challenge):
                raise LinkRefused("the shared secrets of the two nodes differ (--secret-file)")
            self.session = session
        elif message.mac is not None:
            raise LinkRefused("the node has no shared secret (--secret-file), and its peer has one")
        return message

    async def accept(self) -> None:
        """Send ACCEPTED. Raises LinkDown."""
        await self._confirm(Accepted(mac=None))

    async def welcome(self, lease: Lease, token: str) -> None:
        """Send WELCOME with the lease and the token. Raises LinkDown."""
        await self._confirm(Welcome(mac=None, token=token, lease=lease))
        self.conn.max_frame = MAX_FRAME_AFTER_AUTH

    def verify_attach(self, session: Session | None) -> None:
        """Check the proof of ATTACH against the `session` of the link that its token names. Raises LinkRefused."""
        message = self.answer
        assert isinstance(message, Attach)
        if session and not session.is_proved(message, self._challenge):
            raise LinkRefused("the proof in ATTACH is not that of the link that its token names")
        self.session = session

    async def confirm_attach(self) -> None:
        """Send ATTACHED. Raises LinkDown."""
        await self._confirm(Attached(mac=None))

    async def _confirm(self, message: _Answer) -> None:
        """Answer the peer, with a proof if there is a secret; a MAC then follows each later frame. Raises LinkDown."""
        if self.session is None:
            await self.conn.write(message)
            return
        await self.conn.write(self.session.prove(message, self._challenge, self.answer))
        s_seal, r_seal = self.session.seals(self._challenge)
        self.conn.seal(r_seal, s_seal)


async def challenge(conn: FrameSocket, node: str, *expected: type[Question]) -> Handshake:
    """Send the CHALLENGE of `node` on a new connection and read the answer, which is of an expected kind. Raises
    LinkRefused, LinkDown, ProtocolError."""
    message = Challenge(version=PROTOCOL_VERSION, nonce=secrets.token_hex(32), node=node)
    await conn.write(message)
    answer = await conn.read()
    if not isinstance(answer, expected):
        *others, last = (kind.TYPE for kind in expected)
        raise LinkRefused(f"expected {' or '.join([', '.join(others)] * bool(others) + [last])}, got {answer.TYPE}")
    return Handshake(conn, message, answer)
