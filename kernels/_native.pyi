from collections.abc import Buffer, Sequence
from typing import TypedDict, Unpack, final

#: n_slots, max_rows, n_layers, n_q_heads, n_kv_heads, head_size, index of the activation dtype in ACT_DTYPES, v_size,
#: v_in_k, index_heads, index_size, index_topk
_Geometry = Sequence[int]

#: Most threads of an REngine.
MAX_THREADS: int
MAX_RANKS: int

# ---- instruction sets (cpu/isa.h) ----

def isa_best() -> str:
    """The best ISA that this CPU and OS support."""

def isa_supported() -> list[str]:
    """The ISAs that this CPU and OS support, slowest first."""

# ---- the roofline of memory reads (roofline.h), for measurements ----

def read_seconds(
    buffer: Buffer, cpus: Sequence[int], passes: int = 1, variant: int = 0, cold: bool = False, /
) -> float:
    """Seconds to read `buffer` (64-byte aligned) `passes` times, shared among one thread on each of `cpus`.

    `variant` is the index of one of `read_variants()`. If `cold`, no cache has the buffer at first. Raises ValueError
    for a bad buffer, CPU or variant, OSError if a thread cannot be started on its CPU.
    """

def read_variants() -> list[str]:
    """How each variant of `read_seconds` reads: its streams a thread and how far ahead it prefetches."""

# ---- the loops that the S-Part's threads share (cpu/parallel.h), for measurements ----

def time_loops(on: bool, /) -> None:
    """Add up the times of loops from now on, from zero, or stop."""

def loop_times() -> dict[str, tuple[int, float, float, float, float]]:
    """For each kind of loops: how many, their seconds, and the seconds of all threads: late, done and busy. A thread is
    late until it takes its first part, and done after its last one, until the loop ends."""

# ---- quantised linears (linears/linear.h) ----

@final
class QuantisedLinear:
    """A matrix [outs, ins] in `bits` (4 or 8) a number, in the layout of fd_linear_t; `group` is a multiple of 32.

    `passes` 1 rounds activations to 8 bits, or with AVX2 to 7 if a matrix of 8 bits is transformed; 2 rounds them to
    15. `hadamard`: the matrix is transformed; that is for one pass, with 8 bits for the zero 128 and no mins, with 4
    bits for no table. The buffers, C-contiguous, are kept: weights; scales and mins (or None), fp16; units and bias (or
    None), fp32; table (or None), the 16 numbers, uint8 up to 32, that 4-bit codes stand for; negated_sums, int16, if
    the matrix has 8 bits, is transformed and `wants_signed()`, else None. The ISA is the one in FASTDECODE_ISA, else
    the best. Raises ValueError for sizes that do not fit.
    """

    def __new__(
        cls,
        outs: int,
        ins: int,
        bits: int,
        group: int,
        zero: int,
        passes: int,
        hadamard: bool,
        weights: Buffer,
        scales: Buffer,
        units: Buffer,
        mins: Buffer | None,
        bias: Buffer | None,
        table: Buffer | None,
        negated_sums: Buffer | None,
    ) -> QuantisedLinear: ...
    @staticmethod
    def wants_signed() -> bool:
        """Whether the ISA's kernels take transformed matrices of 8 bits as signed numbers, q - 128, with the negated
        sums of their blocks."""
    @property
    def isa(self) -> str:
        """The ISA of the kernels."""
    def run(self, x: Buffer, y: Buffer, threads: int, width: int = ..., first: int = 0, /) -> None:
        """Write x Wᵀ + b of x [rows, ins] to the columns of y [rows, width] from `first` on, both fp32; `width` is outs
        if it is left out. Other Python threads run meanwhile."""
    def read_rows(self, ids: Buffer, first: int, y: Buffer, /) -> None:
        """Write the rows `ids` - `first` of W to y [n, ins] fp32; ids is int64 [n]. Rows that W lacks are left out.
        Other Python threads run meanwhile. Raises ValueError for buffers of other sizes."""

