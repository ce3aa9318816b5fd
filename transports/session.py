"""The keys of one link, and the MACs that they make.

Each hand-shake derives keys of its own from the shared secret and both nonces (HKDF-SHA256, RFC 5869). Each purpose and
each direction has a key of its own, so a MAC of one role, message or connection is worth nothing in place of another.
"""

from __future__ import annotations

import hmac
from typing import TypeVar

from msgspec.structs import replace

from .messages import Attach, Challenge, ControlMessage, Entrust, HelloMessage, Probe, ProtocolError, Proved, encode

#: Shortest secret in bytes. A shorter one can be found by trying, from one overheard hand-shake.
MIN_SECRET_BYTES = 16

#: Bytes of a MAC behind a control frame.
MAC_BYTES = 32

_Proof = TypeVar("_Proof", bound=Proved)


def secret_fault(secret: bytes) -> str | None:
    """A phrase that says why `secret` must not be used, or None if it may."""
    if not secret.strip():
        return "is empty"
    if len(secret) < MIN_SECRET_BYTES:
        return (
            f"has {len(secret)} bytes and needs {MIN_SECRET_BYTES} or more, for a shorter one can be guessed; "
            "make one with: head -c 32 /dev/urandom | base64"
        )
    return None


def hkdf_extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-Extract with SHA-256 (RFC 5869, section 2.2). Returns 32 bytes."""
    return hmac.digest(salt, secret, "sha256")


def hkdf_expand(prk: bytes, info: bytes) -> bytes:
    """HKDF-Expand with SHA-256 (RFC 5869, section 2.3). Returns 32 bytes."""
    return hmac.digest(prk, info + b"\1", "sha256")


class Session:
    """The keys of one link, of one migration connection, or of one connection between S-nodes.

    PRK = HKDF-Extract(salt, secret); the salt is the nonce of HELLO, PROBE, DELIVER or ENTRUST, and that of the
    CHALLENGE before it, 64 bytes. A key is HKDF-Expand(PRK, "fastdecode " + purpose, 32). The purposes are "S-node
    HELLO", "R-node WELCOME", "S-node ATTACH", "R-node ATTACHED", "S-node PROBE", "R-node DELIVER", "S-node ENTRUST",
    "R-node ACCEPTED" for proofs, and "S-node frames " and "R-node frames ", each followed by the hexadecimal nonce of
    the connection's CHALLENGE, for the frames after the hand-shake. The node that opens a migration connection, or one
    between S-nodes, uses the key of the S-node's frames.

    A proof is the `mac` field of a message: HMAC-SHA256 over the JSON (`messages.encode`) of the connection's messages
    so far, its own last and with `mac` null, joined by zero bytes.
    """

    def __init__(self, secret: bytes, s_nonce: str, r_nonce: str):
        """`s_nonce` and `r_nonce` are the nonces of HELLO and of the CHALLENGE before it, in hexadecimal."""
        self._prk = hkdf_extract(bytes.fromhex(s_nonce + r_nonce), secret)

    def _key(self, purpose: str) -> bytes:
        return hkdf_expand(self._prk, b"fastdecode " + purpose.encode())

    def _mac(self, before: tuple[ControlMessage, ...], message: Proved) -> str:
        role = "S-node" if isinstance(message, HelloMessage | Attach | Probe | Entrust) else "R-node"
        text = b"\0".join(map(encode, (*before, replace(message, mac=None))))
        return hmac.digest(self._key(f"{role} {message.TYPE}"), text, "sha256").hex()

    def prove(self, message: _Proof, *before: ControlMessage) -> _Proof:
        """`message` with its proof. `before` are the earlier messages of the connection."""
        return replace(message, mac=self._mac(before, message))

    def is_proved(self, message: Proved, *before: ControlMessage) -> bool:
        """Whether `message` carries the right proof."""
        return message.mac is not None and hmac.compare_digest(message.mac, self._mac(before, message))

    def seals(self, challenge: Challenge) -> tuple[Seal, Seal]:
        """Seals for the frames of the S-node and of the R-node, on the connection that `challenge` began."""
        s_key, r_key = (self._key(f"{role} frames {challenge.nonce}") for role in ("S-node", "R-node"))
        return Seal(s_key), Seal(r_key)


class Seal:
    """The MACs behind the frames of one direction of one connection: HMAC-SHA256 over a counter and the frame's JSON.

    The counter, 8 bytes little-endian, is 0 for the first frame and is not sent. So a frame that was altered, replayed,
    left out, put in, sent back or moved has a wrong MAC, and the connection ends with it.
    """

    def __init__(self, key: bytes):
        self._key = key
        self._count = 0

    def _next_mac(self, body: bytes) -> bytes:
        mac = hmac.digest(self._key, self._count.to_bytes(8, "little") + body, "sha256")
        self._count += 1
        return mac

    def close(self, body: bytes) -> bytes:
        """`body` with the MAC behind it."""
        return body + self._next_mac(body)

    def open(self, sealed: bytes) -> bytes:
        """The body of a frame that `close` made. Raises ProtocolError."""
        body, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._next_mac(body)):
            raise ProtocolError(
                "a control frame has a wrong MAC: somebody between the nodes has altered, replayed, removed or added "
                "a frame"
            )
        return body
