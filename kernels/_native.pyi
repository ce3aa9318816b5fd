from collections.abc import Buffer, Sequence
from typing import TypedDict, final

#: n_slots, max_rows, n_layers, n_q_heads, n_kv_heads, head_size, index of the activation dtype in ACT_DTYPES
_Geometry = Sequence[int]

# ---- attention (attention.h), for tests and measurements; dtypes and ISAs by name ----

def isa_best() -> str: ...
def isa_supported() -> list[str]: ...
def isa_of_kernels(isa: str, kv_dtype: str, /) -> str: ...
def chunk_bytes(kv_dtype: str, head_size: int, /) -> int: ...
def kv_append(isa: str, kv_dtype: str, chunks: Buffer, first_token_slot: int, k: Buffer, v: Buffer, /) -> None: ...
def kv_attend(
    isa: str,
    kv_dtype: str,
    chunks: Buffer,
    order: Buffer | None,
    first_token: int,
    q: Buffer,
    q_pos: int,
    window: int,
    acc: Buffer,
    m: Buffer,
    l: Buffer,
    o: Buffer | None = None,
    /,
) -> None: ...
def attend_merge(isa: str, m: Buffer, l: Buffer, acc: Buffer, m2: Buffer, l2: Buffer, acc2: Buffer, /) -> None: ...
def attend_finish(isa: str, o: Buffer, acc: Buffer, l: Buffer, act_dtype: str, /) -> None: ...
def load_act(isa: str, dst: Buffer, src: Buffer, act_dtype: str, scale: float, /) -> None: ...

# ---- the read-only roofline (roofline.h), for measurements ----

def read_seconds(buffer: Buffer, cpus: Sequence[int], passes: int = 1, /) -> float:
    """Time in which a thread on each of `cpus`, each with its share, read the 64-byte aligned `buffer` `passes` times.

    Raises ValueError, OSError if a thread cannot be started on its cpu.
    """

def multiply_rate(instruction: str, rounds: int, /) -> float:
    """How many of 'vfmadd231ps', 'vdpbf16ps' or 'vpdpbusd' of 64 bytes the calling thread's core does a second.

    Raises ValueError where it has none such.
    """

# ---- the R-engine (engine.h, memory.h) ----

def bind_memory(node: int, /) -> None:
    """Let this thread, and those it starts from now on, take memory of NUMA node `node` only. Raises OSError."""

def page_bytes(geometry: _Geometry, kv_dtype: int, /) -> int:
    """Bytes of one page, all layers and KV heads. `kv_dtype` is an index of region.contract.KV_DTYPES."""

class _LinkStats(TypedDict):
    calls: int
    refused: int
    rows: int
    kv_bytes: int
    busy_ns: int
    pages_total: int
    pages_used: int
    seqs: int

@final
class REngine:
    """Threads that serve the calls of all their links without entering Python (fd_engine_t).

    `kv_bytes` is the budget that all leases share, rounded down to whole hugetlb pages where those are used. `isa`
    None: FASTDECODE_ISA, else the best. `cpus`: one CPU a thread to pin it to. An idle thread spins for `spin_us`
    before it sleeps.

    `huge_pages`: of the arenas, "madvise" (transparent ones), "hugetlb" or "off". `prefault`: the threads fault a
    lease's arena in between calls, from the moment it is granted. `trim_idle_s`: after so many seconds without a call a
    link's free pages go back to the OS, 0: never.

    Raises ValueError for what cannot be had, RuntimeError if threads cannot start or there are too few hugetlb pages.
    """

    def __new__(
        cls,
        threads: int,
        kv_bytes: int,
        isa: str | None = None,
        cpus: Sequence[int] | None = None,
        spin_us: int = 100,
        huge_pages: str = "madvise",
        prefault: bool = False,
        trim_idle_s: float = 0.0,
    ) -> REngine: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def kv_free(self) -> int:
        """Bytes of the budget that no lease holds."""
    @property
    def eventfd(self) -> int:
        """Wakes the engine. For callers within this process; a peer is given REngineLink.eventfd."""
    def add_link(
        self,
        region: Buffer,
        geometry: _Geometry,
        kv_dtype: int,
        n_pages: int,
        max_seqs: int,
        softmax_scale: float,
        windows: Sequence[int],
        notify: object | None = None,
    ) -> REngineLink:
        """Grant a lease and serve the calls that appear in `region` (writable, kept alive until close; the caller has
        written its header).

        `windows`: sliding window of each layer, 0: none. `notify`: PyCapsule "fastdecode.notify", called by an engine
        thread when a reply bell has been rung. Raises ValueError for bad numbers, MemoryError if the KV-cache has no
        room for `n_pages`.
        """
    def close(self) -> None:
        """Join the threads. Raises RuntimeError while links are open. Idempotent."""

@final
class REngineLink:
    """One link that an REngine serves, and its lease. Methods raise RuntimeError once closed."""

    @property
    def eventfd(self) -> int:
        """Wakes the engine; the one to hand to a peer, whose misuse of it harms no other link. Closed by `close`."""
    @property
    def prefault(self) -> tuple[int, int, int]:
        """Bytes of the arena faulted in ahead, how many are to be (0: none), errno that stopped it or 0."""
    def free(self, seq_index: int, tag: int, /) -> None:
        """Give a sequence's pages back; an empty sequence has none. ValueError: wrong tag or index."""
    def trim(self, seq_index: int, tag: int, length: int, /) -> None:
        """Roll a sequence back to its first `length` tokens. ValueError: wrong tag or index, or it has fewer."""
    def fork(self, src: int, src_tag: int, dst: int, dst_tag: int, length: int, /) -> None:
        """Let the empty `dst` share the first `length` tokens of `src`. Errors as `trim`."""
    def pages(self, seq_index: int, tag: int, /) -> list[int]:
        """The numbers of a sequence's pages, in order; neighbours lie side by side. ValueError: wrong tag or index."""
    def stats(self) -> _LinkStats: ...
    def close(self) -> None:
        """Leave the engine and free the lease; waits for a call in progress. Idempotent."""