#: The most columns of `quantise` with a factor.
QUANTISE_COLUMNS: int

def quantise(
    x: int,
    dtype: int,
    bits: int,
    rows: int,
    columns: int,
    stride: int,
    hadamard: bool,
    levels: bool,
    q: int,
    q_stride: int,
    scales: int,
    mins: int,
    scales_stride: int,
    factor: int,
    errors: int,
    groups: int,
    threads: int,
    /,
) -> None:
    """Round a matrix to numbers of 4 or 8 bits (fd_quantise_t). Arguments are addresses, 0 for none, and sizes; nothing
    is checked. `dtype` is an index of region.contract.ACT_DTYPES. Other Python threads run meanwhile. The ISA is the
    one in FASTDECODE_ISA, else the best."""

class RowDraws:
    """Draws the next tokens of rows of logits (draw_rows.h). Arguments are addresses of C-contiguous arrays, 0 for
    none, and sizes; nothing is checked. Other Python threads run meanwhile. The ISA is the one in FASTDECODE_ISA, else
    the best.
    """

    def __new__(cls) -> RowDraws: ...
    @property
    def isa(self) -> str:
        """The ISA that the function is compiled for."""
    def run(
        self,
        logits: int,
        dtype: int,
        rows: int,
        n: int,
        vocab: int,
        masks: int,
        mask_words: int,
        biased: int,
        bias: int,
        seen: int,
        penalty: int,
        tokens: int,
        flags: int,
        weights: int,
        threads: int,
        /,
    ) -> None:
        """Draw `n` rows, described by the fd_draw_row_t at `rows`, from logits [n, vocab]. `dtype` is an index of
        region.contract.ACT_DTYPES, fp32's or bf16's. Raises MemoryError."""

class Dense16Linear:
    """Rows times a matrix of 16-bit numbers (dense16.h). `dtype` is that of the matrix, fp16 or bf16, and `act` that of
    the rows, fp32 or bf16, as indices of region.contract.ACT_DTYPES; `weights` come from `pack`, and `bias` is fp32
    [outs] or None. The ISA is the one in FASTDECODE_ISA, else the best. Raises ValueError if it has no such products,
    or for buffers of other sizes.
    """

    def __new__(
        cls, dtype: int, act: int, outs: int, ins: int, weights: Buffer, bias: Buffer | None
    ) -> Dense16Linear: ...
    @staticmethod
    def supports(dtype: int, act: int, /) -> bool:
        """Whether the ISA has such products."""
    @staticmethod
    def pack(dtype: int, act: int, outs: int, ins: int, weights: Buffer, packed: Buffer, threads: int, /) -> None:
        """Write weights [outs, ins] to `packed` in the order of the kernels, in up to `threads` threads. Raises
        ValueError like the constructor."""
    @staticmethod
    def packed_bytes(dtype: int, act: int, outs: int, ins: int, /) -> int:
        """The bytes that packed weights take. Raises ValueError if the ISA has no such products."""
    @property
    def isa(self) -> str:
        """The ISA of the kernels."""
    def run(self, x: Buffer, y: Buffer, threads: int, /) -> None:
        """y [rows, outs] = x [rows, ins] W^T + b, both of the dtype `act`. Other Python threads run meanwhile. Raises
        ValueError for buffers of other sizes."""

