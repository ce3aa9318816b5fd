"""Sampler: draws the next token of every row of a step, on the logits' device, without waiting for the device. On a CPU
host_sampling.py does the same.

The filters are those of Hugging Face's logits processors, in their order: masks (masks.py), bias and penalties
(penalties.py), temperature, top-k, top-p over the tokens that top-k has left, min-p over the tokens that top-p has
left. Each filter is a threshold, so tokens of equal probability are kept or dropped together, and the result does not
depend on how a sort orders equal values. No vocabulary is sorted: the likeliest tokens of the rows that have a filter
are enough.

The parameters of the rows, and which rows have a filter, are uploaded with the rest of the step's table; tokens and
log-probabilities come down in one copy. Masks are uploaded when the logits are on their way, because a
grammar computes them while the model runs. A token is drawn as draws.py explains, by numbers that depend on (seed,
index) alone, so a sequence draws the same tokens in any batch and after any preemption.

A captured step draws its tokens within its graph (exchange/bypass.py). There the shapes of all parameters must be the
same in every step, so a Kind (sampling_kinds.py) says what every row can have, and a row without a filter gets a
parameter that keeps all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdecode.spart.sampler.draws import SPAN, draw, span_count, stream_keys
from fastdecode.spart.sampler.results import FINITE, MIN_TEMPERATURE, add_logprobs, rows_of_block, sampled_rows
from fastdecode.spart.sampler.sampling_kinds import GREEDY, TOP_P_PREFIX, Kind
from fastdecode.spart.step.batch import Sampled, SampleSpec
from fastdecode.spart.step.masks import TokenMask, forbidden, mask_bits
from fastdecode.spart.step.penalties import flat_rules
from fastdecode.spart.step.step_table import StepTable, download

_REACHED, _EMPTY = 2, 4  # flags of a row beside FINITE; _EMPTY: all of its logits are -inf
_Uploaded = dict[str, torch.Tensor]


class Sampler:
    """The draws of one step, planned on the host before the step runs."""

    def __init__(
        self,
        specs: Sequence[SampleSpec],
        vocab_size: int,
        table: StepTable,
        top_p_prefix: int = TOP_P_PREFIX,
        kind: Kind | None = None,
    ):
        """Adds the parameters of `specs`, one entry for each row, to the step's table. `kind` makes the names, the
        sizes and the order of these arrays, and the work of `launch`, depend on `kind` and the number of rows alone."""
        self._specs, self._vocab = specs, vocab_size
        n = rows_of_block(vocab_size)
        self._blocks = [
            _Block(i, specs[i : i + n], vocab_size, table, min(top_p_prefix, vocab_size), kind)
            for i in range(0, len(specs), n)
        ]

    @classmethod
    def of_kind(cls, kind: Kind, rows: int, specs: Sequence[SampleSpec], vocab_size: int, table: StepTable) -> Sampler:
        """The draws of a captured step of `rows` rows. `specs` are those of the first rows, which `kind` covers; the
        rest are greedy, and nobody reads their tokens."""
        plain = [spec if spec.temperature >= MIN_TEMPERATURE else GREEDY for spec in specs]
        return cls([*plain, *[GREEDY] * (rows - len(plain))], vocab_size, table, kind=kind)

    def __call__(self, logits: torch.Tensor, uploaded: _Uploaded) -> list[Sampled]:
        """Draw one token a row. `logits` is [rows, vocab_size] in fp32 or another dtype of floats; `uploaded` is the
        table on the logits' device.

        A row with a logit that is NaN or +inf, or whose mask allows no token, gets an error and no token. The host
        waits for the device once; a second time if a row with top-p has its nucleus in more than TOP_P_PREFIX tokens,
        which happens where the distribution is nearly flat.
        """
        logits = logits.float()
        return self.read(download(self.launch(logits, uploaded)), logits)

    def launch(self, logits: torch.Tensor, uploaded: _Uploaded) -> torch.Tensor:
        """Let the device draw, without waiting for it. Returns the numbers that `read` takes, int32 [n] on the
        device."""
        masks = StepTable()
        for block in self._blocks:
            block.add_masks(masks)
        uploaded = uploaded | masks.upload(logits.device)
        return torch.cat([result for block in self._blocks for result in block.run(logits, uploaded)])

    def read(self, results: npt.NDArray[np.int32], logits: torch.Tensor) -> list[Sampled]:
        """The tokens of the results that `launch` has returned, on the host. `logits` is needed once more for rows with
        top-p that must be drawn a second time."""
        values = _Reader(results)
        sampled: list[Sampled] = []
        short: list[int] = []
        for block in self._blocks:
            drawn, rows = block.read(values)
            short += [len(sampled) + i for i in rows]
            sampled += drawn
        if short:
            table = StepTable()
            again = Sampler([self._specs[i] for i in short], self._vocab, table, top_p_prefix=self._vocab)
            table.add("short", np.array(short))
            tensors = table.upload(logits.device)
            for i, token in zip(short, again(logits.index_select(0, tensors["short"]), tensors), strict=True):
                sampled[i] = token
        return sampled


class _Group:
    """Rows of a block whose filter looks at the same number of the likeliest tokens, `width`."""

    def __init__(self, name: str, rows: list[int], width: int):
        self.name, self.rows, self.width = name, rows, width


def _grouped(name: str, widths: dict[int, int]) -> list[_Group]:
    """Rows in two groups at most, so that a few rows with a large width do not make all the others as wide."""
    groups = []
    for kind, chosen in (
        ("", {i: w for i, w in widths.items() if w <= TOP_P_PREFIX}),
        (" wide", {i: w for i, w in widths.items() if w > TOP_P_PREFIX}),
    ):
        if chosen:
            groups.append(_Group(name + kind, list(chosen), max(chosen.values())))
    return groups


class _Block:
    """Some neighbouring rows of a step that are sampled at once."""

    def __init__(
        self, start: int, specs: Sequence[SampleSpec], vocab_size: int, table: StepTable, prefix: int, kind: Kind | None
    ):
        self._specs, self._vocab, self._kind = specs, vocab_size, kind
        self._rows = slice(start, start + len(specs))
        self._table, self._prefix = table, f"rows from {start}: "
        rules = [(i, spec.rules) for i, spec in enumerate(specs) if spec.rules is not None]
        self._has_rules = bool(rules)
        if self._has_rules:
            for name, values in flat_rules(rules, vocab_size).items():
                self._add(name, values)
        self._masked = [i for i, spec in enumerate(specs) if spec.mask is not None]
        if self._masked:
            self._add("masked", np.array(self._masked))
        self._asked = [i for i, spec in enumerate(specs) if spec.logprobs is not None]
        self._most = min(max((specs[i].logprobs or 0 for i in self._asked), default=0), vocab_size)
        if self._asked:
            self._add("asked", np.array(self._asked))
        self._top_k: list[_Group] = []
        self._top_p: list[_Group] = []
        greedy = [spec.temperature < MIN_TEMPERATURE for spec in specs]
        self._drawn = [i for i, is_greedy in enumerate(greedy) if not is_greedy]
        if kind is not None:
            self._drawn = list(range(len(specs))) if kind.draws else []
            if kind.draws:
                self._add("greedy", np.array(greedy))
        if self._drawn:
            self._plan_draws([specs[i] for i in self._drawn], prefix)

    def _add(self, name: str, values: npt.NDArray[Any]) -> None:
        self._table.add(self._prefix + name, values)

    def _plan_draws(self, specs: list[SampleSpec], prefix: int) -> None:
        """Add the parameters of the rows that are not greedy. `specs` has one entry for each; groups count them so."""
        vocab = self._vocab
        self._add("drawn", np.array(self._drawn))
        self._add("keys", stream_keys([spec.seed for spec in specs], [spec.index for spec in specs]))
        self._add("temperature", np.array([spec.temperature or 1.0 for spec in specs], np.float32))
        limits = {i: spec.top_k for i, spec in enumerate(specs) if 0 < spec.top_k < vocab}
        self._has_min_p = any(spec.min_p > 0.0 for spec in specs) if self._kind is None else self._kind.filters
        if self._has_min_p:
            self._add("min-p", np.array([spec.min_p for spec in specs], np.float32))
        if self._kind is not None:
            if self._kind.filters:
                everybody = list(range(len(specs)))
                self._add_top_k(_Group("top-k", everybody, prefix), [limits.get(i, 0) for i in everybody])
                self._add_top_p(_Group("top-p", everybody, prefix), [min(spec.top_p, 1.0) for spec in specs])
            return
        for group in _grouped("top-k", limits):
            self._add_top_k(group, [limits[i] for i in group.rows])
        # One token more than top-k leaves shows that there are no others.
        widths = {
            i: min(vocab, limits[i] + 1) if i in limits else prefix for i, spec in enumerate(specs) if spec.top_p < 1.0
        }
        for group in _grouped("top-p", widths):
            self._add_top_p(group, [specs[i].top_p for i in group.rows])

    def _add_top_k(self, group: _Group, limits: list[int]) -> None:
        """`limits` has the number of tokens that each row of the group keeps; 0: all."""
        self._top_k.append(group)
        self._add(group.name, np.array(group.rows))
        self._add(f"{group.name} last", np.array(limits) - 1)

    def _add_top_p(self, group: _Group, masses: list[float]) -> None:
        """`masses` has the share that the tokens which each row of the group keeps reach; 1: all tokens."""
        self._top_p.append(group)
        self._add(group.name, np.array(group.rows))
        self._add(f"{group.name} mass", np.array(masses, np.float32))

    def add_masks(self, table: StepTable) -> None:
        """Add the masks of the rows that have one. Waits for them."""
        masks: list[TokenMask] = [spec.mask for spec in self._specs if spec.mask is not None]
        if masks:
            table.add(self._prefix + "mask bits", mask_bits(masks, self._vocab).ravel())

    # -- on the device --------------------------------------------------------------------------------------------

    def run(self, logits: torch.Tensor, uploaded: _Uploaded) -> list[torch.Tensor]:
        """Draw; returns the int32 tensors [n] that `read` takes. `logits` is [rows of the step, vocab_size] fp32."""
        raw = logits[self._rows]
        ruled = self._apply_masks(raw, uploaded) if self._masked else raw
        best, tokens = ruled.max(dim=1)  # the maximum of a row with a NaN is NaN
        flags = best.isfinite().to(torch.int32) * FINITE
        if self._masked:
            flags += best.isneginf().to(torch.int32) * _EMPTY
        if self._has_rules:
            ruled = self._apply_rules(ruled, uploaded)
            _, tokens = ruled.max(dim=1)
        if self._drawn:
            rows = self._get(uploaded, "drawn")
            drawn, reached = self._draw(ruled, uploaded)
            if self._kind is not None:
                tokens = torch.where(self._get(uploaded, "greedy"), tokens, drawn)
            else:
                tokens = drawn if len(drawn) == len(tokens) else tokens.index_copy(0, rows, drawn)
            if reached is not None:
                flags.index_add_(0, rows, reached.to(torch.int32) * _REACHED)
        results = [tokens.to(torch.int32), flags]
        if self._asked:
            rows = self._get(uploaded, "asked")
            asked = raw.index_select(0, rows)
            scale = asked.logsumexp(dim=1, keepdim=True)
            own = asked.gather(1, tokens.index_select(0, rows)[:, None]) - scale
            top = asked.topk(self._most, dim=1)
            results += [
                own.flatten().view(torch.int32),
                (top.values - scale).flatten().view(torch.int32),
                top.indices.flatten().to(torch.int32),
            ]
        return results

    def _get(self, uploaded: _Uploaded, name: str) -> torch.Tensor:
        return uploaded[self._prefix + name]

    def _apply_masks(self, raw: torch.Tensor, uploaded: _Uploaded) -> torch.Tensor:
        """A copy of the rows `raw` [rows, vocab_size] with -inf for the tokens that a row's mask forbids."""
        hidden = forbidden(self._get(uploaded, "mask bits").view(len(self._masked), -1), self._vocab)
        if len(self._masked) == len(raw):
            return raw.masked_fill(hidden, -torch.inf)
        rows = self._get(uploaded, "masked")
        return raw.index_copy(0, rows, raw.index_select(0, rows).masked_fill_(hidden, -torch.inf))

    def _apply_rules(self, logits: torch.Tensor, uploaded: _Uploaded) -> torch.Tensor:
        """A copy of logits [rows, vocab_size] to which bias and penalties have been applied."""
        ruled = logits.clone()
        flat = ruled.view(-1)
        entries = self._get(uploaded, "biased")
        flat.scatter_(0, entries, flat.gather(0, entries) + self._get(uploaded, "bias"))
        entries, repetition = self._get(uploaded, "seen"), self._get(uploaded, "repetition")
        x = flat.gather(0, entries)
        x = torch.where(x > 0, x / repetition, x * repetition) - self._get(uploaded, "penalty")
        flat.scatter_(0, entries, x)
        return ruled

    def _draw(self, ruled: torch.Tensor, uploaded: _Uploaded) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw the rows that are not greedy from ruled [rows, vocab_size]. Returns their tokens, int64 [drawn rows],
        and the second result of `weights`."""
        rows = ruled if len(self._drawn) == len(ruled) else ruled.index_select(0, self._get(uploaded, "drawn"))
        weights, reached = self.weights(rows, uploaded)
        tokens = draw(weights, self._get(uploaded, "keys")[:, None])
        # A row that is not finite has no sound weights, and may have drawn a column that is no token.
        return tokens.clamp_(max=self._vocab - 1), reached

    def weights(self, rows: torch.Tensor, uploaded: _Uploaded) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The distributions of the rows that are not greedy, [drawn rows, vocab_size] fp32, each scaled so that its
        likeliest token has weight 1: fp32 [drawn rows, SPAN * span_count(vocab_size)].

        The second result, [drawn rows] bool, is False where top-p's prefix was not long enough; None without top-p.
        """
        n, vocab = rows.shape
        padded = rows.new_empty(n, SPAN * span_count(vocab))
        x = torch.sub(rows, rows.amax(dim=1, keepdim=True), out=padded[:, :vocab])
        x.div_(self._get(uploaded, "temperature")[:, None])
        for group in self._top_k:
            chosen = self._get(uploaded, group.name)
            filtered = x if len(group.rows) == n else x.index_select(0, chosen)
            last = self._get(uploaded, f"{group.name} last")[:, None]
            best = filtered.topk(group.width, dim=1).values
            floor = best.gather(1, last.clamp(min=0)).masked_fill_(last < 0, -torch.inf)
            self._drop_below(x, filtered, floor, chosen, -torch.inf)
        x.exp_()
        reached = torch.ones(n, dtype=torch.bool, device=rows.device)
        for group in self._top_p:
            chosen = self._get(uploaded, group.name)
            filtered = x if len(group.rows) == n else x.index_select(0, chosen)
            mass = self._get(uploaded, f"{group.name} mass")[:, None]
            floor, enough = _nucleus_floor(filtered, mass, group.width)
            self._drop_below(x, filtered, floor, chosen, 0.0)
            reached.index_copy_(0, chosen, enough)
        if self._has_min_p:
            x.masked_fill_(x < self._get(uploaded, "min-p")[:, None], 0.0)
        padded[:, vocab:].zero_()
        return padded, reached if self._top_p else None

    @staticmethod
    def _drop_below(
        x: torch.Tensor, filtered: torch.Tensor, floor: torch.Tensor, chosen: torch.Tensor, value: float
    ) -> None:
        """Set numbers less than floor [len(filtered), 1] to `value`, in the rows `chosen` of x. `filtered` is a copy of
        these rows, or x itself."""
        filtered.masked_fill_(filtered < floor, value)
        if filtered is not x:
            x.index_copy_(0, chosen, filtered)

    # -- on the host ----------------------------------------------------------------------------------------------

    def read(self, values: _Reader) -> tuple[list[Sampled], list[int]]:
        """The results of `run`: one Sampled for each row, and the rows that must be drawn with a longer prefix."""
        n = len(self._specs)
        tokens, flags = values.take(n).tolist(), values.take(n).tolist()
        sampled = sampled_rows(self._specs, tokens, flags, _EMPTY)
        if self._asked:
            own = values.take(len(self._asked)).view(np.float32).tolist()
            shape = (len(self._asked), self._most)
            logprobs = values.take(shape[0] * shape[1]).view(np.float32).reshape(shape).tolist()
            ids = values.take(shape[0] * shape[1]).reshape(shape).tolist()
            add_logprobs(sampled, self._specs, self._asked, own, (ids, logprobs))
        short = [i for i in self._drawn if flags[i] & (FINITE | _REACHED) == FINITE] if self._top_p else []
        return sampled, short


