"""The largest numbers of each row of a matrix, and what filters of tokens need of them.

On a CPU, torch's functions compare one pair of numbers at a time: the 150,000 largest of 152,000 numbers take 12 ms.
There this module uses numpy, whose vector instructions partition the row in 0.2 ms and sort it in 0.5 ms. Both
libraries take NaN for the largest number, and let other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

#: Arrays of at least so many numbers are worked on by several threads.
_PARALLEL = 1 << 20
#: So many numbers are sorted; more are cut into halves first.
_SORTED = 2048


def likeliest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of each row of rows [n, m] and its column, int64: two tensors [n]."""
    if rows.device.type != "cpu":
        best, columns = rows.max(dim=1)
        return best, columns
    columns = torch.from_numpy(np.concatenate(_by_parts(lambda part: part.argmax(axis=1), rows.numpy())))
    return rows.gather(1, columns[:, None])[:, 0], columns


def kth_largest(rows: torch.Tensor, k: torch.Tensor, most: int) -> torch.Tensor:
    """The number of each row of rows [n, m] than which k[row] numbers of the row are larger, unless some are equal:
    [n, 1]. k [n, 1] is int64, from 0 to most - 1."""
    if rows.device.type != "cpu":
        return rows.topk(most, dim=1).values.gather(1, k)
    return torch.from_numpy(np.concatenate(_by_parts(_kth_largest, rows.numpy(), k.numpy()[:, 0])))[:, None]


def _kth_largest(rows: np.ndarray, k: np.ndarray) -> np.ndarray:
    places = rows.shape[1] - 1 - k
    found = np.empty(len(rows), rows.dtype)
    for place in np.unique(places).tolist():
        chosen = places == place
        some = rows if chosen.all() else rows[chosen]
        found[chosen] = np.partition(some, place, axis=1)[:, place]
    return found


def drop_below(rows: torch.Tensor, floor: torch.Tensor, value: float) -> None:
    """Set the numbers of rows [n, m] that are less than floor [n, 1] to `value`."""
    if rows.device.type == "cpu":
        _by_parts(lambda part, least: np.copyto(part, value, where=part < least), rows.numpy(), floor.numpy())
    else:
        rows.masked_fill_(rows < floor, value)


def nucleus_floor(weights: torch.Tensor, mass: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest weight in each row's nucleus, [rows, 1], found among the `width` likeliest tokens.

    The nucleus is the likeliest tokens up to and including the one with which their share of the row's weight reaches
    mass [rows, 1]; a mass of 1 keeps all tokens. The second result, [rows], is False where `width` tokens do not reach
    it; the floor is then too high. On a CPU they are looked for among all tokens then, so it is True.
    """
    best = _largest(weights, width)
    sums = best.cumsum(dim=1, dtype=torch.float64)
    wanted = mass * weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    size = ((sums - best) < wanted).sum(dim=1, keepdim=True).clamp_(min=1)
    everything = best[:, -1:] == 0 if width < weights.shape[1] else torch.ones_like(wanted, dtype=torch.bool)
    keeps_all = mass >= 1.0
    floor = best.gather(1, size - 1).masked_fill_(keeps_all, 0.0)
    enough = ((sums[:, -1:] >= wanted) | everything | keeps_all).flatten()
    if weights.device.type == "cpu":
        short = (~enough).nonzero()[:, 0].numpy()

        def search(rows: np.ndarray) -> None:
            for row in rows.tolist():
                floor[row, 0] = _floor_among_all(weights[row].numpy(), wanted[row].item())

        _by_parts(search, short, numbers=len(short) * weights.shape[1])
        enough.fill_(True)
    return floor, enough


def _floor_among_all(weights: np.ndarray, wanted: float) -> float:
    """The smallest of the largest weights that together reach `wanted`. The cut is looked for by halves."""
    above = 0.0  # sum of the weights that are larger than those of `weights`
    while len(weights) > _SORTED:
        middle = len(weights) // 2
        weights = np.partition(weights, middle)
        upper = float(weights[middle:].sum(dtype=np.float64))
        if above + upper >= wanted:
            weights = weights[middle:]
        else:
            above += upper
            weights = weights[:middle]
    descending = np.sort(weights)[::-1]
    reached = above + descending.cumsum(dtype=np.float64) >= wanted
    return float(descending[reached.argmax() if reached.any() else -1])


def _by_parts(function: Callable[..., Any], *arrays: np.ndarray, numbers: int | None = None) -> list[Any]:
    """The results of `function` for parts of arrays with equally many rows, at the same time on all threads of the
    S-Part. An array of few numbers is one part; `numbers` is how many there are, if not those of the first array."""
    n = len(arrays[0])
    parts = min(n, torch.get_num_threads()) if (numbers or arrays[0].size) >= _PARALLEL else 1
    if parts <= 1:
        return [function(*arrays)]
    bounds = [n * i // parts for i in range(parts + 1)]
    slices = [slice(*pair) for pair in pairwise(bounds)]
    others = [_threads().submit(function, *(array[part] for array in arrays)) for part in slices[1:]]
    first = function(*(array[slices[0]] for array in arrays))
    return [first, *(other.result() for other in others)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="fastdecode-sampling")


def _largest(rows: torch.Tensor, k: int) -> torch.Tensor:
    """The `k` largest numbers of each row of rows [n, m] in descending order: [n, k]."""
    if rows.device.type != "cpu":
        return rows.topk(k, dim=1).values
    values, n = rows.numpy(), rows.shape[1]
    some = np.partition(values, n - k, axis=1)[:, n - k :] if k < n else values
    return torch.from_numpy(np.sort(some, axis=1)).flip(1)