class PromptAttention:
    """Attention of a prompt's rows on the S-node's CPU (prompt.h), for an activation dtype, an index of
    region.contract.ACT_DTYPES. Arguments are addresses, 0 for none, strides in elements and sizes; nothing is checked.
    Other Python threads run meanwhile. The ISA is the one in FASTDECODE_ISA, else the best. Raises ValueError if it has
    no such functions.

    `blocks` are the address of the packed blocks, the words of a head, the KV heads, and the sizes of K and V heads.
    """

    def __new__(cls, act_dtype: int) -> PromptAttention: ...
    @staticmethod
    def supports(act_dtype: int, /) -> bool:
        """Whether the ISA has such functions."""
    @property
    def isa(self) -> str:
        """The ISA of the functions."""
    def block_words(self, k_size: int, v_size: int, /) -> int:
        """32-bit words of a block of 64 tokens."""
    def pack(
        self,
        blocks: tuple[int, int, int, int, int],
        k: int,
        v: int,
        pos: int,
        n: int,
        k_head: int,
        k_row: int,
        v_head: int,
        v_row: int,
        threads: int,
        /,
    ) -> None: ...
    def attend(
        self,
        blocks: tuple[int, int, int, int, int],
        q: int,
        out: int,
        sinks: int,
        q_row: int,
        out_row: int,
        rows: int,
        pos: int,
        group: int,
        window: int,
        segment: int,
        scale: float,
        threads: int,
        /,
    ) -> None:
        """Raises MemoryError if there is no memory for some rows."""

class DeltaRows:
    """The gated delta rule of a block (delta.h) for an activation dtype, an index of region.contract.ACT_DTYPES. The
    ISA is the one in FASTDECODE_ISA, else the best. Raises ValueError if it has no such rule.

    `sizes`: K heads, V heads, and the elements of a head of each. `layout`: (first, step) of Q, K, V, Z, beta and
    decay. `parameters`: the addresses of the convolution, the rates, the biases and the norm, all fp32.
    """

    def __new__(
        cls,
        act_dtype: int,
        sizes: tuple[int, int, int, int],
        kernel: int,
        layout: tuple[tuple[int, int], ...],
        parameters: tuple[int, int, int, int],
        eps: float,
        unit_eps: float,
    ) -> DeltaRows: ...
    @property
    def isa(self) -> str:
        """The ISA of the functions."""
    def advance(
        self,
        y: int,
        y_stride: int,
        out: int,
        inputs: int,
        sums: int,
        rows: tuple[int, int, int, int, int, int],
        threads: int,
        /,
    ) -> None:
        """Advance states by rows, given as StateRows.addresses. Nothing is checked. Other Python threads run meanwhile.
        Raises MemoryError."""

class RowOps:
    """The S-Part's operations between products (row_ops.h), for an activation dtype, an index of
    region.contract.ACT_DTYPES. Arguments are addresses of C-contiguous rows, 0 for none, and sizes; nothing is checked.
    Other Python threads run meanwhile. The ISA is the one in FASTDECODE_ISA, else the best. Raises ValueError if it has
    no such operations.
    """

    def __new__(cls, act_dtype: int) -> RowOps: ...
    @staticmethod
    def supports(act_dtype: int, /) -> bool:
        """Whether the ISA has such operations."""
    @property
    def isa(self) -> str:
        """The ISA of the functions."""
    def norm(
        self,
        x: int,
        y: int,
        scale: float,
        weight: int,
        eps: float,
        out: int,
        rows: int,
        width: int,
        threads: int,
        /,
    ) -> None: ...
    def gate(self, x: int, out: int, rows: int, width: int, gelu: bool, threads: int, /) -> None: ...
    def rope(
        self,
        qkv: int,
        q_norm: int,
        k_norm: int,
        v_norm: int,
        eps: float,
        angles: tuple[int, int, int, int],
        q: int,
        q_stride: int,
        kv: int,
        kv_stride: int,
        rows: int,
        q_heads: int,
        kv_heads: int,
        head_size: int,
        whole_norms: bool,
        pairs: int,
        threads: int,
        /,
    ) -> None: ...
    def turn(
        self,
        x: tuple[int, int, int],
        out: tuple[int, int, int],
        cos: int,
        sin: int,
        rows: int,
        heads: int,
        pairs: int,
        interleaved: bool,
        threads: int,
        /,
    ) -> None:
        """fd_turn_rows_t; x and out are an address, and how far rows and heads stand apart."""

