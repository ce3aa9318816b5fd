"""An Ethernet switch that delays every frame, for kernels without sch_netem: `python delaying_switch.py US NAME...`.

Each port is a TAP device of that name, which the switch makes and another network namespace may take over. It prints
"ready" once all devices are there, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
_MOST_BYTES = 1 << 17  # of a frame
_AT_ONCE = 64  # frames that are taken from one port before the others have their turn


def port(name: str) -> int:
    """A file descriptor whose frames are those of a new TAP device."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def switch(ports: list[int], seconds: float) -> None:
    """Forward frames, each `seconds` after it came, until standard input ends."""
    at: dict[bytes, int] = {}  # the port behind which an address was seen
    waiting: deque[tuple[float, int, bytes]] = deque()  # when a frame is due, the port it came from, the frame
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ports], [], [], timeout)
        if sys.stdin in ready:
            return
        for source in ready:
            for _ in range(_AT_ONCE):
                try:
                    frame = os.read(source, _MOST_BYTES)
                except BlockingIOError:
                    break
                waiting.append((time.monotonic() + seconds, source, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            at[frame[6:12]] = source
            target = at.get(frame[:6])
            for fd in [target] if target is not None else ports:
                if fd != source:
                    with contextlib.suppress(OSError):  # a switch drops what a port cannot take
                        os.write(fd, frame)


if __name__ == "__main__":
    taps = [port(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    switch(taps, float(sys.argv[1]) * 1e-6)
