"""The hand-shake that opens a link, and the check of the shared secret.

    R  CHALLENGE  version, nonce, whether the R-node has a secret, the R-node's name
    S  HELLO      version, nonce, MAC, and the request for a link (base.Hello)
    R  WELCOME    MAC, the lease (base.Lease), a token   - or -   REFUSED  a reason in plain text
    S  on a second connection, after its CHALLENGE: ATTACH token
    R  OK; from then on the second connection belongs to the transport's data path (shared memory passes descriptors)

Both MACs are HMAC-SHA256 under the shared secret (RFC 2104) over the role, both nonces and the message. So each end
proves that it knows the secret at this moment, and that nobody has changed its message. The connection is not
encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace

from fastdecode.region.contract import PROTOCOL_VERSION
from fastdecode.region.geometry import Geometry, GeometryError, region_layout

from .base import Hello, Lease, LinkRefused, TransportError
from .frames import MAX_FRAME_AFTER_AUTH, FrameSocket
from .messages import Attach, Challenge, HelloMessage, Ok, Refused, VersionMismatch, Welcome, encode

#: Seconds that each end allows for the hand-shake.
DEADLINE_S = 10.0


def _mac(secret: bytes, role: bytes, s_nonce: str, r_nonce: str, message: HelloMessage | Welcome) -> str:
    text = b"\0".join([b"fastdecode", role, s_nonce.encode(), r_nonce.encode(), encode(replace(message, mac=None))])
    return hmac.new(secret, text, "sha256").hexdigest()


def _mac_matches(given: str | None, expected: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())


# ---- S side ----


async def _read_challenge(conn: FrameSocket) -> Challenge:
    try:
        message = await conn.read()
    except VersionMismatch as error:
        raise LinkRefused(str(error)) from None
    if isinstance(message, Refused):
        raise LinkRefused(message.reason)
    if not isinstance(message, Challenge):
        raise LinkRefused(f"the peer began with {message.TYPE}, not with CHALLENGE; is it an R-node?")
    return message


async def say_hello(conn: FrameSocket, hello: Hello, secret: bytes | None) -> tuple[Lease, str]:
    """Ask the R-node for a link. Returns the lease and the token for `attach`.

    Raises LinkRefused, LinkDown, ProtocolError.
    """
    challenge = await _read_challenge(conn)
    if challenge.needs_secret and secret is None:
        raise LinkRefused(f"R-node {challenge.node} asks for a shared secret, and this S-node has none")
    if secret is not None and not challenge.needs_secret:
        raise LinkRefused(f"R-node {challenge.node} has no shared secret, and this S-node has one")

    geometry = hello.geometry
    try:
        region_bytes = region_layout(geometry).region_bytes
    except GeometryError as error:
        raise TransportError(str(error)) from None
    message = HelloMessage(
        version=PROTOCOL_VERSION,
        nonce=secrets.token_hex(32),
        mac=None,
        **{name: getattr(geometry, name) for name in Geometry.__dataclass_fields__},
        region_bytes=region_bytes,
        kv_dtype=hello.kv_dtype,
        windows=list(hello.windows),
        softmax_scale=hello.softmax_scale,
        kv_bytes=hello.kv_bytes,
        max_seqs=hello.max_seqs,
    )
    if secret is not None:
        message = replace(message, mac=_mac(secret, b"S", message.nonce, challenge.nonce, message))
    await conn.write(message)

    answer = await conn.read()
    if isinstance(answer, Refused):
        raise LinkRefused(answer.reason)
    if not isinstance(answer, Welcome):
        raise LinkRefused(f"the R-node answered HELLO with {answer.TYPE}")
    if secret is not None and not _mac_matches(answer.mac, _mac(secret, b"R", message.nonce, challenge.nonce, answer)):
        raise LinkRefused(f"R-node {challenge.node} could not prove that it knows the shared secret")
    conn.max_frame = MAX_FRAME_AFTER_AUTH
    lease = Lease(**{name: getattr(answer, name) for name in Lease.__dataclass_fields__})
    # The S-node allocates by these numbers, so an R-node may grant less than was asked for and no more.
    if lease.max_seqs > hello.max_seqs:
        raise LinkRefused(f"the R-node grants {lease.max_seqs} sequences, asked for were {hello.max_seqs}")
    if hello.kv_bytes is not None and lease.n_pages * lease.page_bytes > hello.kv_bytes:
        granted = lease.n_pages * lease.page_bytes
        raise LinkRefused(f"the R-node grants {granted} bytes of KV-cache, asked for were {hello.kv_bytes}")
    return lease, answer.token


async def attach(conn: FrameSocket, token: str) -> None:
    """Make `conn` the data connection of the link that `token` belongs to.

    Raises LinkRefused, LinkDown, ProtocolError.
    """
    await _read_challenge(conn)
    await conn.write(Attach(version=PROTOCOL_VERSION, token=token))
    answer = await conn.read()
    if isinstance(answer, Refused):
        raise LinkRefused(answer.reason)
    if not isinstance(answer, Ok):
        raise LinkRefused(f"the R-node answered ATTACH with {answer.TYPE}")


# ---- R side ----


class Handshake:
    """One connection's hand-shake at the R side: CHALLENGE has been sent, and the S-node's `answer` has arrived."""

    def __init__(self, conn: FrameSocket, challenge: Challenge, answer: HelloMessage | Attach):
        self.conn = conn
        self.answer = answer
        self._challenge = challenge

    def verify_hello(self, secret: bytes | None) -> Hello:
        """Check the MAC and the geometry of HELLO, and return the request. Raises LinkRefused."""
        message = self.answer
        assert isinstance(message, HelloMessage)
        if secret is not None:
            if message.mac is None:
                raise LinkRefused("this R-node asks for a shared secret, and HELLO carries no proof of one")
            if not _mac_matches(message.mac, _mac(secret, b"S", message.nonce, self._challenge.nonce, message)):
                raise LinkRefused("the shared secrets of the two nodes differ")
        elif message.mac is not None:
            raise LinkRefused("this R-node has no shared secret, and the S-node has one")
        geometry = Geometry(**{name: getattr(message, name) for name in Geometry.__dataclass_fields__})
        try:
            region_bytes = region_layout(geometry).region_bytes
        except GeometryError as error:
            raise LinkRefused(str(error)) from None
        if region_bytes != message.region_bytes:
            raise LinkRefused(
                f"the two nodes lay regions out differently: {message.region_bytes} bytes at the S-node, "
                f"{region_bytes} here ({geometry})"
            )
        return Hello(
            geometry=geometry,
            kv_dtype=message.kv_dtype,
            windows=tuple(message.windows),
            softmax_scale=float(message.softmax_scale),
            kv_bytes=message.kv_bytes,
            max_seqs=message.max_seqs,
        )

    async def welcome(self, lease: Lease, token: str, secret: bytes | None) -> None:
        """Send WELCOME with the lease and the token. Raises LinkDown."""
        hello = self.answer
        assert isinstance(hello, HelloMessage)
        message = Welcome(mac=None, token=token, **{name: getattr(lease, name) for name in Lease.__dataclass_fields__})
        if secret is not None:
            message = replace(message, mac=_mac(secret, b"R", hello.nonce, self._challenge.nonce, message))
        await self.conn.write(message)
        self.conn.max_frame = MAX_FRAME_AFTER_AUTH


async def challenge(conn: FrameSocket, node: str, needs_secret: bool) -> Handshake:
    """Send CHALLENGE on a new connection and read the answer. Raises LinkRefused, LinkDown, ProtocolError."""
    message = Challenge(version=PROTOCOL_VERSION, nonce=secrets.token_hex(32), needs_secret=needs_secret, node=node)
    await conn.write(message)
    answer = await conn.read()
    if not isinstance(answer, HelloMessage | Attach):
        raise LinkRefused(f"expected HELLO or ATTACH, got {answer.TYPE}")
    return Handshake(conn, message, answer)