#: The addresses of an fd_angles_t.
_Angles = tuple[int, int, int, int]
#: The rows of a step: the address of x; the address and the stride of O, and of the parts of the per-layer embedding;
#: the address of the gates of Q heads; the address and the stride of Q, and of K and V; the angles and their pairs, and
#: the second ones; the addresses of inputs and sums of each block with a state, and StateRows.addresses; the number of
#: rows, and of threads. What no layer needs is 0 or ().
_JointStep = tuple[
    int, int, int, int, int, int, int, int, int, int,
    _Angles, int, _Angles, int, tuple[int, ...], tuple[int, int, int, int, int, int], int, int,
]  # fmt: skip

#: A prompt's chunk: its first row in the step, its rows, the position of the first one, and for each layer the address
#: of the blocks' words, the words of a head, the window and the segment (0: no such limit).
_PromptChunk = tuple[int, int, int, list[tuple[int, int, int, int]]]
#: The prompts of a step: the attention, the scale of scores, and the chunks.
_Prompts = tuple[PromptAttention, float, list[_PromptChunk]]

class Joints:
    """What an S-Part computes between the attention of two layers (joint.h). Norms and rows are given as addresses of
    C-contiguous memory, which is not checked."""

    def __new__(
        cls,
        act_dtype: int,
        hidden: int,
        eps: float,
        residual_scale: float,
        gelu: bool,
        whole_norms: bool,
        output_gate: bool,
        layers: tuple[tuple[object, ...], ...],
        last_states: tuple[tuple[object, ...], ...],
        reduction: RankReduction | None,
    ) -> Joints:
        """A layer is its Q heads, KV heads and head size; the addresses of the weights of its attention norm, the norm
        of the outputs of O, Q norm, K norm and V norm, 0 for none; whether its RoPE has the second angles; whether K is
        its V; latent attention, or None; the linears of QKV, or before the latent rows, and of O; its MLP and experts;
        its part of the per-layer embedding, or None: the first number, the numbers, the linears of gate and out and the
        address of the norm; the address of the factor of its output, or 0; and the blocks with a state before it. A
        block with a state is the address of its norm, the linears before and behind the rule, its DeltaRows, and its
        MLP and experts; `last_states` are those behind the last layer.

        MLP and experts are the addresses of the norms of their inputs and outputs; the MLP, a tuple of its columns and
        the linears of up and down, or None; ExpertOps, beside which the MLP is the shared expert, or None; and the
        address of the shared expert's gate, 0 for none; and those of fd_mixture_norms_t. Linears are tuples of
        QuantisedLinear, or of one Dense16Linear.

        Latent attention is the sizes of a head's K and of its part with RoPE, the rank of K and V, the size of V, the
        rank of Q, or 0; whether RoPE's pairs are neighbours; the eps of its norms and the addresses of those of Q and
        of K and V; the linears of Q behind its norm, or None; and the HeadProducts of K and V.

        `gelu`: see fd_gate_rows_t; `whole_norms`: see fd_rope_rows_t; `output_gate`: Q heads have gates beside them. A
        `reduction` sums the outputs of O and of MLPs and experts over all ranks; heads and columns are then those of
        this rank.

        Raises ValueError if the ISA has no row operations for the dtype, or linears of other sizes or dtypes.
        """
    def run(self, layer: int, step: _JointStep, /) -> None:
        """Finish block `layer` - 1, project block `layer`. Other Python threads run meanwhile. Raises MemoryError,
        RankError."""
    def spart_layers(self, step: _JointStep, prompts: _Prompts | None, /) -> object:
        """The PyCapsule "fastdecode.spart_layers" (spart_layers.h) that runs the joints of a step, and attends its
        prompts. The memory of both must outlive it. Raises MemoryError, and ValueError for chunks beyond the step or
        their blocks.
        """

#: The addresses of a router's weight, bias, correction and expert_scale, 0 for none (router.h).
_RouterWeights = tuple[int, ...]
#: A router's used, groups, used_groups and group_best.
_RouterChoice = tuple[int, int, int, int]
#: A router's output_scale, least_sum, scale, single and sigmoid.
_RouterScores = tuple[float, float, float, bool, bool]

