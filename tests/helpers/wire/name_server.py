"""A name server (RFC 1035), and a namespace whose resolver asks it."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
import subprocess
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.53"
_A, _AAAA = 1, 28
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183  # flags: a response, recursion wanted and available


class NameServer(asyncio.DatagramProtocol):
    """Answers with the `addresses` of a name, IPv4 and IPv6; they may be changed."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}

    async def start(self) -> None:
        """Listen in a namespace that `enter` has set up."""
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, local_addr=(ADDRESS, 53))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, asker: Any) -> None:
        labels, at = [], 12
        while size := data[at]:
            labels.append(data[at + 1 : at + 1 + size].decode())
            at += 1 + size
        question = data[12 : at + 5]
        (kind,) = struct.unpack_from("!H", data, at + 1)
        known = self.addresses.get(".".join(labels))
        found = [a for a in map(ipaddress.ip_address, known or ()) if kind == {4: _A, 6: _AAAA}[a.version]]
        flags = _NO_SUCH_NAME if known is None else _ANSWER
        answer = struct.pack("!2s5H", data[:2], flags, 1, len(found), 0, 0) + question
        for address in found:  # at the question's name, of class IN, to be kept for no time
            answer += struct.pack("!3HIH", 0xC00C, kind, 1, 0, len(address.packed)) + address.packed
        self._transport.sendto(answer, asker)


def enter(folder: Path) -> None:
    """Let this process, which `unshare --net --mount` has started, and its children ask the name server."""
    (configuration := folder / "resolv.conf").write_text(f"nameserver {ADDRESS}\noptions ndots:0 timeout:1\n")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--bind", configuration, "/etc/resolv.conf"], check=True)
