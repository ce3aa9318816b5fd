"""Line: y = fixed + slope * x, fitted to observations by least squares, with older ones forgotten."""

from __future__ import annotations

from dataclasses import dataclass

#: Weight of the older observations after each new one.
_MEMORY = 0.98

#: Relative variance of x from which the fixed cost can be told from the slope.
_SPREAD = 0.01


@dataclass(slots=True)
class Line:
    """Decayed sums of the observations, and the line through them."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    slope: float | None = None  # None until the observations differ enough in x; then never negative

    def observe(self, x: float, y: float) -> None:
        """Add an observation."""
        self.n = _MEMORY * self.n + 1.0
        self.x = _MEMORY * self.x + x
        self.y = _MEMORY * self.y + y
        self._xx = _MEMORY * self._xx + x * x
        self._xy = _MEMORY * self._xy + x * y
        mean = self.x / self.n
        variance, covariance = self._xx / self.n - mean * mean, self._xy / self.n - mean * self.mean
        if variance > _SPREAD * mean * mean and covariance > 0:
            self.slope = covariance / variance

    @property
    def mean(self) -> float:
        """The mean of y. There must be an observation."""
        return self.y / self.n

    @property
    def fixed(self) -> float:
        """The fixed cost: the line's y at x = 0, not negative; 0 while the slope is unknown."""
        return max(0.0, self.mean - self.slope * self.x / self.n) if self.slope is not None else 0.0
