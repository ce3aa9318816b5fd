"""Weights in 4 bits: with `--no-calibration` they are those nearest to the model's own, and `--save-weights` keeps
them."""

from __future__ import annotations

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"


def test_without_calibration_the_weights_are_other_ones_and_saved_ones_are_the_same(start, tmp_path):
    saved = tmp_path / "saved"
    rounding = ("--weights", "int4")
    cases = {
        "calibrated": (*rounding, "--save-weights", str(saved)),
        "nearest": (*rounding, "--no-calibration"),
        "saved": ("--model", str(saved), "--served-model-name", "fastdecode-demo"),
    }
    scores = {}
    for case, options in cases.items():
        node = start("--role", "s", "--port", "0", "--dtype", "fp32", *options)
        api = node.api()
        ask = {"model": "fastdecode-demo", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        answer = api.completions.create(**ask, echo=True, logprobs=0)
        node.wait_for("loading the weights of ")
        if case == "calibrated":
            node.wait_for(f"the rounded weights are in {saved}")
        scores[case] = answer.choices[0].logprobs.token_logprobs[1:]
        assert node.end() == 0
    assert scores["saved"] == scores["calibrated"]
    assert max(abs(a - b) for a, b in zip(scores["calibrated"], scores["nearest"], strict=True)) > 0.01
