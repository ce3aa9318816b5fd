"""ModelConfig: one frozen description of a model, for all families. Imports no torch.

The decoder, the weights and the links read this description and nothing else. families.py makes it from a checkpoint's
config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.region.contract import HEAD_SIZE_UNIT, MAX_HEAD_SIZE, MAX_LAYERS
from fastdecode.spart.shape import AttentionShape

#: Activation functions by the name that config.json gives them; decoder/block_ops.py has the functions.
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")

_MOST_EXPERTS = 1 << 14


class CheckpointError(ValueError):
    """The checkpoint cannot be served; the message is a sentence for the user."""


class UnknownArchitecture(CheckpointError):
    """The native decoder does not know the model's architecture."""


class WrongValue(CheckpointError):
    """A value in a checkpoint's files that no model can have, whatever the backend."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, which may be empty: the reason for a CheckpointError."""
    return next(iter(str(error).splitlines()), "")


def check_layers(n_layers: int) -> None:
    """Raise WrongValue for no layer, and for more than a link can have. A damaged file may name any number."""
    if not 0 < n_layers <= MAX_LAYERS:
        raise WrongValue(f"a model cannot have {n_layers} layers: {MAX_LAYERS} are supported")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and how it is scaled to a longer context.

    `kind` is "default", "none" (no pair is turned), "linear" (positions divided by `factor`), "llama3" (Llama 3.1),
    "yarn" (Peng et al., arXiv 2309.00071), "factors" (each pair's frequency divided by its own; with `long_factors`
    it is LongRoPE, Ding et al., arXiv 2402.13753) or "proportional" (Gemma 4: linear, but only the first pairs of the
    whole head are turned).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    fraction: float = 1.0  # of each head that RoPE turns: its first elements; "proportional": its first pairs
    original_max_positions: int = 0  # llama3, yarn, LongRoPE: positions the model was trained on before scaling
    query_beta: float = 0.0  # Q is multiplied by 1 + query_beta * log(1 + position // original_max_positions)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn, LongRoPE: cos and sin are multiplied by it
    factors: tuple[float, ...] = ()  # factors: one for each pair that RoPE turns
    long_factors: tuple[float, ...] = ()  # of sequences that may grow beyond original_max_positions; empty: the same

    def width(self, head_size: int) -> int:
        """The number of a head's elements in the pairs that RoPE turns; "proportional" turns some of them by 0."""
        if self.kind == "proportional":
            return head_size
        return int(head_size * self.fraction)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP. The names of its tensors are in TensorNames."""

    n: int
    used: int  # experts of each token: those to which the router gives the largest scores
    intermediate_size: int  # of each expert
    renormalise: bool  # the scores of a token's experts are divided by their sum
    least_sum: float = 1e-20  # by which scores are divided: they may all be 0
    sigmoid: bool = False  # a score is the sigmoid of the router's output; False: the softmax of all experts
    single_router: bool = False  # the router computes in fp32, whatever the dtype of activations
    router_scale: float = 1.0  # the router's output is multiplied by it
    scale: float = 1.0  # the outputs of a token's experts are multiplied by it; the shared expert's output is not
    groups: int = 1  # neighbours of equal number, of which the router first chooses some
    used_groups: int = 1  # to the experts of which the choice is limited
    group_best: int = 1  # a group's score is the sum of as many largest scores of its experts
    bias: bool = False  # of the router and of the experts' linears
    correction_rows: int = 0  # 1: the router's correction is stored as a matrix of a row
    dense_layers: frozenset[int] = frozenset()  # layers that have an MLP
    shared_size: int = 0  # of an MLP that all tokens pass beside their experts; 0: none
    #: (alpha, limit) of gpt-oss, whose experts compute (clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate)).
    clamped_swiglu: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Raises CheckpointError for numbers of experts that no model has. A damaged file may name any number."""
        if self.n > _MOST_EXPERTS:
            raise CheckpointError(f"{self.n} experts in a layer are more than the {_MOST_EXPERTS} that are supported")
        if self.used > self.n:
            raise WrongValue(f"config.json: {self.used} experts for each token of {self.n}")
        if self.groups > 1:
            size = self.n // self.groups
            if self.n % self.groups or self.used_groups > self.groups or self.group_best > size:
                raise WrongValue(
                    f"config.json: {self.used_groups} of {self.groups} groups of {self.n} experts cannot be chosen"
                )
            if self.used > self.used_groups * size:
                raise WrongValue(
                    f"config.json: {self.used} experts for each token of the {self.used_groups * size} in "
                    f"{self.used_groups} groups"
                )


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The gated delta rule (Yang et al., arXiv 2412.06464), which some blocks have in place of attention.

    Such a block keeps a state of fixed size for each sequence, not K and V of each token. A K head, which has a Q head
    of its own, serves `v_heads` / `k_heads` neighbouring V heads.
    """

    blocks: frozenset[int]  # the blocks that have it
    k_heads: int
    v_heads: int
    k_size: int
    v_size: int
    kernel: int  # tokens that the convolution before the rule sees, the token itself included
    by_head: bool  # the checkpoint's projections stand head by head (Qwen3-Next), not Q, K, V one after another

    @property
    def v_width(self) -> int:
        """The elements of all V heads of a token."""
        return self.v_heads * self.v_size

    @property
    def channels(self) -> int:
        """The elements of all Q, K and V heads of a token, all of which pass the convolution."""
        return 2 * self.k_heads * self.k_size + self.v_width

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in all blocks, with activations of `itemsize` bytes."""
        inputs = (self.kernel - 1) * self.channels * itemsize
        return len(self.blocks) * (inputs + self.k_size * self.v_width * 4)


