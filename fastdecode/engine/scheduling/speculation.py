"""Speculative decoding: guesses of a sequence's next tokens, which one step verifies together.

With --speculate suffix:K the guesses are the tokens that followed the last occurrence of the sequence's last tokens in
the sequence itself (prompt lookup, Saxena 2023; suffix decoding, arXiv 2411.04975). They suit summaries that quote and
edited code. With --speculate mtp:K the model's own MTP head (multi-token prediction, DeepSeek-V3, arXiv 2412.19437)
drafts the guesses at the end of the step before.

The guessed tokens are rows of the step behind the last token's own row. Every row draws the token that follows it, by
the random numbers of its index, so a guess is right if the row before it has drawn it, and the output is the same as
without guesses. The R-node drops the rows of wrong guesses when the sequence goes on (FD_ROW_TRIM).

Each guess makes a step slower, and it may be wrong. The number of guesses follows both: guess j is made while the
probability that the first j guesses are all right exceeds the cost of its row, as a share of a token's time.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.line import Line

if TYPE_CHECKING:
    from fastdecode.engine.state.sequence import Sequence
    from fastdecode.engine.state.totals import Totals
    from fastdecode.spart.step.batch import Sampled

#: A sequence whose guesses do not pay gets one guess after this many tokens, because its text may have changed.
_RETRY_AFTER = 32

#: The cost of a row, as a share of a token's time, until steps of different sizes have been seen.
_UNKNOWN_COST = 0.25


class Speculation:
    """How many tokens to guess for each sequence of a step."""

    def __init__(self, totals: Totals, most: int, by_head: bool = False):
        """`totals` counts the guesses. `most`: guesses of a sequence in one step. `by_head`: the model's MTP head makes
        them."""
        self.most, self.by_head = most, by_head
        self._totals = totals
        self._steps = Line()  # seconds of a step that only decodes, by its rows

    def guesses(self, seq: Sequence, rows: int, n_decoding: int) -> list[int]:
        """Guesses for a sequence that decodes, at most `rows`, in a step of `n_decoding` such sequences.

        A sequence whose logits depend on the tokens before, by penalties or a grammar, gets none.
        """
        if _depends_on_tokens(seq):
            return []
        guesser = seq.guesser
        guesser.idle += 1
        # The last token that a sequence generates is not cached, so no row follows it.
        most = min(self.most, rows, seq.max_new - seq.n_generated - 1)
        n = min(most, self._worth(guesser.rate, n_decoding) or guesser.idle // _RETRY_AFTER)
        if n <= 0:
            return []
        guesses = guesser.drafted(len(seq.tokens), n) if self.by_head else guesser.guess(seq.tokens, n)
        if guesses:
            guesser.idle = 0
        return guesses

    def drafts(self, seqs: list[Sequence]) -> int:
        """The most tokens that the MTP head shall draft for any of the sequences that draw a token in a step, for their
        guesses in the next one. 0: guesses would not pay, so the head only stores its K and V."""
        if not self.by_head:
            return 0
        guessers = [seq.guesser for seq in seqs if not _depends_on_tokens(seq)]
        worth = (self._worth(one.rate, len(seqs)) or (one.idle + 1) // _RETRY_AFTER for one in guessers)
        return min(self.most, max(worth, default=0))

    def _worth(self, rate: float, n_decoding: int) -> int:
        """The largest j for which rate^j exceeds the cost of a row as a share of a token's time."""
        slope = self._steps.slope
        share = _UNKNOWN_COST if slope is None else slope * n_decoding / self._steps.mean
        if share >= rate:
            return 0
        return int(log(max(share, 1e-6)) / log(min(rate, 0.999)))

    def took(self, rows: int, seconds: float) -> None:
        """Record the time of a step of `rows` rows that only decodes."""
        self._steps.observe(rows, seconds)

    def judge(self, seq: Sequence, guesses: Iterable[int], first: Sampled) -> list[Sampled]:
        """The tokens that a step has drawn for `seq`: `first`, and the token after each right guess."""
        drawn = [first]
        for guess, following in zip(guesses, first.after_drafts, strict=True):
            if drawn[-1].token != guess or following.error is not None:
                break
            drawn.append(following)
        seq.guesser.judged(len(drawn) - 1, len(first.after_drafts))
        seq.guesser.drafts = len(seq.tokens) + len(drawn), drawn[-1].drafts
        self._totals.guessed += len(first.after_drafts)
        self._totals.guessed_right += len(drawn) - 1
        return drawn


def _depends_on_tokens(seq: Sequence) -> bool:
    """True if the logits depend on the tokens before, by penalties or a grammar."""
    return seq.constraints is not None or (seq.rules is not None and seq.rules.penalises)
