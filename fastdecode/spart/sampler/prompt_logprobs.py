"""Scores of a prompt: the probabilities that the model gives the prompt's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fastdecode.spart.sampler.results import rows_of_block
from fastdecode.spart.step.batch import Chunk, TokenScore
from fastdecode.spart.step.step_table import StepTable, download


class Scorer:
    """The scores that the chunks of one step ask for, planned before the step runs."""

    def __init__(self, chunks: Sequence[Chunk], starts: Sequence[int], vocab_size: int, table: StepTable):
        """`starts[i]` is the first row of chunk i. Adds "scored rows" and "scored tokens", int64 [n_rows], to the
        table."""
        self._vocab = vocab_size
        self._scored: list[tuple[int, int, int]] = []  # chunk, its number of scores, alternatives
        rows: list[int] = []
        tokens: list[int] = []
        for i, score in [(i, chunk.score) for i, chunk in enumerate(chunks) if chunk.score is not None]:
            if n := len(score.tokens):
                rows += range(starts[i], starts[i] + n)
                tokens += score.tokens
                self._scored.append((i, n, score.top))
        self.n_rows = len(rows)
        if rows:
            table.add("scored rows", np.array(rows))
            table.add("scored tokens", np.array(tokens))

    def __call__(
        self, logits_of: Callable[[slice], torch.Tensor], uploaded: dict[str, torch.Tensor]
    ) -> dict[int, list[TokenScore]]:
        """The scores of each chunk that asks for some, by the chunk's index.

        `logits_of(rows)` gives the logits, [rows, vocab_size] fp32, of some of the scored rows. The host waits for
        the device once for each block of rows.
        """
        if not self.n_rows:
            return {}
        width = min(max(top for _, _, top in self._scored), self._vocab)
        scores: list[TokenScore] = []
        n = rows_of_block(self._vocab)
        for start in range(0, self.n_rows, n):
            block = slice(start, min(start + n, self.n_rows))
            logprobs = logits_of(block).log_softmax(dim=1)
            own = logprobs.gather(1, uploaded["scored tokens"][block, None])
            better = (logprobs > own).sum(dim=1, keepdim=True)
            top = logprobs.topk(width, dim=1)
            table = download(torch.cat([t.double() for t in (own, better, top.indices, top.values)], dim=1)).tolist()
            for values in table:
                ids = [int(token) for token in values[2 : 2 + width]]
                likeliest = list(zip(ids, values[2 + width :], strict=True))
                scores.append(TokenScore(values[0], 1 + int(values[1]), likeliest))
        found, start = {}, 0
        for chunk, count, top_n in self._scored:
            found[chunk] = [s._replace(top=s.top[:top_n]) for s in scores[start : start + count]]
            start += count
        return found