@dataclass(frozen=True, slots=True)
class DeltaNames:
    """The names of a gated delta rule's parameters, relative to the block."""

    inputs: tuple[str, ...]  # the projections: Q, K, V; Z; beta; decay. With `by_head` Q, K, V, Z; beta, decay
    conv: str  # weight [channels, 1, kernel]
    decay: str  # the tensor [v_heads] itself: the logarithm of each head's decay
    decay_bias: str  # the tensor [v_heads] itself
    norm: str  # of each V head's output, weight [v_size]
    out: str


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in its absorbed form.

    K and V of all heads are products of one latent row with matrices of the heads. These matrices multiply the queries
    and the outputs instead, so that all query heads share one KV head: the latent row and the part of K with RoPE.
    """

    rank: int  # elements of the latent row, which is also V
    k_size: int  # of a head of the model's Q and K, without RoPE
    rope_size: int  # the elements of a Q head and of K that RoPE turns, behind `k_size`; in K the same for all heads
    v_size: int  # of a head of the model's V
    q_rank: int = 0  # elements of the row that all queries are made of; 0: the projection makes the queries themselves
    norm_eps: float = 1e-6  # of the norms of latent rows
    interleaved: bool = True  # RoPE turns pairs of neighbours; False: the two halves

    @property
    def row_size(self) -> int:
        """Elements of the one KV head, and of a Q head in the absorbed form."""
        return self.rank + self.rope_size

    @property
    def q_size(self) -> int:
        """Elements of a Q head as the model projects it."""
        return self.k_size + self.rope_size


@dataclass(frozen=True, slots=True)
class LatentNames:
    """The names of the parameters of latent attention, relative to the block."""

    q: str  # the projection of queries, read without Latent.q_rank
    q_a: str  # the projection of the rows that queries are made of, their norm, and the linear that makes queries
    q_a_norm: str
    q_b: str
    kv_a: str  # the projection of the latent row and of K with RoPE
    kv_a_norm: str  # of the latent row
    kv_b: str  # weight [n_q_heads * (k_size + v_size), rank]: the matrices of K and of V of the first head, and so on


@dataclass(frozen=True, slots=True)
class MTPNames:
    """The names of the parameters of an MTP head (multi-token prediction), whose block has the names of TensorNames."""

    block: str
    fc: str  # weight [hidden_size, 2 * hidden_size]: of the next token's embedding, then of the hidden state
    embedding_norm: str
    hidden_norm: str
    final_norm: str


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """A second embedding, of which each block has a part of its own to add to the residual stream (Gemma 4 E2B)."""

    rows: int  # of the table, at least those of the vocabulary
    size: int  # elements of a block's part


@dataclass(frozen=True, slots=True)
class PerLayerNames:
    """The names of a PerLayerEmbedding's parameters; those of a block are relative to it."""

    table: str  # weight [rows, blocks * size]
    projection: str  # weight [blocks * size, hidden_size]: of the embedding, which is added to the table's rows
    norm: str  # of each block's part of the projection, weight [size]
    gate: str  # of a block, weight [size, hidden_size]
    out: str  # of a block, weight [hidden_size, size]
    post_norm: str  # of the output of `out`