def _nucleus_floor(weights: torch.Tensor, mass: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest weight in each row's nucleus, [rows, 1], found among the `width` likeliest tokens.

    The nucleus is the likeliest tokens up to and including the one with which their share of the row's weight reaches
    mass [rows, 1]; a mass of 1 keeps all tokens. The second result, [rows], is False where `width` tokens do not reach
    it; the floor is then too high.
    """
    best = weights.topk(width, dim=1).values
    sums = best.cumsum(dim=1, dtype=torch.float64)
    wanted = mass * weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    size = ((sums - best) < wanted).sum(dim=1, keepdim=True).clamp_(min=1)
    everything = best[:, -1:] == 0 if width < weights.shape[1] else torch.ones_like(wanted, dtype=torch.bool)
    keeps_all = mass >= 1.0
    floor = best.gather(1, size - 1).masked_fill_(keeps_all, 0.0)
    return floor, ((sums[:, -1:] >= wanted) | everything | keeps_all).flatten()


class _Reader:
    """Reads an array from its start to its end."""

    def __init__(self, values: npt.NDArray[np.int32]):
        self._values, self._next = values, 0

    def take(self, n: int) -> npt.NDArray[np.int32]:
        """The next `n` values."""
        start, self._next = self._next, self._next + n
        return self._values[start : self._next]
