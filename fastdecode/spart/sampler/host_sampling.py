"""HostSampler: draws the next token of every row of a step on a CPU, in one call of C (kernels/sampling).

It does what the Sampler of devices does (sampling.py), and draws the same tokens but where rounding decides: mask, bias
and penalties, temperature, top-k, top-p, min-p, and the race of draws.py. A row is worked on in a core's cache from its
logits to its token, and rows are shared among the S-Part's threads; torch's operations would write and read the logits
of all rows a dozen times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from fastdecode.kernels import _native
from fastdecode.spart.sampler.draws import SPAN, span_count, stream_keys
from fastdecode.spart.sampler.results import MIN_TEMPERATURE, add_logprobs, sampled_rows
from fastdecode.spart.served import act_code
from fastdecode.spart.step.batch import Sampled, SampleSpec
from fastdecode.spart.step.masks import mask_words
from fastdecode.spart.step.penalties import row_rules
from fastdecode.spart.threads import pool_threads

#: fd_draw_row_t.
_ROW = np.dtype(
    [
        ("key", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("top_k", np.uint32),
        ("mask", np.int32),
        ("bias_start", np.uint32),
        ("bias_stop", np.uint32),
        ("seen_start", np.uint32),
        ("seen_stop", np.uint32),
    ]
)
_NOTHING = 2  # FD_ROW_NOTHING; FD_ROW_FINITE is FINITE
_NO_MASK = -1
_DTYPES = {dtype: act_code(dtype) for dtype in (torch.float32, torch.bfloat16)}


@cache
def _native_draws() -> _native.RowDraws:
    return _native.RowDraws()


class HostSampler:
    """The draws of one step, planned before the step runs."""

    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int):
        """`specs` has one entry for each row."""
        self._specs, self._vocab = specs, vocab_size
        self._masked = [i for i, spec in enumerate(specs) if spec.mask is not None]
        self._asked = [i for i, spec in enumerate(specs) if spec.logprobs is not None]
        self._rows = rows = np.zeros(len(specs), _ROW)
        rows["mask"] = _NO_MASK
        if self._masked:
            rows["mask"][self._masked] = np.arange(len(self._masked))
        drawn = [i for i, spec in enumerate(specs) if spec.temperature >= MIN_TEMPERATURE]
        if drawn:
            some = [specs[i] for i in drawn]
            rows["key"][drawn] = stream_keys([spec.seed for spec in some], [spec.index for spec in some])
            rows["temperature"][drawn] = [spec.temperature for spec in some]
            rows["top_p"][drawn] = [spec.top_p for spec in some]
            rows["min_p"][drawn] = [spec.min_p for spec in some]
            rows["top_k"][drawn] = [min(spec.top_k, vocab_size) for spec in some]
        ruled = [(i, spec.rules) for i, spec in enumerate(specs) if spec.rules is not None]
        self._rules = row_rules([rule for _, rule in ruled]) if ruled else None
        for (i, rule), (bias_stop, seen_stop) in zip(ruled, self._rules.stops if self._rules else (), strict=True):
            rows[i]["repetition"] = rule.repetition
            rows[i]["bias_start"], rows[i]["bias_stop"] = bias_stop - len(rule.bias_ids), bias_stop
            rows[i]["seen_start"], rows[i]["seen_stop"] = seen_stop - rule.n_penalised, seen_stop

    def __call__(self, logits: torch.Tensor, _uploaded: object = None) -> list[Sampled]:
        """Draw one token a row. `logits` is [rows, vocab_size] in fp32 or another dtype of floats.

        A row with a logit that is NaN or +inf, or whose mask allows no token, gets an error and no token.
        """
        tokens, flags, _ = self.run(logits)
        sampled = sampled_rows(self._specs, tokens.tolist(), flags.tolist(), _NOTHING)
        if self._asked:
            self._add_logprobs(logits, sampled)
        return sampled

    def run(
        self, logits: torch.Tensor, *, keep_weights: bool = False
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], torch.Tensor | None]:
        """The tokens and flags of all rows, int32 [rows] each; and with `keep_weights` the weights by which the tokens
        were drawn, fp32 [rows, SPAN * span_count(vocab_size)], which say nothing about a greedy row."""
        logits = (logits if logits.dtype in _DTYPES else logits.float()).contiguous()
        n, vocab = logits.shape
        assert n == len(self._specs) and vocab == self._vocab and logits.device.type == "cpu"
        masks = (
            mask_words([spec.mask for spec in self._specs if spec.mask is not None], vocab) if self._masked else None
        )
        tokens, flags = results = np.empty((2, n), np.int32)
        weights = torch.zeros(n, SPAN * span_count(vocab)) if keep_weights else None
        rules, address = self._rules, results.ctypes.data
        _native_draws().run(
            logits.data_ptr(),
            _DTYPES[logits.dtype],
            self._rows.ctypes.data,
            n,
            vocab,
            0 if masks is None else masks.ctypes.data,
            0 if masks is None else masks.shape[1],
            0 if rules is None else rules.biased.ctypes.data,
            0 if rules is None else rules.bias.ctypes.data,
            0 if rules is None else rules.seen.ctypes.data,
            0 if rules is None else rules.penalty.ctypes.data,
            address,
            address + tokens.nbytes,
            0 if weights is None else weights.data_ptr(),
            pool_threads(),
        )
        return tokens, flags, weights

    def _add_logprobs(self, logits: torch.Tensor, sampled: list[Sampled]) -> None:
        """Give the rows that ask for them the log-probabilities of the raw distribution."""
        rows = [i for i in self._asked if sampled[i].error is None]
        if not rows:
            return
        most = min(max(self._specs[i].logprobs or 0 for i in rows), self._vocab)
        raw = logits[rows].float()
        scale = raw.logsumexp(dim=1, keepdim=True)
        own = (raw.gather(1, torch.tensor([[sampled[i].token] for i in rows])) - scale)[:, 0].tolist()
        top = raw.topk(most, dim=1)
        add_logprobs(sampled, self._specs, rows, own, (top.indices.tolist(), (top.values - scale).tolist()))
