"""One end of an RDMA connection, over pyverbs: device, protection domain, registration, queue pair, completion events.

pyverbs of Debian 12 (rdma-core 44) and pyverbs of PyPI keep their constants in different modules; `_Enums` hides the
difference. pyverbs opens and closes all objects here, but C posts the work requests: `rdma_poster.h` says why, and
`_queue_pair_field` how the poster finds the queue pair.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import importlib
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from ._native import verbs_fds
from .base import TransportError
from .messages import EndpointMessage
from .rdma_devices import SYSFS, PortGid, RdmaPort, describe_memlock, list_ports, read_sysfs

log = logging.getLogger(__name__)

INSTALL = (
    "Debian and Ubuntu have the package python3-pyverbs, for the system's Python and rdma-core; "
    "pip install 'fastdecode[rdma]' builds pyverbs and needs rdma-core of exactly the same version"
)

#: Work requests in a send queue, unless the device allows fewer.
_DEPTH = 512
_INLINE_BYTES = 64
#: The device waits 4.096 us * 2^14 for each of 1 + 6 tries (IBTA vol. 1, 9.7.6.1.3), so it reports a dead peer within
#: half a second. Some devices take a retry count of 7 as "retry without end".
_TIMEOUT, _RETRIES = 14, 6
_HOPS = 64


class _Enums:
    """The constants of verbs as integers; the attributes have the names of the C API."""

    def __init__(self) -> None:
        """Raises ImportError."""
        try:
            module = importlib.import_module("pyverbs.enums")  # rdma-core before 50
        except ImportError:
            module = importlib.import_module("pyverbs.libibverbs_enums")
        # Depending on the Cython that built pyverbs, a constant is an attribute of the module or of an enum class in
        # it.
        self._holders = [module, *(value for value in vars(module).values() if isinstance(value, enum.EnumMeta))]

    def __getattr__(self, name: str) -> int:
        for holder in self._holders:
            if hasattr(holder, name):
                return int(getattr(holder, name))
        raise AttributeError(f"pyverbs lacks {name}")


class Verbs:
    """The modules of pyverbs that this module uses, as attributes."""

    def __init__(self) -> None:
        """Raises ImportError, AttributeError."""
        for name in ("addr", "cq", "device", "mr", "pd", "pyverbs_error", "qp"):
            setattr(self, name, importlib.import_module(f"pyverbs.{name}"))
        self.enums = _Enums()
        self.Error = self.pyverbs_error.PyverbsError

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"pyverbs lacks {name}")

    def open(self, device: str) -> Any:
        """Open a new context on the device. Raises TransportError."""
        try:
            return self.device.Context(name=device)
        except self.Error as error:
            raise TransportError(f"RDMA device {device} cannot be opened: {error}") from None

    def active_mtu(self, port: RdmaPort) -> int:
        """The active MTU of the port in bytes. Raises TransportError."""
        with self.open(port.device) as context:
            mtu: int = 128 << context.query_port(port.number).active_mtu
            return mtu


@cache
def load() -> Verbs:
    """Import pyverbs. Raises TransportError, whose message says how to install pyverbs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return Verbs()
    except (ImportError, AttributeError) as error:
        raise TransportError(f"rdma:// needs pyverbs, which cannot be used here ({error}): {INSTALL}") from None
    finally:  # the import of pyverbs configures the root logger
        root.handlers[:] = handlers
        root.setLevel(level)


def _queue_pair_field(qp: Any) -> ctypes.c_uint64:
    """The field of a pyverbs QP that holds the address of its struct ibv_qp (libibverbs).

    pyverbs has no function for it. In every version so far (44 to 59) the pointer is the first field of class QP after
    the fields of its base class. `verbs_fds` checks the result without trusting the address.
    """
    base = type(qp).__base__
    assert base is not None  # only `object` has none
    return ctypes.c_uint64.from_address(id(qp) + base.__basicsize__)


def _destroy_queue_pair(qp: Any) -> None:
    """Destroy the queue pair behind a pyverbs QP, whose own `close` then does nothing.

    A driver may take long over a queue pair whose last packets have not left: the driver of Linux's software device
    (rxe) waits up to 50 seconds for them. pyverbs would hold the GIL meanwhile, ctypes does not.
    """
    field = _queue_pair_field(qp)
    error = ctypes.CDLL("libibverbs.so.1").ibv_destroy_qp(ctypes.c_void_p(field.value))
    field.value = 0
    if error:
        log.warning("an RDMA queue pair cannot be destroyed: %s", os.strerror(error))