class HeadProducts:
    """Products of each head's rows with a matrix of that head (head_products.h), for rows of an activation dtype, an
    index of region.contract.ACT_DTYPES. Raises ValueError if the matrices are not alike, or have no product for these
    rows."""

    def __new__(cls, act_dtype: int, products: tuple[Dense16Linear | QuantisedLinear, ...]) -> HeadProducts: ...
    def run(self, x: int, y: int, rows: int, threads: int, /) -> None:
        """y [heads, rows, outs] from x [heads, rows, ins], addresses of C-contiguous rows, which are not checked. Other
        Python threads run meanwhile. Raises MemoryError."""

class ExpertOps:
    """The router and the experts of a layer (experts.h), for rows of an activation dtype, an index of
    region.contract.ACT_DTYPES. The addresses are not checked."""

    def __new__(
        cls,
        act_dtype: int,
        hidden: int,
        inner: int,
        gelu: bool,
        alpha: float,
        limit: float,
        weights: _RouterWeights,
        choice: _RouterChoice,
        scores: _RouterScores,
        load: int,
        experts: tuple[tuple[object, object], ...],
    ) -> ExpertOps:
        """An expert is its linears of up and down, as in Joints; experts are alike in them. `gelu`, `alpha` and `limit`
        are those of fd_gate_rows_t, `weights`, `choice` and `scores` those of the router. The rows of each expert are
        added to int64 [experts], whose address is `load`.

        Raises ValueError for a router that cannot choose, if the ISA has no row operations for the dtype, and for
        linears of other sizes or dtypes.
        """

    def run(self, x: int, router_x: int, out: int, rows: int, threads: int, /) -> None:
        """Compute the experts' outputs for a step's rows (fd_experts_run). Other Python threads run meanwhile. Raises
        MemoryError."""

class RankError(RuntimeError):
    """A rank of a tensor-parallel S-Part does not take part any more. The message names it."""

@final
class RankReduction:
    """A rank's end of the sums over the ranks of a tensor-parallel S-Part (reduction.h). One thread at a time sums."""

    def __new__(cls, segment: Buffer, rank: int, n_ranks: int, limit: float) -> RankReduction:
        """`segment` is writable memory that all ranks share, of `segment_bytes` bytes, zeros before the first
        rank joined. `limit` is in seconds. The ISA is the one in FASTDECODE_ISA, else the best. Raises ValueError."""
    @staticmethod
    def segment_bytes(n_ranks: int, /) -> int:
        """Bytes of the segment. Raises ValueError for too many ranks."""
    def sum(self, address: int, n: int, act_dtype: int, threads: int, /) -> None:
        """Replace `n` numbers, whose memory is not checked, by their sums over all ranks. Other Python threads run
        meanwhile. Raises RankError."""
    def look(self, rank: int, /) -> None:
        """Look at a rank that this rank waits for elsewhere, in the thread that sums. Raises RankError."""
    def fault(self) -> str | None:
        """Why the reduction is broken; None if it is not. From any thread."""
    def leave(self) -> None:
        """Let all other ranks out of their sums with a RankError; from any thread."""

# ---- the R-engine (engine.h, memory.h) ----

class _StoredLayers(TypedDict, total=False):
    """What decides on the size of a page, for each layer, beside the windows; see REngine.add_link."""

    segments: Sequence[int] | None
    kv_layers: Sequence[int] | None
    selections: Sequence[int] | None
    heads: Sequence[Sequence[int]] | None

class _Layers(_StoredLayers, total=False):
    """What the layers' attention does beside the windows; see REngine.add_link. Left-out options are unused."""

    softcaps: Sequence[float] | None
    sinks: Buffer | None
    slopes: Buffer | None
    part: tuple[int, int]
    hadamard: int

#: A layer's kernels on a GPU: fd_append and fd_attend (CUfunction), warps of a block of fd_attend, its bytes of dynamic
#: shared memory, its queries, and the blocks that the GPU runs at once.
_GpuKernels = tuple[int, int, int, int, int, int]