@dataclass(frozen=True, slots=True)
class MixtureNormNames:
    """The names of the norms that a mixture of experts has beside those of its block, relative to the block."""

    router: str  # the tensor [hidden_size] itself: the weight of the norm of the router's input
    experts: str  # of the experts' input
    experts_post: str  # of the experts' output
    shared_post: str  # of the shared expert's output


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names that a family's checkpoints give to the model's parameters.

    A name is that of a module, without ".weight" or ".bias". The names of a block are relative to `block`, in which
    "{i}" stands for the number of the layer. None: the model has no such parameter.
    """

    embedding: str  # weight [vocab_size, embed_size]
    block: str
    attention_norm: str | None
    #: Q, K and V projections; one name if the checkpoint stores them as one matrix, Q first; none with `latent`.
    qkv: tuple[str, ...]
    o: str
    mlp_norm: str | None
    up: tuple[str, ...]  # of a gated MLP: gate, up; one name if the checkpoint stores both as one matrix, gate first
    down: str
    final_norm: str
    q_norm: str | None = None  # read if ModelConfig.qk_norm
    k_norm: str | None = None
    attention_post_norm: str | None = None  # read if ModelConfig.post_norms
    mlp_post_norm: str | None = None
    block_scale: str | None = None  # the tensor [1] itself, by which the block's output is multiplied
    positions: str | None = None  # learned positions, weight [position_offset + max_positions, hidden_size]
    project_in: str | None = None  # read if embed_size and hidden_size differ
    project_out: str | None = None
    head: str = "lm_head"  # weight [vocab_size, embed_size]
    sinks: str | None = None  # the tensor [n_q_heads] itself: each head's attention sink
    router: str | None = None
    #: The tensor itself, [experts] or [Experts.correction_rows, experts]: added to scores, but only to choose experts.
    router_correction: str | None = None
    #: The names of the experts' `up` and `down`. "{e}" stands for the expert's number; SafetensorsCheckpoint gives such
    #: names to experts that a file has in transformers' two tensors of a layer, too. A name without it is that of a
    #: tensor [experts, in, out] in which columns of gate and up alternate, whose bias has the same name and "_bias".
    expert_up: tuple[str, ...] = ()
    expert_down: str | None = None
    shared_up: tuple[str, ...] = ()  # of Experts.shared_size: gate, up
    shared_down: str | None = None
    #: The tensor [experts] itself, by which each expert's output is multiplied.
    expert_scale: str | None = None
    #: Router and experts have norms of the residual stream as inputs, and the shared expert has the block's norm.
    mixture_norms: MixtureNormNames | None = None
    shared_gate: str | None = None  # weight [1, hidden_size]; None: the shared expert's output is added as it is
    delta: DeltaNames | None = None
    per_layer: PerLayerNames | None = None
    latent: LatentNames | None = None
    mtp: MTPNames | None = None  # read if ModelConfig.mtp
    #: The beginnings of the names of tensors that are left aside: those of drafts; "": of other parts than text.
    aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the linears of a checkpoint are stored."""

    method: str  # as in config.json: "gptq", for example; quantisation.py knows all
    bits: int = 8  # gptq, awq: of a weight
    zero_offset: int = 0  # gptq: the number to add to a stored zero point
    activation_bits: int = 15  # 8: the checkpoint was made for activations in int8
    group: int | None = None  # inputs that share a scale; None: the shapes of the tensors tell
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale, of FP8; None: likewise
    reordered: bool = False  # gptq: a tensor tells the group of each input


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(AttentionShape):
    """A decoder-only transformer. Sizes are in elements."""

    hidden_size: int
    intermediate_size: int
    rope: Rope | None  # None: learned positions
    activation: str  # one of ACTIVATIONS
    norm: str  # "rms" or "layer"
    norm_eps: float
    tied: bool  # the LM head is the embedding, unless the checkpoint has a head that differs from it
    embed_size: int  # of the embedding; projected to hidden_size and back where they differ
    names: TensorNames
    rope_interleaved: bool = False  # RoPE turns neighbours of a head; the loader puts the rows of Q and K in halves
    second_rope: Rope | None = None  # in place of `rope` in the layers that `second_rope_layers` names
    second_rope_layers: frozenset[int] = frozenset()
    k_as_v_layers: frozenset[int] = frozenset()  # layers whose V is the projection of K, before its norm and RoPE
    position_offset: int = 0  # learned positions: the row of position 0
    experts: Experts | None = None
    delta: DeltaRule | None = None
    per_layer: PerLayerEmbedding | None = None
    mlp_sizes: tuple[int, ...] = ()  # the `intermediate_size` of each block, if blocks differ in it
    latent: Latent | None = None  # the heads that links see are then those of its absorbed form
    gated: bool = True  # MLP: down(act(gate(x)) * up(x)); False: down(act(up(x)))
    norm_first: bool = True  # False: a norm follows each residual addition instead (OPT-350m)
    post_norms: bool = False  # the output of each sublayer is normalised, too, before it is added
    norm_affine: bool = True  # False: norms have no weight and no bias
    norm_offset: float = 0.0  # it is added to the weights of RMS norms
    final_norm: bool = True
    qk_norm: bool = False  # RMS norm of every Q and K head, before RoPE
    whole_qk_norm: bool = False  # with `qk_norm`: of all Q heads of a token as one, and of all K heads
    v_norm: bool = False  # RMS norm of every V head, without weights; only with `qk_norm`
    embed_scale: float = 1.0  # the embedding is multiplied by it
    residual_scale: float = 1.0  # the output of each sublayer is multiplied by it before it is added
    logit_divisor: float = 1.0  # the logits are divided by it
    logit_softcap: float = 0.0  # a logit x becomes cap * tanh(x / cap); 0: the logits stay as they are
    suppressed: tuple[int, ...] = ()  # tokens that are drawn only if no other token is allowed
    quantisation: Quantisation | None = None  # of a checkpoint in safetensors
    output_gate: bool = False  # each Q head has a gate beside it, whose sigmoid multiplies the head's output
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        """Raises CheckpointError for sizes that the R-node or the kernels do not support."""
        check_layers(self.n_blocks)
        if not self.n_layers:
            raise CheckpointError("no layer of the model attends; only models with a KV-cache are supported")
        for n_q, n_kv, size, *_ in {self.heads_of(layer) for layer in range(self.n_layers)}:
            if n_q % n_kv:
                raise CheckpointError(f"{n_q} query heads are not a multiple of {n_kv} KV heads")
            if size % HEAD_SIZE_UNIT or not HEAD_SIZE_UNIT <= size <= MAX_HEAD_SIZE:
                raise CheckpointError(
                    f"head size {size} is not supported: it must be a multiple of {HEAD_SIZE_UNIT}, at most "
                    f"{MAX_HEAD_SIZE}"
                )
        for second, rope in enumerate((self.rope, self.second_rope)):
            if rope is not None:
                self._check_rope(rope, self.rope_head_size(bool(second)))
        if self.second_rope is not None and (self.rope is None or self.second_rope.long_factors):
            raise CheckpointError("a RoPE of some layers alone, or LongRoPE there, is not supported")

    @property
    def n_blocks(self) -> int:
        """The number of transformer blocks; `n_layers` of them attend."""
        return self.n_layers - self.mtp + (len(self.delta.blocks) if self.delta else 0)

    def with_mtp(self, drafts: int) -> ModelConfig:
        """The model with its MTP head, which drafts `drafts` tokens in a step.

        On the links each pass of the head is one more layer. The first one stores K and V, the others attend to these.
        """
        if self.names.mtp is None:
            raise CheckpointError(f"an MTP head of {self.architecture} is not supported")
        first = self.n_layers
        kv_layers = (*self.kv_layers, *[first] * drafts) if drafts > 1 else self.options.kv_layers
        heads = self.options.heads
        return replace(
            self,
            mtp=drafts,
            n_layers=first + drafts,
            windows=(*self.windows, *[0] * drafts),
            options=replace(self.options, kv_layers=kv_layers, heads=(*heads, *heads[-1:] * drafts)),
        )

    def state_bytes(self, itemsize: int) -> int:
        return self.delta.state_bytes(itemsize) if self.delta else 0

    def rope_head_size(self, second: bool) -> int:
        """The elements of a head over which `rope` or `second_rope` is defined, in the layers that have it; with
        Rope.fraction it turns the first of them. Raises CheckpointError if such layers differ."""
        if self.latent is not None:
            return self.latent.rope_size
        layers = [i for i in range(self.n_layers) if (i in self.second_rope_layers) == second]
        sizes = {self.heads_of(layer).k_size for layer in layers} or {self.head_size}
        if len(sizes) > 1:
            raise CheckpointError(f"heads of {sorted(sizes)} elements in layers with one RoPE are not supported")
        return sizes.pop()

    def _check_rope(self, rope: Rope, head_size: int) -> None:
        size = rope.width(head_size)
        if size % 2 or not size:
            raise CheckpointError(f"RoPE turns {size} of {head_size} elements of a head, not an even number")
        for factors in (rope.factors, rope.long_factors):
            if factors and len(factors) != size // 2:
                raise CheckpointError(f"RoPE has {len(factors)} factors for {size // 2} pairs of a head")
