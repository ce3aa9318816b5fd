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


def cut_with_hidden(parts, stops):
    """The shown text before the first stop string, by the definition: one with an upper-case letter is looked for in
    all parts, any other in the shown ones. `parts` are characters; upper-case ones are hidden."""
    for end in range(1, len(parts) + 1):
        whole = parts[:end]
        shown = "".join(c for c in whole if c.islower())
        complete = []
        for stop in stops:
            if not stop.islower() and whole.endswith(stop):
                complete.append((len(stop), sum(c.islower() for c in stop)))
            elif stop.islower() and whole[-1].islower() and shown.endswith(stop):
                complete.append((len(stop), len(stop)))
        if complete:
            return shown[: len(shown) - max(complete, key=lambda pair: pair[0])[1]], True
    return "".join(c for c in parts if c.islower()), False


@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_with_hidden_parts(seed):
    rng, found = random.Random(seed), 0
    for _ in range(500):
        stops = ["".join(rng.choices("abX", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abX", weights=[5, 5, 2], k=rng.randint(0, 20)))
        matcher, sent, stopped, rest = StopStrings(stops, is_special=lambda stop: not stop.islower()), "", False, text
        while rest and not stopped:
            hidden = rest[0].isupper()
            n = next((i for i, c in enumerate(rest) if c.isupper() != hidden), len(rest))
            n = rng.randint(1, n)
            released, stopped = matcher.push(rest[:n], hidden=hidden)
            sent, rest = sent + released, rest[n:]
            assert cut_with_hidden(text, stops)[0].startswith(sent)
        found += stopped
        assert (sent + matcher.flush() * (not stopped), stopped) == cut_with_hidden(text, stops)
    assert found > 100
