"""Stop strings, against their definition."""

from __future__ import annotations

import random

import pytest

from fastdecode.text.stop_strings import StopStrings

pytestmark = pytest.mark.quick


def cut_before_stop(text, stops):
    """The expected result, by the definition, one character at a time."""
    for end in range(1, len(text) + 1):
        if complete := [len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(complete)], True
    return text, False


@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(seed):
    rng = random.Random(seed)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", weights=[5, 5, 1], k=rng.randint(0, 20)))
        matcher, sent, stopped, rest = StopStrings(stops), "", False, text
        while rest and not stopped:
            n = rng.randint(1, 4)
            released, stopped = matcher.push(rest[:n])
            sent, rest = sent + released, rest[n:]
            assert cut_before_stop(text, stops)[0].startswith(sent)
        assert (sent + matcher.flush() * (not stopped), stopped) == cut_before_stop(text, stops)
