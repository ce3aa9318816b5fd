"""The kernels of another architecture, run under emulation, behind the same functions as `kernel_calls`'s.

`NEON` and `SCALAR` are aarch64's, run by qemu-user from programs that a cross compiler builds. A test that gets its
kernels from `kernels(isa)` holds them to the same bounds as this machine's own.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from session_folder import made_once
from sources.folders import INCLUDES, ROOT

from attention import kernel_calls
from fastdecode.region.contract import ACT_DTYPES, KV_DTYPES

NEON, SCALAR = "neon under qemu", "scalar under qemu"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
DEBIAN = "Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user"
FLAGS = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-ffp-contract=fast"]
PEER = [ROOT / "tests/c/kernels_peer.c", *sorted(ROOT.glob("kernels/attention/attention_*.c"))]
PEER += [ROOT / "kernels/attention/dispatch.c", ROOT / "kernels/cpu/isa.c"]

_missing = [program for program in (COMPILER, EMULATOR) if not shutil.which(program)]
needs_emulator = (
    pytest.mark.tools,
    pytest.mark.skipif(bool(_missing), reason=f"needs {' and '.join(_missing)} ({DEBIAN})"),
)


def is_emulated(isa: str) -> bool:
    return isa in (NEON, SCALAR)


def params(isas: list[str]) -> list:
    """For pytest.mark.parametrize: the emulated ones are skipped where there is no emulator."""
    return [pytest.param(isa, marks=needs_emulator if is_emulated(isa) else ()) for isa in isas]


def neighbours(isas: list[str]) -> list:
    """For pytest.mark.parametrize: pairs in which each ISA is first once and second once. What both of each pair
    have in common, all have."""
    pairs = itertools.pairwise([*isas, isas[0]])
    return [pytest.param(*pair, marks=needs_emulator if any(map(is_emulated, pair)) else ()) for pair in pairs]


# ---- building for aarch64 ----


def cross_compile(source: Path) -> Path:
    return made_once(f"aarch64/{source.stem}.o", partial(_compile, ["-c", source]))


def cross_build(sources: list[Path]) -> Path:
    """A program named after the first source."""
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(cross_compile, sources))
    return made_once(f"aarch64/{sources[0].stem}", partial(_compile, ["-static", *objects, "-pthread", "-lm"]))


def _compile(arguments: list[str | Path], target: Path) -> None:
    subprocess.run([COMPILER, *FLAGS, *INCLUDES, *arguments, "-o", target], check=True)


# ---- tests/c/kernels_peer.c ----

_REQUEST = struct.Struct("<16s 15I 2f")
_APPEND, _ATTEND, _MERGE, _FINISH, _LOAD_ACT = range(5)


class _Emulated:
    """Takes the arguments of `kernel_calls`'s functions, but does not check them."""

    def __init__(self) -> None:
        self.peer = subprocess.Popen([EMULATOR, cross_build(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self.close)

    def close(self) -> None:
        self.peer.stdin.close()
        self.peer.stdout.close()
        self.peer.wait()

    def ask(
        self,
        isa: str,
        op: int,
        dtype: int,
        written: list[np.ndarray],
        read: list[np.ndarray],
        *,
        head_size: int = 0,
        rows: int = 0,
        token: int = 0,
        heads: int = 0,
        group: int = 0,
        q_len: int = 0,
        q_pos: int = 0,
        window: int = 0,
        v_size: int = 0,
        segment: int = 0,
        v_in_k: int = 0,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        buffers = [*written, *read]
        assert all(x.flags.c_contiguous for x in buffers)
        numbers = (op, dtype, len(buffers), len(written), head_size, rows, token)
        numbers += (heads, group, q_len, q_pos, window, v_size, segment, v_in_k)
        self.peer.stdin.write(_REQUEST.pack(isa.split()[0].encode(), *numbers, scale, softcap))
        for x in buffers:
            self.peer.stdin.write(struct.pack("<I", x.nbytes) + x.tobytes())
        self.peer.stdin.flush()
        for x in written:
            reply = self.peer.stdout.read(x.nbytes)
            assert len(reply) == x.nbytes, f"{isa}: the emulated program has died"
            x[...] = np.frombuffer(reply, x.dtype).reshape(x.shape)

    def kv_append(
        self, isa: str, kv_dtype: str, chunks: np.ndarray, slot: int, k: np.ndarray, v: np.ndarray | int
    ) -> None:
        dtype, (rows, head_size) = KV_DTYPES.index(kv_dtype), k.shape
        v_in_k = isinstance(v, int)
        sizes = {"head_size": head_size, "v_size": v if v_in_k else v.shape[1], "v_in_k": int(v_in_k)}
        self.ask(isa, _APPEND, dtype, [chunks], [k] if v_in_k else [k, v], rows=rows, token=slot, **sizes)

    def kv_attend(
        self,
        isa: str,
        kv_dtype: str,
        chunks: np.ndarray,
        order: list[int] | None,
        first_token: int,
        q: np.ndarray,
        q_pos: int,
        window: int,
        acc: np.ndarray,
        m: np.ndarray,
        l: np.ndarray,  # noqa: E741
        o: np.ndarray | None = None,
        *,
        segment: int = 0,
        v_in_k: int = 0,
        softcap: float = 0.0,
        slopes: np.ndarray | None = None,
        sinks: np.ndarray | None = None,
    ) -> None:
        heads, q_len, group, head_size = q.shape
        v_size = acc.shape[3]
        none = np.empty(0, np.float32)
        if order is None:
            chunk_bytes = kernel_calls.chunk_bytes(kv_dtype, head_size, v_size, bool(v_in_k))
            order = list(range(chunks.nbytes // chunk_bytes // heads))
        self.ask(
            isa,
            _ATTEND,
            KV_DTYPES.index(kv_dtype),
            [acc, m, l, none if o is None else o],
            [chunks, np.array(order, np.uint32), q, *(none if x is None else x for x in (slopes, sinks))],
            head_size=head_size,
            v_size=v_size,
            segment=segment,
            v_in_k=v_in_k,
            softcap=softcap,
            token=first_token,
            heads=heads,
            group=group,
            q_len=q_len,
            q_pos=q_pos,
            window=window,
        )

    def attend_merge(self, isa: str, m, l, acc, m2, l2, acc2) -> None:  # noqa: E741
        self.ask(isa, _MERGE, 0, [m, l, acc], [m2, l2, acc2], rows=len(acc), head_size=acc.shape[1])

    def attend_finish(self, isa: str, o: np.ndarray, acc: np.ndarray, l: np.ndarray, act_dtype: str):  # noqa: E741
        dtype, (rows, head_size) = ACT_DTYPES.index(act_dtype), acc.shape
        self.ask(isa, _FINISH, dtype, [o], [acc, l], rows=rows, head_size=head_size)

    def load_act(self, isa: str, dst: np.ndarray, src: np.ndarray, act_dtype: str, scale: float) -> None:
        self.ask(isa, _LOAD_ACT, ACT_DTYPES.index(act_dtype), [dst], [src], scale=scale)


_emulated = functools.cache(_Emulated)


def kernels(isa: str):
    """What runs an ISA: `kernel_calls` or an emulator. It has kv_append, kv_attend, attend_* and load_act."""
    return _emulated() if is_emulated(isa) else kernel_calls