def gpu_splits(pairs: int, rounds: int, at_once: int, /) -> int:
    """Into how many blocks a GPU, which runs `at_once` of them at once, cuts the work of each of `pairs` pairs of a row
    and KV head (fd_gpu_splits). Raises ValueError if `at_once` is 0."""

def bind_memory(node: int, /) -> None:
    """Allocate only from NUMA node `node`, in this thread and the threads that it starts later. Raises OSError."""

def page_bytes(
    geometry: _Geometry, kv_dtype: int, *, windows: Sequence[int] | None = None, **layers: Unpack[_StoredLayers]
) -> int:
    """Bytes of one page. `kv_dtype` is an index of region.contract.KV_DTYPES; the other arguments are those of
    REngine.add_link.

    Raises ValueError for a geometry, a dtype or layers that are not valid.
    """

def page_sections(
    geometry: _Geometry, kv_dtype: int, *, windows: Sequence[int] | None = None, **layers: Unpack[_StoredLayers]
) -> tuple[int, int, int]:
    """How many pages PAGE_TOKENS tokens take: for the layers that see all tokens, and for those of limited reach; then
    that reach in tokens, 0 if there are no such layers. Arguments and errors are those of page_bytes."""

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

    `threads` is within 1..MAX_THREADS. `kv_bytes` is the memory that all leases share, rounded down to whole hugetlb
    pages if the arenas use them. `isa` None: the ISA in FASTDECODE_ISA, else the best. `cpus`: the CPU to pin each
    thread to, one for each thread. `spin_us`: microseconds that an idle thread spins before it sleeps. `step_spin_us`:
    the same while a step is under way, if it is longer.

    `huge_pages`: memory of the arenas, "madvise" (transparent huge pages), "hugetlb" or "off". `prefault`: from the
    grant of a lease on, the threads fault its arena in between calls. `gpu`: the CUDA device in whose memory pages lie
    and that attends, without huge pages and prefaulting; -1: none.

    Raises ValueError for a bad argument, RuntimeError if the GPU cannot be opened, a thread cannot start, or there are
    too few hugetlb pages.
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
        step_spin_us: int = 0,
        gpu: int = -1,
    ) -> REngine: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def kv_free(self) -> int:
        """Bytes of `kv_bytes` that no lease has."""
    @property
    def eventfd(self) -> int:
        """An eventfd that wakes the engine, for callers in this process. A peer is given REngineLink.eventfd."""
    @property
    def stand_in(self) -> object:
        """A PyCapsule "fastdecode.stand_in" (region/stand_in.h) for Ports of this process. After `close` it does
        nothing."""
    def add_link(
        self,
        region: Buffer,
        geometry: _Geometry,
        kv_dtype: int,
        n_pages: int,
        max_seqs: int,
        softmax_scale: float,
        windows: Sequence[int],
        carrier: object | None = None,
        max_pages: int = 0,
        *,
        gpu_kernels: Sequence[_GpuKernels] | None = None,
        **layers: Unpack[_Layers],
    ) -> REngineLink:
        """Grant a lease of `n_pages` pages and `max_seqs` sequence indexes, and serve the calls in `region`.

        The caller has written the region's header; the link keeps the region alive until it is closed. `kv_dtype` is an
        index of region.contract.KV_DTYPES. `windows`: sliding window of each layer in tokens, 0: none. `carrier`: a
        PyCapsule "fastdecode.carrier" (region/carrier.h), None for shared memory. `max_pages`: the lease may grow to as
        many pages, for which it reserves address space; at most `n_pages`: it does not grow. `segments`, `kv_layers`,
        `selections`, `softcaps`, each [n_layers], `sinks` (fp32, [n_layers, n_q_heads]), `slopes` (fp32, [n_q_heads])
        and `heads` ([n_layers] tuples of an fd_heads_t's four numbers; None: those of the geometry) are those of
        fd_layer_t (kernels/engine/layers.h); a page has room for the layers that name themselves in `kv_layers`.
        `part`: the link keeps this part, (index, n), of every sequence's tokens (kernels/engine/parts.h). `hadamard`:
        the transforms that the caller applies in place of the kernels (fd_attend_t). `gpu_kernels`, [n_layers]: for an
        R-engine with a GPU, whose leases have memory for `max_pages` from the start. Raises ValueError for a bad
        argument, MemoryError if the KV-cache has no room for `n_pages`.
        """
    def pages_within(
        self,
        geometry: _Geometry,
        kv_dtype: int,
        bytes: int,
        grows: bool,
        *,
        windows: Sequence[int] | None = None,
        **layers: Unpack[_StoredLayers],
    ) -> int:
        """The most pages that take at most `bytes` of the budget, in a lease that grows or in one that does not.

        The planes (kernels/cache/planes.h) of a lease that grows lie apart, and each takes whole OS pages, or whole
        hugetlb pages. The other arguments are those of `add_link`. Raises ValueError for a geometry, a dtype or
        layers that are not valid.
        """
    def close(self) -> None:
        """Join the threads. Raises RuntimeError while links are open. Idempotent."""