class Endpoint:
    """A queue pair and the registration of one region.

    Through the queue pair this end writes to the peer's region, and the peer writes to this end's region and to nothing
    else.
    """

    def __init__(self, region: memoryview, port_gid: PortGid):
        """Registers `region`, which must stay mapped until `close`. Raises TransportError."""
        self._verbs = verbs = load()
        self._port_gid = port_gid
        self._loop: asyncio.AbstractEventLoop | None = None
        self._psn = secrets.randbelow(1 << 24)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._closing = ExitStack()
        try:
            self._open(len(region))
        except verbs.Error as error:
            self._closing.close()
            raise TransportError(f"{port_gid.port} cannot serve a link: {error}") from None
        except BaseException:
            self._closing.close()
            raise

    def _open(self, size: int) -> None:
        verbs, enums, port_gid = self._verbs, self._verbs.enums, self._port_gid
        on_close = self._closing.callback
        self._context = verbs.open(port_gid.port.device)
        on_close(self._context.close)
        limits = self._context.query_device()
        port = self._context.query_port(port_gid.port.number)
        self._mtu, self._max_message = port.active_mtu, min(port.max_msg_sz, 1 << 30)
        self._depth = min(_DEPTH, limits.max_qp_wr, limits.max_cqe)

        domain = verbs.pd.PD(self._context)
        on_close(domain.close)
        rights = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        try:
            self._registration = verbs.mr.MR(domain, size, rights, address=self._address)
        except verbs.Error as error:
            raise TransportError(
                f"a region of {size >> 10} KiB cannot be registered with {port_gid.port.device}: {error}; "
                f"{describe_memlock()}"
            ) from None
        on_close(self._registration.close)
        self._channel = verbs.cq.CompChannel(self._context)
        on_close(self._channel.close)
        self._completions = verbs.cq.CQ(self._context, self._depth, None, self._channel, 0)
        on_close(self._completions.close)
        cap = verbs.qp.QPCap(
            max_send_wr=self._depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=_INLINE_BYTES
        )
        wanted = verbs.qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=cap, sq_sig_all=False
        )
        self._pair = verbs.qp.QP(domain, wanted)
        on_close(self._pair.close)
        try:
            self._fds = verbs_fds(_queue_pair_field(self._pair).value, self._pair.qp_num)
        except ValueError as error:
            raise TransportError(f"this version of pyverbs is not known to fastdecode ({error}): {INSTALL}") from None
        on_close(_destroy_queue_pair, self._pair)

    @property
    def description(self) -> EndpointMessage:
        """The message with which the peer can connect to this end."""
        port, gid = self._port_gid.port, self._port_gid.gid
        return EndpointMessage(
            qpn=self._pair.qp_num,
            psn=self._psn,
            gid=(gid.address if gid else IPv6Address(0)).packed.hex(),
            lid=port.lid,
            mtu=128 << self._mtu,
            rkey=self._registration.rkey,
            address=self._address.to_bytes(8).hex(),
        )

    def connect(self, peer: EndpointMessage) -> tuple[int, int, int, int, int, int, int]:
        """Connect to the peer's queue pair. Returns `verbs` of Port and of RPort.start (see _native.pyi).

        Raises TransportError.
        """
        verbs, enums, port_gid = self._verbs, self._verbs.enums, self._port_gid
        attributes = verbs.qp.QPAttr(port_num=port_gid.port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE
        attributes.path_mtu = min(self._mtu, (peer.mtu >> 8).bit_length())  # enum ibv_mtu: 1 is 256 bytes
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.qpn, peer.psn, self._psn
        attributes.timeout, attributes.retry_cnt = _TIMEOUT, _RETRIES
        try:
            attributes.ah_attr = self._path_to(peer)
            self._pair.to_rts(attributes)
        except verbs.Error as error:
            raise TransportError(f"{port_gid.port} cannot connect to the peer's queue pair: {error}") from None
        return (
            _queue_pair_field(self._pair).value,
            self._pair.qp_num,
            self._registration.lkey,
            peer.rkey,
            int(peer.address, 16),
            self._max_message,
            self._depth,
        )

    def _path_to(self, peer: EndpointMessage) -> Any:
        address, port, gid = self._verbs.addr, self._port_gid.port, self._port_gid.gid
        if gid is None:
            return address.AHAttr(port_num=port.number, dlid=peer.lid)
        route = address.GlobalRoute(
            dgid=address.GID(IPv6Address(bytes.fromhex(peer.gid)).exploded), sgid_index=gid.index
        )
        route.hop_limit = _HOPS
        return address.AHAttr(port_num=port.number, dlid=peer.lid, is_global=1, gr=route)

    # ---- events ----

    def watch(self, reap: Callable[[], object], fail: Callable[[str], object]) -> None:
        """Let the event loop call `reap()` when completions arrive, and `fail(reason)` when the device fails."""
        self._reap, self._fail = reap, fail
        self._loop = asyncio.get_running_loop()
        for fd, react in zip(self._fds, (self._on_completions, self._on_device_event), strict=True):
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, react)
        self._completions.req_notify()
        reap()  # completions that arrived before req_notify raise no event

    def unwatch(self) -> None:
        """Remove the callbacks of `watch` from the event loop. Idempotent."""
        if self._loop is not None:
            for fd in self._fds:
                self._loop.remove_reader(fd)
        self._loop = None

    def _on_completions(self) -> None:
        try:
            self._channel.get_cq_event(self._completions)
        except self._verbs.Error:  # there was no event after all
            return
        self._completions.ack_events(1)
        self._completions.req_notify()  # before `reap`: a completion that arrives in between must raise an event
        self._reap()

    def _on_device_event(self) -> None:
        enums = self._verbs.enums
        try:
            event = self._context.get_async_event()
        except self._verbs.Error:
            return
        kind = event.event_type
        event.ack()
        fatal = {
            enums.IBV_EVENT_DEVICE_FATAL: "the RDMA device has failed",
            enums.IBV_EVENT_CQ_ERR: "the RDMA completion queue has overflowed",
            enums.IBV_EVENT_QP_FATAL: "the RDMA queue pair has failed",
            enums.IBV_EVENT_QP_REQ_ERR: "the peer made an invalid RDMA request",
            enums.IBV_EVENT_QP_ACCESS_ERR: "the peer made an RDMA request that it has no right to",
        }
        if kind in fatal:
            self._fail(fatal[kind])
        elif kind == enums.IBV_EVENT_PORT_ERR and not self._port_is_active():
            self._fail(f"the link of {self._port_gid.port} is down")

    def _port_is_active(self) -> bool:
        try:
            state = self._context.query_port(self._port_gid.port.number).state
            return bool(state == self._verbs.enums.IBV_PORT_ACTIVE)
        except self._verbs.Error:
            return False

    def close(self) -> None:
        """Destroy the queue pair and the registration, which may take long (`_destroy_queue_pair`).

        To be called after `unwatch` and the poster's `close`, on a thread that may block. Idempotent.
        """
        try:
            self._closing.close()
        except self._verbs.Error as error:  # the kernel frees the rest when this process ends
            log.warning("%s does not free everything of a link: %s", self._port_gid.port, error)


