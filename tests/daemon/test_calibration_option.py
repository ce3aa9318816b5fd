"""`--no-calibration`: a served model's weights of 4 bits are those nearest to its own."""

from __future__ import annotations

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"


def test_without_calibration_the_weights_are_other_ones(start):
    scores = {}
    for option in ([], ["--no-calibration"]):
        node = start("--role", "s", "--port", "0", "--weights", "int4", "--dtype", "fp32", *option)
        api = node.api()
        answer = api.completions.create(model="fastdecode-demo", prompt=PROMPT, max_tokens=1, echo=True, logprobs=0)
        node.wait_for("loading the weights of ")
        if not option:
            node.wait_for(r"rounded block 1 of \d+ to int4")
        scores[*option] = answer.choices[0].logprobs.token_logprobs[1:]
        assert node.end() == 0
    calibrated, nearest = scores[()], scores[("--no-calibration",)]
    assert max(abs(a - b) for a, b in zip(calibrated, nearest, strict=True)) > 0.01