@final
class REngineLink:
    """One link of an REngine, and its lease. After `close`, the other methods raise RuntimeError."""

    @property
    def eventfd(self) -> int:
        """An eventfd that wakes the engine, for a peer: misuse of it harms no other link. `close` closes it."""
    @property
    def prefault(self) -> tuple[int, int, int]:
        """Bytes of the arena that prefault has faulted in, bytes that it is to fault in, errno that stopped it or 0."""
    def free(self, seq_index: int, tag: int, /) -> None:
        """Free a sequence's pages; an empty sequence has none. Raises ValueError for a wrong tag or index."""
    def trim(self, seq_index: int, tag: int, length: int, /) -> None:
        """Keep only the first `length` tokens of a sequence. Raises ValueError for a wrong tag, index or length."""
    def fork(self, src: int, src_tag: int, dst: int, dst_tag: int, length: int, /) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`.

        Raises ValueError for a wrong tag, index or length, MemoryError if the lease cannot count more shared pages.
        """
    def grow(self, n_pages: int, /) -> None:
        """Let the lease have `n_pages` pages; its pages stay where they are. Does nothing if it has as many.

        Raises MemoryError, and changes nothing, for more than `max_pages`, and for more than the budget or the OS has.
        """
    def receive(self, seq_index: int, tag: int, length: int, /) -> None:
        """Let the empty sequence hold `length` tokens, whose K and V `receive_pages` brings.

        Raises ValueError for a wrong index or length, MemoryError if too few pages are free.
        """
    def fault_in(self, seq_index: int, tag: int, first: int, n: int, offset: int, /) -> int:
        """Let the OS find memory for what `receive_pages` is to bring from byte `offset` on; from any thread.

        Returns how many bytes have memory now, at most 1 MiB. Raises ValueError like `send_pages`.
        """
    def send_pages(self, fd: int, seq_index: int, tag: int, first: int, n: int, offset: int, /) -> int:
        """Send blocks [first, first + n) of a sequence, from byte `offset` on, over a non-blocking stream socket.

        Returns how many bytes went, at most 1 MiB; 0 if the socket is not ready. Raises ValueError if the sequence has
        no such blocks or has given back pages of them, OSError if the socket has failed.
        """
    def receive_pages(self, fd: int, seq_index: int, tag: int, first: int, n: int, offset: int, /) -> int:
        """Receive what `send_pages` sends. Raises like `send_pages`; ConnectionResetError if the stream has ended."""
    def copy_pages(
        self, to: REngineLink, seq_index: int, tag: int, to_index: int, to_tag: int, first: int, n: int, offset: int, /
    ) -> int:
        """Copy what `send_pages` would send to another link of this R-engine. Returns how many bytes were copied, at
        most 1 MiB. Raises like `send_pages`, and ValueError if the pages of the two links differ."""
    def pages(self, seq_index: int, tag: int, /) -> list[int]:
        """The page numbers of a sequence, in order; consecutive numbers lie side by side in memory.

        Raises ValueError for a wrong tag or index.
        """
    def length(self, seq_index: int, tag: int, /) -> int:
        """The tokens of a sequence; 0: it is empty. Raises ValueError for a wrong tag or index."""
    def stats(self) -> _LinkStats:
        """The counters of the link (fd_link_stats_t)."""
    def retire(self, kept: list[int], /) -> None:
        """Remove the link from the engine, which waits for a call in progress, and keep the sequences with the indexes
        `kept` for `copy_pages`, `free` and `length`. Raises RuntimeError if the link is retired."""
    def shrink(self) -> None:
        """Give the memory of a retired link's free pages back to the OS and the budget. The link takes no more pages
        after this. Does nothing to hugetlb pages. Raises RuntimeError if the link is not retired."""
    def close(self) -> None:
        """Remove the link from the engine and free the lease; waits for a call in progress. Idempotent."""

@final
class PageLists:
    """The page lists of a KV-cache whose arena is memory of a device (cache/kvcache.h). Touches no page.

    Plane p of the arena has `n_pages` pages of `plane_bytes` bytes each and begins at byte p * n_pages * plane_bytes. A
    page is numbered alike in all planes.
    """

    n_pages: int
    n_free: int  # pages that no sequence and no copy holds
    n_sequences: int  # that are not empty
    n_planes: int
    n_sections: int
    plane_bytes: int

    def __new__(
        cls,
        geometry: _Geometry,
        kv_dtype: int,
        n_pages: int,
        max_seqs: int,
        *,
        windows: Sequence[int] | None = None,
        segments: Sequence[int] | None = None,
        kv_layers: Sequence[int] | None = None,
        heads: Sequence[Sequence[int]] | None = None,
    ) -> PageLists:
        """`kv_dtype` is an index of region.contract.KV_DTYPES; the options are those of REngine.add_link. Raises
        ValueError for layers that no link can have, MemoryError."""
    @property
    def stores(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of each layer that stores K and V: its section, its plane, the offset of its first KV head's chunk in a page
        of that plane, and the bytes of a chunk (chunk.h)."""
    def free(self, seq_index: int, tag: int, /) -> None:
        """See REngineLink.free."""
    def trim(self, seq_index: int, tag: int, length: int, /) -> None:
        """See REngineLink.trim."""
    def drop_blocks(self, seq_index: int, tag: int, n_blocks: int, /) -> None:
        """Give back the pages of the first blocks of a sequence, whose tokens lie elsewhere from now on. Raises
        ValueError."""
    def receive(self, seq_index: int, tag: int, length: int, /) -> None:
        """See REngineLink.receive."""
    def restore_blocks(self, src: int, src_tag: int, dst: int, dst_tag: int, /) -> None:
        """Give the pages of `src`, which has whole blocks alone, to `dst`, in the place of the last of the blocks that
        it has given back. `src` is empty then. Raises ValueError."""
    def fork(self, src: int, src_tag: int, dst: int, dst_tag: int, length: int, /) -> None:
        """See REngineLink.fork."""
    def append(self, entries: Buffer, /) -> bytes:
        """Take pages for the rows of a step; `entries` is its row table (ROW_DTYPE). Returns the copies of shared pages
        that come before the rows, uint32 [copies, (source, target)], which `end_copies` ends.

        Raises ValueError for entries that do not follow their sequences, MemoryError if too few pages are free; then
        nothing has changed.
        """
    def end_copies(self, copies: Buffer, /) -> None:
        """The copies that `append` has returned are complete: pages that nobody holds any more become free."""
    def tables(self, entries: Buffer, pages: Buffer, width: int, /) -> None:
        """Write the pages of each entry's sequence, which `append` has taken, to `pages`, int32 [n_sections, entries,
        width]: the page of block b to column b. -1 stands for a page that was given back; columns beyond the blocks are
        left as they are. Raises ValueError for a buffer of another size."""