def report(root: Path = SYSFS) -> str:
    """A text for users: the first line says whether RDMA is usable, and then each port has a line.

    A port's line gives its state, link layer, MTU and GIDs.
    """
    ports = list_ports(root)
    verbs: Verbs | None = None
    missing = ""
    try:
        verbs = load()
    except TransportError as error:
        missing = str(error)
    if not ports:
        verdict = "no devices" + (f"; {missing}" if missing else "")
    elif missing:
        verdict = f"not usable: {missing}"
    elif not any(port.active for port in ports):
        verdict = "not usable: no port is active"
    else:
        verdict = f"usable, {describe_memlock()}"
    return "\n".join([verdict, *(_describe(port, verbs) for port in ports)])


def _describe(port: RdmaPort, verbs: Verbs | None) -> str:
    state = "active" if port.active else "down"
    layer = "RoCE" if port.ethernet else f"InfiniBand, LID {port.lid}"
    gids = ", ".join(map(str, port.gids)) or "none"
    return f"{port}: {state}, {layer}, MTU {_mtu(port, verbs)}, GIDs {gids}"


def _mtu(port: RdmaPort, verbs: Verbs | None) -> str:
    """The port's active MTU from pyverbs; without pyverbs, the MTU of its network interface."""
    if verbs is not None:
        try:
            return str(verbs.active_mtu(port))
        except TransportError as error:
            return f"unknown ({error})"
    interfaces = {g.interface for g in port.gids if g.interface}
    return ", ".join(f"{read_sysfs(Path('/sys/class/net', i, 'mtu'))} of {i}" for i in sorted(interfaces)) or "unknown"
