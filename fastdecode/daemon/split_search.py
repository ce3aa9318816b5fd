"""Which splits of a CPU to measure: few of all that there are, chosen by what the measurements before have shown.

In turns, more threads of the S-Part read faster up to a number, and then wait longer for each other; so the search
goes from all cores down. Side by side, the S-Part is faster with more cores and the R-Part slower, so there is one best
division between them. It is enclosed between two divisions that are slower, ever more closely.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise

import numpy as np

from fastdecode.daemon.split import Split

#: Splits that are measured, the rule's included.
MOST_SPLITS = 12

_STEP = 1.6  # ratio of the threads of a part to those of the next division, until the best one is enclosed
_WORTH_MORE = 1.03  # more speed than this, which a division in between may have, is worth a measurement
_EQUAL = 0.99  # divisions as fast as this part of the best one enclose a level stretch
_LEFT_IN_TURNS = 2  # measurements that are left for splits in turns while these are faster
_MOST_MINI_BATCHES = 4

#: Yields splits to measure. Is sent how many times as fast as the rule's split one is; the slower, the lower.
Search = Generator[Split, float, None]


def search(cpus: int, r_share: float, batch: int) -> Search:
    """The splits of `cpus` cores to measure beside the rule's, which takes turns on all of them. `r_share`: the share
    of the R-Part in a step of `batch` sequences with the rule's split."""
    if cpus < 2:
        return
    speeds = yield from _fewer_in_turns(cpus)
    yield from _between(speeds, 1)
    best = max(speeds.values())
    r_threads = _even_division(cpus, r_share, speeds)
    r_threads, speed, measured = yield from _side_by_side(cpus, r_threads, best, MOST_SPLITS - len(speeds))
    left = MOST_SPLITS - len(speeds) - measured
    if speed < best:
        yield from _between(speeds, left)
        return
    # More mini-batches hide more of the way between the parts, and read the weights more often.
    for mini_batches in range(3, min(_MOST_MINI_BATCHES, batch, 2 + left) + 1):
        best, speed = speed, (yield Split(cpus - r_threads, r_threads, mini_batches))
        if speed < best:
            return


def _fewer_in_turns(cpus: int) -> Generator[Split, float, dict[int, float]]:
    """Try half of the threads of the S-Part as long as that is faster. Returns the speeds by these threads."""
    speeds = {cpus: 1.0}
    threads = cpus
    while threads > 1:
        speeds[threads // 2] = yield Split(threads // 2, cpus, 1, in_turns=True)
        if speeds[threads // 2] <= speeds[threads]:
            break
        threads //= 2
    return speeds


def _between(speeds: dict[int, float], most: int) -> Search:
    """Add up to `most` speeds in turns, of numbers of threads between the best number and those beside it."""
    cpus = max(speeds)
    for _ in range(most):
        known = sorted(speeds)
        at = known.index(max(known, key=speeds.__getitem__))
        gaps = [(b - a, a) for a, b in pairwise(known[max(at - 1, 0) : at + 2]) if b - a > max(1, b // 8)]
        if not gaps:
            return
        gap, a = max(gaps)
        speeds[a + gap // 2] = yield Split(a + gap // 2, cpus, 1, in_turns=True)


def _even_division(cpus: int, r_share: float, speeds: dict[int, float]) -> int:
    """The threads of an R-Part that takes about as long as the S-Part beside it, going by the speeds in turns. Two
    mini-batches read the weights twice, and the R-Part takes as much longer as it has fewer threads."""
    known = sorted(threads for threads, speed in speeds.items() if speed > 0)
    s_part = [max(1 / speeds[threads] - r_share, 0.0) for threads in known]

    def longer(r_threads: int) -> float:
        s_threads = cpus - r_threads
        fewer = max(known[0] / s_threads, 1.0)
        return max(2 * fewer * float(np.interp(s_threads, known, s_part)), r_share * cpus / r_threads)

    return min(range(1, cpus), key=longer)


def _side_by_side(cpus: int, r_threads: int, best: float, most: int) -> Generator[Split, float, tuple[int, float, int]]:
    """Find the division between two mini-batches' parts, from a guess on, in at most `most` measurements. Returns the
    threads of the R-Part, their speed, and the number of measurements. `best`: the speed of the best other split."""
    below, above = (0, -1.0), (cpus, -1.0)  # R-Parts that are slower, or that are not possible, and their speeds
    speed = yield Split(cpus - r_threads, r_threads, 2)
    measured = 1
    while measured < most - (_LEFT_IN_TURNS if speed < best else 0):
        if min(below[1], above[1]) > _EQUAL * speed:
            break
        s_threads = cpus - r_threads
        # No part gains more than in proportion to its threads.
        to_s, to_r = (cpus - below[0]) / s_threads, above[0] / r_threads
        if speed > 0 and speed * max(to_s, to_r) < _WORTH_MORE * max(best, speed):
            break
        fewer, more = r_threads - below[0] > 1, above[0] - r_threads > 1
        if not fewer and not more:
            break
        # First on the side that is not enclosed yet, then where more is to gain.
        if fewer and (not more or (below[0] == 0, to_s) >= (above[0] == cpus, to_r)):
            tried = _fewer(r_threads, below[0], s_threads)
        else:
            tried = cpus - _fewer(s_threads, cpus - above[0], r_threads)
        tried_speed = yield Split(cpus - tried, tried, 2)
        measured += 1
        worse = (tried, tried_speed)
        if tried_speed > speed:
            worse, (r_threads, speed) = (r_threads, speed), worse
        if worse[0] < r_threads:
            below = worse
        else:
            above = worse
    return r_threads, speed, measured


def _fewer(threads: int, fewest: int, others: int) -> int:
    """The threads of a part that gives some of `threads` to the other part, which has `others`. It keeps more than
    `fewest`; 0: it may keep one."""
    tried = (fewest + threads) // 2 if fewest else round(max(threads / _STEP, threads - (_STEP - 1) * others))
    return max(min(tried, threads - 1), fewest + 1)
