"""The R-engine serves calls while its process's Python is stuck."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

from attention.rengine_peer import KV_FP32, Geometry, Peer

from fastdecode.kernels import _native
from fastdecode.region._native import init_region_header

G = Geometry(n_slots=1, max_rows=4, n_layers=1)

#: The S side, a process of its own: it arms steps as fast as they are answered, all but the first to be refused, and
#: prints the time of each verdict.
S_SIDE = """
import sys, time
from attention.rengine_peer import Geometry, Peer
from fastdecode.region.contract import Status
peer = Peer(Geometry(n_slots=1, max_rows=4, n_layers=1), int(sys.argv[1]))
peer.wake_fd = int(sys.argv[2])
peer.table(0, [(0, 1, 0, 1, 1)])
times = []
end = time.monotonic() + 60
print("ready", flush=True)
while not peer.map[72] and time.monotonic() < end:
    assert peer.arm(0, 1, 1, 1).status == (Status.BAD_SEQUENCE if times else Status.OK)
    times.append(time.monotonic())
print(*times)
"""


def test_calls_go_on_while_the_gil_is_held():
    fd = os.memfd_create("region")
    peer = Peer(G, fd)
    init_region_header(peer.map, G.tuple())
    engine = _native.REngine(1, 1 << 24)
    lease = engine.add_link(peer.map, G.tuple(), KV_FP32, 4, 4, 1.0, [0])
    command = [sys.executable, "-c", S_SIDE, str(fd), str(lease.eventfd)]
    ticks, stop = [], threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    witness = threading.Thread(target=tick)
    child = subprocess.Popen(command, pass_fds=[fd, lease.eventfd], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        witness.start()
        while not ticks:
            time.sleep(0.001)
        ticks.append(first := time.monotonic())
        ctypes.PyDLL(None).usleep(3_000_000)  # PyDLL, unlike CDLL, keeps the GIL
        ticks.append(last := time.monotonic())
        peer.map[72] = 1  # a byte of the header page that nobody uses: stop
        served = [float(t) for t in child.communicate(timeout=300)[0].split()]
    finally:
        stop.set()
        child.kill()
        child.wait()
        child.stdout.close()
        if witness.ident:
            witness.join()
        lease.close()
        engine.close()
        os.close(fd)
    around = sorted(t for t in ticks if first <= t <= last)
    begin, end = max(pairwise(around), key=lambda pair: pair[1] - pair[0])
    assert end - begin > 2.9, "the GIL was not held"
    assert len([t for t in served if begin < t < end]) > 10  # even if the machine is busy


#: Three threads use whichever link is open, while the main thread closes it and opens the next one: a thousand times,
#: or for 20 seconds on a busy machine.
CLOSER = """
import mmap, sys, threading, time
from attention.rengine_peer import KV_FP32, Geometry, Peer
from fastdecode.kernels import _native
from fastdecode.region._native import init_region_header
g = Geometry(n_slots=1, max_rows=4, n_layers=1)
peer = Peer(g, int(sys.argv[1]))
init_region_header(peer.map, g.tuple())
engine = _native.REngine(1, 1 << 24)
sys.setswitchinterval(1e-6)
open_link = lambda: engine.add_link(peer.map, g.tuple(), KV_FP32, 4, 4, 1.0, [0])
link, over, refusals = open_link(), threading.Event(), set()
def use():
    while not over.is_set():
        try:
            link.free(0, 1)
        except (ValueError, RuntimeError) as error:
            refusals.add(str(error))
users = [threading.Thread(target=use) for _ in range(3)]
for user in users: user.start()
end = time.monotonic() + 20
for _ in range(1000):
    if time.monotonic() > end:
        break
    time.sleep(0.0002)
    link.close()
    link = open_link()
over.set()
for user in users: user.join()
link.close()
engine.close()
print(*refusals, sep="\\n")
"""


def test_a_link_may_be_closed_while_other_threads_use_it():
    fd = os.memfd_create("region")
    try:
        child = subprocess.run(
            [sys.executable, "-c", CLOSER, str(fd)], pass_fds=[fd], capture_output=True, text=True, timeout=200
        )
    finally:
        os.close(fd)
    assert child.returncode == 0, child.stderr
    assert "the link is closed" in child.stdout
