"""How long outputs will be: survival curves of the lengths seen so far, one for each class of requests.

An output that an end token ended has a known length. An output that was cancelled or met its max_tokens is censored:
it would have been longer. The product-limit estimate of Kaplan and Meier (1958) uses both. Lengths are heavy-tailed, so
they are counted in bins of about 9 % of their length. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Bins begin at these lengths: single tokens up to 16, then steps of a twelfth.
EDGES: Floats = np.unique(np.concatenate([np.arange(16.0), np.round(16 * (13 / 12) ** np.arange(160))]))

#: A class with fewer outputs than this is unknown.
_LEAST_OUTPUTS = 16

#: The half-life, in tokens, of the outputs of an unknown class whose requests set no max_tokens.
_HALF_LIFE = 256.0

#: At lengths that fewer outputs than this have reached, one output is added that ends at the rate 1 / length, the rate
#: of a heavy tail.
_LEAST_AT_RISK = 16

#: Old outputs are forgotten: when a class has this many, all of them count half.
_MOST_OUTPUTS = 2048


class OutputLengths:
    """Survival curves of output lengths, by class."""

    def __init__(self) -> None:
        self._classes: dict[Hashable, _Curve] = {}

    def observe(self, length_class: Hashable, n_tokens: int, *, ended: bool) -> None:
        """Record an output of `n_tokens` tokens; `ended`: an end token was its last, so it would not have been longer.

        Ignores an output without tokens: a request that was cancelled in the queue shows no length.
        """
        if n_tokens < 1:
            return
        self._classes.setdefault(length_class, _Curve()).observe(n_tokens, ended)

    def set_running(self, lengths: dict[Hashable, list[int]]) -> None:
        """Tell the present lengths of the outputs that still go on, by class.

        These outputs count as censored: without them, short outputs, which end first, would look like all outputs.
        """
        for length_class, curve in self._classes.items():
            curve.set_running(lengths.get(length_class, []))

    def known(self, length_class: Hashable) -> bool:
        """True if the class has enough outputs for an estimate."""
        return length_class in self._classes and self._classes[length_class].n >= _LEAST_OUTPUTS

    def survival(self, length_class: Hashable, lengths: Floats, *, bounded: bool) -> Floats:
        """The probability that an output has more than `lengths` tokens, any shape.

        In an unknown class, a request that sets max_tokens (`bounded`) counts as reaching it, and any other as
        heavy-tailed.
        """
        if self.known(length_class):
            return np.interp(lengths, EDGES, self._classes[length_class].survival)
        return np.ones_like(lengths) if bounded else _HALF_LIFE / (_HALF_LIFE + lengths)

    def spread(self, length_class: Hashable, bound: int, *, bounded: bool) -> tuple[Floats, Floats]:
        """How the steps of an output of at most `bound` tokens spread over the number of tokens that it has: numbers of
        tokens, and the mean number of steps that end with about as many, both [bins]."""
        edges = np.append(EDGES[bound > EDGES], float(bound))
        alive = self.survival(length_class, edges, bounded=bounded)
        return (edges[1:] + edges[:-1] + 1) / 2, np.diff(edges) * (alive[1:] + alive[:-1]) / 2

    def horizon(self, length_class: Hashable, *, bounded: bool) -> float:
        """A length that few outputs exceed; infinite if they count as reaching their bound."""
        if not self.known(length_class):
            return float("inf") if bounded else 8 * _HALF_LIFE
        below = np.flatnonzero(self._classes[length_class].survival < 0.01)
        return float(EDGES[below[0]]) if below.size else float("inf")


class _Curve:
    def __init__(self) -> None:
        self.n = 0.0
        self._ended = np.zeros(len(EDGES))
        self._censored = np.zeros(len(EDGES))
        self._running = np.zeros(len(EDGES))
        self._survival: Floats | None = None

    def observe(self, n_tokens: int, ended: bool) -> None:
        # A censored output was at risk in the bins below its own, an ended one in its own too.
        index = int(np.searchsorted(EDGES, n_tokens, "right")) - 1
        (self._ended if ended else self._censored)[index] += 1
        self.n += 1
        if self.n >= _MOST_OUTPUTS:
            self._ended /= 2
            self._censored /= 2
            self.n /= 2
        self._survival = None

    def set_running(self, lengths: list[int]) -> None:
        bins = np.searchsorted(EDGES, lengths, "right") - 1
        self._running = np.bincount(bins, minlength=len(EDGES)).astype(np.float64)
        self._survival = None

    @property
    def survival(self) -> Floats:
        """The probability of more tokens than each of EDGES."""
        if self._survival is None:
            censored = self._censored + self._running
            at_risk = (self._ended + censored)[::-1].cumsum()[::-1] - censored
            thin = at_risk < _LEAST_AT_RISK
            tail = 1 - EDGES / np.append(EDGES[1:], 2 * EDGES[-1])
            hazard = (self._ended + thin * tail) / np.maximum(at_risk + thin, 1e-9)
            # EDGES[i] tokens are exceeded by the outputs that outlive all bins before i.
            self._survival = np.append(1.0, np.cumprod(1 - np.clip(hazard, 0.0, 1.0))[:-1])
        return self._survival
