"""`fastdecode-bench` prints what it promises. No figure is judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from nodes.forked import run
from nodes.rnode_process import RNodeProcess
from transformers import AutoModelForCausalLM

from fastdecode.bench import attention, products, transport_peers
from fastdecode.bench.cli import main
from fastdecode.demo import model_dir
from fastdecode.kernels import _native
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart.linears.dense16 import multiplies_bf16

BENCH = ["-m", "fastdecode.bench.cli"]


def bench(*argv: str) -> str:
    done = run(*BENCH, *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_decode_prints_one_object_with_the_split_its_parts_and_peers():
    argv = ["--batch", "5", "--context", "70", "--steps", "2", "--rounds", "2", "--mini-batches", "2"]
    result = json.loads(bench("decode", *argv, "--peer", "transformers", "--peer", "ranks", "--json"))
    for name in ("tokens_per_s", "s_tokens_per_s", "r_tokens_per_s", "bound_ratio"):
        assert result[name] > 0
    assert (result["batch"], result["context"], result["mini_batches"]) == (5, 70, 2)
    low, high = result["spread"]["bound_ratio"]
    assert low <= result["bound_ratio"] <= high
    for peer in ("transformers", "ranks"):
        assert result["peers"][peer]["tokens_per_s"] > 0


def test_spart_sets_products_beside_onednn_and_the_roofline(monkeypatch, capsys):
    monkeypatch.setattr(products, "_BYTES", 1 << 20)  # copies of a matrix
    if not multiplies_bf16(torch.device("cpu"), 64):
        with pytest.raises(RuntimeError, match="no products of bf16 pairs"):
            products.measure([(96, 64)], [1], 1, 1)
        return
    result = products.measure([(96, 64)], [1, 33], 2, 1)
    assert [(row["batch"], row["outs"], row["ins"]) for row in result["rows"]] == [(1, 96, 64), (33, 96, 64)]
    for row in result["rows"]:
        assert row["gbps"] == pytest.approx(2e-9 * 96 * 64 / row["seconds"])
        assert row["tflops"] == pytest.approx(2e-12 * 96 * 64 * row["batch"] / row["seconds"])
        low, high = row["speedups"]
        assert 0 < low <= row["speedup"] <= high and row["roofline_gbps"] > 0
    products.print_table(result)
    assert "33 rows" in capsys.readouterr().out
    for wrong in ("64", "0x64", "64x"):
        with pytest.raises(ValueError):
            products.shape(wrong)


def test_decode_rounds_weights_as_the_node_does():
    argv = ["--batch", "2", "--context", "70", "--steps", "2", "--rounds", "1", "--json"]
    rounded, dense = (json.loads(bench("decode", *argv, "--weights", name)) for name in ("int8", "dense"))
    assert rounded["weights"] == "int8" and rounded["weight_bytes"] < 0.8 * dense["weight_bytes"]


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_decode_on_a_checkpoint_it_made(family, tmp_path):
    shape = [
        "--family",
        family,
        "--layers",
        "4",
        "--hidden",
        "64",
        "--intermediate",
        "96",
        "--heads",
        "4",
        "--kv-heads",
        "2",
    ]
    out = bench("checkpoint", "--out", str(tmp_path / "random"), *shape, "--head-size", "24", "--vocab", "300")
    assert "parameters" in out
    argv = ["--batch", "3", "--context", "1", "--steps", "1", "--rounds", "1", "--kv-dtype", "int8"]
    table = bench("decode", "--model", str(tmp_path / "random"), *argv)
    assert all(name in table for name in ("split", "S alone", "R alone", "of the bound"))


def test_sums_over_ranks_are_timed_beside_gloo():
    argv = ["--ranks", "2,3", "--rows", "1,5", "--width", "65", "--seconds", "0.01", "--rounds", "1", "--json"]
    result = json.loads(bench("reduction", *argv))
    assert [(row["ranks"], row["rows"]) for row in result["rows"]] == [(2, 1), (2, 5), (3, 1), (3, 5)]
    assert all(row["us"] > 0 and row["gloo_us"] > 0 for row in result["rows"])


def test_states_move_bytes():
    argv = ["--sequences", "2", "--head-size", "32", "--bytes", str(1 << 22), "--rounds", "1", "--json"]
    result = json.loads(bench("states", *argv))
    (row,) = result["rows"]
    assert result["isa"] in ("torch", "avx2", "avx512", "neon")
    assert row["sequences"] == 2 and row["gbps"] > 0 and row["memory_gbps"] > 0


def test_a_command_without_a_package_that_it_needs_ends_with_its_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"fastdecode-bench checkpoint: .*transformers"):
        main(["checkpoint", "--permute", str(model_dir()), "--out", str(tmp_path)])


def test_a_permuted_model_computes_the_same_with_other_weights(tmp_path):
    bench("checkpoint", "--permute", str(model_dir()), "--dtype", "fp32", "--out", str(tmp_path))
    ids = torch.arange(3, 43)[None]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model_dir(), tmp_path)]
    with torch.inference_mode():
        first, second = (model(ids).logits for model in models)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
    assert not torch.equal(*(model.model.layers[0].mlp.up_proj.weight for model in models))


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["decode", "--batch", "1", "--mini-batches", "2"], "--batch is smaller than --mini-batches"),
        (["decode", "--batch", "2", "--context", "99999999"], "GiB of memory"),
        (["decode", "--model", "/nonexistent"], "/nonexistent"),
        (["decode", "--weights", "int8", "--peer", "transformers"], "weights stay as they are stored"),
        (["attention", "--threads", "100000"], "may run on"),
        (["transport", "--payload", "7"], "a payload of 7 bytes"),
        (["transport", "--peer", "shm:///nonexistent/r.sock", "--beside", "none"], "no R-node can be reached"),
    ],
)
def test_a_bad_call_is_one_sentence(argv, sentence):
    done = run(*BENCH, *argv)
    assert done.returncode == 1
    assert sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [["decode", "--batch", "0"], ["attention", "--rounds", "-1"]])
def test_a_number_that_is_not_positive_is_refused_by_the_name_of_its_option(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert f"{argv[1]}: {argv[2]} is not a positive number" in capsys.readouterr().err


SWEEP = ["--part", "sweep"]
CELL = ["--context", "130", "--head-size", "16", "--kv-heads", "2", "--kv-bytes", "256KiB", "--rounds", "3"]


def test_attention_prints_a_row_a_cell_and_peer_with_the_roofline_of_the_same_rounds():
    argv = ["--kv-dtype", "fp32", "--kv-dtype", "int8", "--group", "1", "--group", "3", *CELL]
    result = json.loads(
        bench("attention", *SWEEP, *argv, "--threads", "1", "--peer", "torch", "--judge-below", "1e9", "--json")
    )
    rows = result["rows"]
    cells = [(row["kv_dtype"], row["group"], row["peer"]) for row in rows]
    assert cells == [(dtype, group, peer) for peer in (None, "torch") for dtype in ("fp32", "int8") for group in (1, 3)]
    for row in rows:
        assert (row["context"], row["head_size"], row["threads"], row["rounds"]) == (130, 16, 1, 3)
        assert 1 <= row["judged_rounds"] <= 3
        for name in ("gbps", "roofline_gbps", "roofline_pct", "seq_layers_per_s"):
            low, high = row["spread"][name]
            assert 0 < low <= row["all_rounds"][name] <= high
            assert low <= row[name] <= high or row["roofline_variant"] == attention.ANOTHER_CELL
        assert bool(row["isa"]) == (row["peer"] is None)
        assert row["roofline_variant"] in [*_native.read_variants(), attention.ANOTHER_CELL]
        assert row["peer"] or row["spread"]["roofline_pct"][1] <= 100  # attention itself raises the roofline
    # 130 tokens of 2 heads, K and V of 16 fp32: 8 sequences make 256 KiB, and each call reads their 2 pages whole
    fp32 = rows[0]
    assert fp32["sequences"] == 8
    assert fp32["gbps"] * 1e9 == pytest.approx(fp32["seq_layers_per_s"] * 2 * 128 * 2 * 2 * 16 * 4)


@pytest.fixture
def attend_briefly(monkeypatch, capsys):
    """Runs `fastdecode-bench attention` here, with rounds of a hundredth of the time in the cache."""
    monkeypatch.setattr(attention, "_IN_CACHE_SECONDS", 0.001)

    def run(*argv: str) -> str:
        main(["attention", *argv])
        return capsys.readouterr().out

    return run


def test_attention_reads_no_v_where_v_is_a_part_of_k(attend_briefly):
    argv = ["--kv-dtype", "fp16", "--group", "3", "--v-size", "8", "--v", "stored", "--v", "in-k", *CELL]
    rows = json.loads(attend_briefly(*SWEEP, "--part", "in-cache", *argv, "--threads", "1", "--json"))["rows"]
    stored, in_k, *in_cache = rows
    assert [row["v_in_k"] for row in rows] == [False, True] * 2 and {row["v_size"] for row in rows} == {8}
    for row, elements in ((stored, 16 + 8), (in_k, 16)):  # 2 pages of 2 heads are read for 130 tokens
        assert row["gbps"] * 1e9 == pytest.approx(row["seq_layers_per_s"] * 2 * 2 * 128 * elements * 2)
    for row, elements in zip(in_cache, (16 + 8, 16), strict=True):
        assert row["gbps"] * 1e9 == pytest.approx(row["seq_layers_per_s"] * row["context"] * elements * 2)


def test_attention_to_selected_tokens_is_measured_beside_attention_to_all():
    index = ["--index-heads", "4", "--index-size", "8", "--index-topk", "20"]
    argv = ["--kv-dtype", "fp16", "--group", "3", "--v-size", "8", *CELL, *index]
    result = json.loads(bench("attention", *SWEEP, "--part", "one-thread", *argv, "--threads", "1", "--json"))
    assert [row["index_heads"] for row in result["rows"]] == [0, 4] * 2
    dense, selecting = result["rows"][:2]
    # of 130 tokens in 2 pages, one KV head: K of 16 elements is read of all, or index keys of 8 and K of 20 tokens
    for row, elements in ((dense, 2 * 16), (selecting, 2 * 8 + 16)):
        assert row["kv_heads"] == 1 and row["v_in_k"]
        assert row["gbps"] * 1e9 == pytest.approx(row["seq_layers_per_s"] * elements * 128 * 2)
    ratio = selecting["seq_layers_per_s"] / dense["seq_layers_per_s"]
    assert [row["dense_ratio"] for row in result["summary"]] == [None, ratio]


@pytest.mark.quick
def test_no_roofline_of_attention_is_below_what_another_cell_has_read():
    def row(part, gbps, roofline, peer=None):
        figures = {"gbps": gbps, "roofline_gbps": roofline, "peer": peer}
        shares = {"roofline_pct": 100 * gbps / roofline}
        spread = {"spread": {name: [value] * 2 for name, value in (figures | shares).items()}}
        return {"part": part, "roofline_variant": "two streams"} | figures | shares | spread

    rows = [row("sweep", 25.0, 26.0), row("sweep", 10.0, 20.0)]
    rows += [row("sweep", 30.0, 31.0, peer="ggml"), row("one-thread", 10.0, 16.0)]
    attention.raise_rooflines(rows)
    assert [r["roofline_gbps"] for r in rows] == [26.0, 25.0, 31.0, 16.0]
    assert rows[1]["roofline_pct"] == 40.0
    assert all(r["spread"]["roofline_pct"] == [r["roofline_pct"]] * 2 for r in rows)


def test_attention_in_cache_is_one_thread_on_half_of_its_l2(attend_briefly):
    argv = ["--part", "in-cache", "--kv-dtype", "fp16", "--head-size", "64", "--rounds", "2", "--json"]
    result = json.loads(attend_briefly(*argv))
    assert [row["group"] for row in result["rows"]] == [1, 4, 8]
    l2 = int(subprocess.check_output(["getconf", "LEVEL2_CACHE_SIZE"])) or 1 << 20
    for row in result["rows"]:
        assert (row["threads"], row["sequences"], row["kv_heads"]) == (1, 1, 1)
        assert l2 // 4 < row["context"] * 64 * 2 * 2 <= l2 // 2
        assert row["gbps"] > 0 and row["roofline_gbps"] > 0


def test_attention_judges_by_the_rounds_under_the_limit_and_by_all_where_there_are_none():
    """Rounds go on until as many judge as were asked for, or three times as many have been taken."""
    argv = ["attention", *SWEEP, "--kv-dtype", "fp16", "--group", "1", *CELL, "--peer", "none", "--json"]
    for limit, rounds in (("1e-9", 9), ("1e9", 3)):
        (row,) = json.loads(bench(*argv, "--judge-below", limit))["rows"]
        assert (row["judged_rounds"], row["rounds"]) == (rounds, rounds)
        assert row["all_rounds"]["gbps"] == row["gbps"]


def test_attention_sums_up_what_all_its_parts_found(attend_briefly):
    formats = ["--kv-dtype", "fp16", "--kv-dtype", "int4", "--group", "1", "--context", "4096", "--context", "130"]
    shape = ["--head-size", "16", "--kv-heads", "2", "--kv-bytes", "256KiB", "--rounds", "2"]
    result = json.loads(attend_briefly(*formats, *shape, "--peer", "torch", "--json"))
    fields = "kv_dtype group context head_size threads gbps roofline_gbps roofline_pct seq_layers_per_s isa peer"
    assert all(set(fields.split()) <= set(row) for row in result["rows"])
    rows = {(r["part"], r["kv_dtype"], r["context"], r["peer"]): r for r in result["rows"]}
    assert [part for part, *_ in rows] == ["sweep"] * 8 + ["one-thread"] * 4 + ["in-cache"] * 2
    sums = {(r["kv_dtype"], r["context"]): r for r in result["summary"]}
    for (kv_dtype, context), row in sums.items():
        own, alone = rows["sweep", kv_dtype, context, None], rows["one-thread", kv_dtype, context, None]
        in_cache = next(r for (part, dtype, *_), r in rows.items() if (part, dtype) == ("in-cache", kv_dtype))
        assert row["roofline_pct"] == own["roofline_pct"] and row["one_thread_pct"] == alone["roofline_pct"]
        assert row["l2_gbps"] == in_cache["gbps"]
        assert row["best_peer"] == "torch"
        assert row["best_peer_ratio"] == rows["sweep", kv_dtype, context, "torch"]["ours_to_peer"]
        middle = rows["sweep", kv_dtype, 4096, None]
        assert row["points_from_4096"] == own["roofline_pct"] - middle["roofline_pct"]
    fp16, int4 = (rows["sweep", kv_dtype, 130, None] for kv_dtype in ("fp16", "int4"))
    rate = int4["seq_layers_per_s"] / int4["roofline_gbps"] / fp16["seq_layers_per_s"] * fp16["roofline_gbps"]
    assert sums["fp16", 130]["fp16_ratio"] == 1 and sums["int4", 130]["fp16_ratio"] == pytest.approx(rate)


def test_attention_draws_a_plot(attend_briefly, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ["--kv-dtype", "fp16", "--group", "1", *CELL, "--peer", "torch"]
    table = attend_briefly(*argv, "--plot", str(tmp_path / "plot.png"))
    assert "torch fp16" in table and "KV in L2" in table
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_transport_prints_a_row_a_transport_and_peer_from_an_empty_call_to_a_layer(tmp_path):
    urls = ["--url", f"shm://{tmp_path}/r.sock", "--url", "tcp://127.0.0.1:0"]
    shape = ["--payload", "0", "--payload", "32768", "--rows", "4", "--heads", "4", "--kv-heads", "2"]
    quick = ["--head-size", "16", "--seconds", "0.01", "--rounds", "2", "--beside", "raw", "--spin-us", "50"]
    plot = tmp_path / "plot.png"
    argv = [*urls, *shape, *quick, *(["--plot", str(plot)] if find_spec("matplotlib") else [])]
    result = json.loads(bench("transport", *argv, "--json"))
    rows = {(row["case"], row["transport"], row["peer"]): row for row in result["rows"]}
    layer = "layer 4x4/2x16"
    assert {case for case, _, _ in rows} == {"empty", "32.0 KiB", layer}
    assert {(transport, peer) for _, transport, peer in rows} == {("shm", None), ("tcp", None), ("tcp", "raw")}
    assert len(rows) == 9
    for (case, _, peer), row in rows.items():
        sizes = {"empty": (0, 0), "32.0 KiB": (32768, 32768), layer: (4 * (4 + 2 * 2) * 16 * 2, 4 * 4 * 16 * 2)}
        assert (row["bytes_out"], row["bytes_back"]) == sizes[case]
        assert row["carried_out"] > row["bytes_out"] or (peer and row["carried_out"] == row["bytes_out"])
        assert row["p50_us"] <= row["p90_us"] <= row["p99_us"] <= row["p999_us"]
        # The R-engine's time is an average, which the median of calls with much work may be less than.
        assert row["p50_us"] > 0 or row["engine_us"] > 1
        assert row["calls"] >= 2 * 30
        low, high = row["spread_p50_us"]
        assert low <= row["p50_us"] <= high
        assert row["gbps"] == pytest.approx(sum(sizes[case]) / row["p50_us"] * 1e-3)
    assert not find_spec("matplotlib") or plot.read_bytes().startswith(b"\x89PNG")


def test_transport_times_calls_that_only_go_out_and_streams_of_them(tmp_path):
    urls = ["--url", f"shm://{tmp_path}/r.sock", "--url", "tcp://127.0.0.1:0"]
    quick = ["--payload", "0", "--rows", "1", "--seconds", "0.01", "--rounds", "1", "--beside", "none"]
    rows = json.loads(bench("transport", *urls, *quick, "--out", "4096", "--stream", "131072", "--json"))["rows"]
    out = [row for row in rows if row["case"] == "4.0 KiB out"]
    assert [(row["transport"], row["bytes_out"], row["bytes_back"]) for row in out] == [
        ("shm", 4096, 0),
        ("tcp", 4096, 0),
    ]
    (stream,) = [row for row in rows if row["case"] == "stream 128.0 KiB"]  # over shm nothing moves
    assert (stream["transport"], stream["bytes_out"], stream["bytes_back"], stream["p99_us"]) == (
        "tcp",
        131072,
        0,
        None,
    )
    assert stream["gbps"] == pytest.approx(131072 / stream["p50_us"] * 1e-3)


@pytest.mark.parametrize("name", transport_peers.PEERS)
def test_a_peer_of_the_transport_answers_payloads_of_any_size(name):
    if name not in transport_peers.installed():
        pytest.skip(f"{name} is not installed")
    peer = transport_peers.EchoProcess(name)
    try:
        for out, back in ((0, 0), (70000, 5), (5, 70000)):
            taken = peer.round_trips(out, back, 3)
            assert len(taken) == 3 and min(taken) > 0
    finally:
        peer.close()


@pytest.mark.parametrize("name", transport_peers.PEERS)
def test_a_peer_whose_other_end_does_not_start_is_an_error(name, monkeypatch):
    if name not in transport_peers.installed():
        pytest.skip(f"{name} is not installed")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="did not start"):
        transport_peers.EchoProcess(name)


def test_transport_talks_to_an_r_node_that_runs_already(tmp_path):
    node = RNodeProcess(f"shm://{tmp_path}/r.sock", 1 << 28)
    try:
        quick = ["--payload", "0", "--rows", "1", "--seconds", "0.01", "--rounds", "1", "--beside", "none"]
        rows = json.loads(bench("transport", "--peer", node.url, *quick, "--json"))["rows"]
    finally:
        node.end()
    assert [(row["url"], row["bytes_out"]) for row in rows] == [(node.url, 0), (node.url, (32 + 16) * 128 * 2)]


def test_perplexity_prints_a_row_a_format():
    size = ["--length", "12", "--sequences", "1", "--json"]
    rows = json.loads(bench("perplexity", *size))["rows"]
    assert [row["kv_dtype"] for row in rows] == list(KV_DTYPES)
    assert all(abs(row["change"]) < 0.1 for row in rows[1:])


def test_perplexity_and_spart_print_a_row_a_format_of_the_weights():
    formats = ["--weights", "dense", "--weights", "int8"]
    size = ["--length", "24", "--sequences", "4", "--json"]
    dense, int8 = json.loads(bench("perplexity", *size, *formats))["rows"]
    assert (dense["weights"], dense["kv_dtype"], dense["change"]) == ("dense", "fp32", None)
    assert int8["weight_bytes"] < dense["weight_bytes"] / 2 and 0 < abs(int8["change"]) < 0.02
    short = ["--batch", "1", "--batch", "3", "--rounds", "1", "--steps", "1", "--json"]
    backends = ["--backend", "native", "--backend", "transformers"]
    rows = json.loads(bench("spart", *short, *formats, *backends))["rows"]
    assert [(row["batch"], row["backend"], row["weights"]) for row in rows] == [
        (batch, backend, weights)
        for batch in (1, 3)
        for backend in ("native", "transformers")
        for weights in ("dense", "int8")
    ]
    assert all(row["seconds"] > 0 for row in rows)
    rows = json.loads(bench("spart", "--weights", "dense", "--batch", "3", "--lora", "2", *short[4:]))["rows"]
    assert [row["adapters"] for row in rows] == ["1 adapter", "2 adapters", "base model"]


def test_speculate_prints_a_row_a_task_with_the_same_tokens():
    result = json.loads(bench("speculate", "--tokens", "100", "--rounds", "1", "--json"))
    assert [row["task"] for row in result["rows"]] == ["quote", "edit", "random"]
    for row in result["rows"][:2]:
        assert 0 < row["right"] <= row["guessed"] and row["plain"] > 0 and row["guessing"] > 0
