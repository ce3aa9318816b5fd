"""`fastdecode-plan recommend`: its choices keep the goal, and its commands are the node's."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from fastdecode.daemon.config import NodeConfig
from fastdecode.plan.cli import main
from fastdecode.plan.configurations import Goal, choose
from fastdecode.plan.equations import s_part_of_ranks
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import ProfileError, merged, read_profile
from fastdecode.plan.published import LLAMA_7B
from fastdecode.plan.recommend import commands

A10 = merged([read_profile("a10-epyc7452")])


def best(goal, profile=A10, most=16):
    return choose(LLAMA_7B, profile, goal, "rdma", most)


def test_the_best_choice_keeps_the_goal_with_the_fewest_r_nodes():
    goal = Goal(100, 256, rate=4, ttft=2, tpot=0.1)
    choices = best(goal)
    first = choices[0]
    assert first.meets and first.tpot <= 0.1 and first.ttft <= 2 and first.tokens_per_second >= 4 * 256
    assert all(c.r_nodes >= first.r_nodes for c in choices if c.meets)
    assert not any(c.meets for c in best(goal, most=first.r_nodes - 1))


def test_a_goal_out_of_reach_is_met_by_none():
    assert not any(c.meets for c in best(Goal(100, 256, rate=4, tpot=0.01)))
    assert not any(c.meets for c in best(Goal(3000, 256, rate=1, ttft=0.1)))


def test_without_a_rate_more_r_nodes_give_more_until_the_s_part_binds():
    """Equation (11): R-nodes beyond the balance bring next to nothing."""
    by_nodes = {c.r_nodes: c for c in best(Goal(16, 1008), most=24) if c.mini_batches == 2}
    assert by_nodes[4].tokens_per_second > 1.8 * by_nodes[2].tokens_per_second
    balance = by_nodes[24].balance
    assert 4 < balance < 16
    assert by_nodes[24].tokens_per_second < 1.15 * by_nodes[16].tokens_per_second
    assert by_nodes[1].binding == "R-Part" and by_nodes[24].binding != "R-Part"


def test_with_prices_the_cheapest_tokens_come_first():
    def priced(s, r):
        return dataclasses.replace(
            A10, s_node=dataclasses.replace(A10.s_node, price=s), r_node=dataclasses.replace(A10.r_node, price=r)
        )

    goal = Goal(16, 1008)
    cheap_r, cheap_s = (best(goal, priced(*prices))[0] for prices in ((10.0, 0.1), (0.1, 10.0)))
    assert cheap_r.r_nodes > cheap_s.r_nodes
    expected = (10 + cheap_r.r_nodes * 0.1) / 3600 / cheap_r.tokens_per_second * 1e6
    assert cheap_r.cost == pytest.approx(expected)


def test_the_memory_of_the_r_nodes_bounds_the_batch():
    small = dataclasses.replace(A10, r_node=dataclasses.replace(A10.r_node, memory=10e9))
    choice = best(Goal(900, 200), small, most=1)[0]
    assert choice.kv_bytes <= 10e9
    assert choice.batch < best(Goal(900, 200), most=1)[0].batch


XEON = read_profile("xeon-amx")


def test_the_xeon_with_amx_has_the_rates_of_its_data_sheets():
    """Intel's data sheets: eight channels of DDR5-4800, 56 cores at 2.0 GHz with 1,024 bf16 operations a cycle."""
    times = XEON.s_node.times("llama-3-8b", 1)
    read, compute = 8 * 8 * 4.8e9, 56 * 2.0e9 * 1024
    assert times.seconds(1) == pytest.approx(times.parameters * times.weight_bytes / (0.56 * read), rel=1e-3)
    assert times.seconds(2048) == pytest.approx(1.1 * 2048 * 2 * times.parameters / (0.5 * compute), rel=1e-3)


def test_ranks_read_the_memory_of_their_own_sockets():
    """Each of two ranks reads half of the weights at the speed of one socket, and sums up 64 times; one rank on both
    sockets reads half of the weights from the other socket's memory."""
    model, sockets = PlannedModel.of_shape("llama-3-8b"), XEON.s_node.sockets
    one, two, four = (s_part_of_ranks(XEON.s_node, model, ranks).seconds(1) for ranks in (1, 2, 4))
    weights = 2 * 7504657408
    assert one == pytest.approx(weights / 2 / 102.4e9)
    assert two == four == pytest.approx(XEON.s_node.s_part[0].seconds(1) / 2 + 64 * (5e-6 + 4096 * 2 / 20e9), rel=1e-6)
    near = dataclasses.replace(XEON.s_node, sockets=dataclasses.replace(sockets, cross_gbps=1e6))
    assert s_part_of_ranks(near, model, 1).seconds(1) < two
    for ranks, reason in ((3, "equally many"), (16, "8 KV heads")):
        with pytest.raises(ProfileError, match=reason):
            s_part_of_ranks(XEON.s_node, model, ranks)
    with pytest.raises(ProfileError, match=r"s_node\.sockets"):
        s_part_of_ranks(A10.s_node, model, 2)


def test_short_steps_want_ranks_and_the_command_starts_them(capsys):
    argv = ["--model", "llama-3-8b", "--profile", "xeon-amx", "--input-tokens", "512", "--tpot", "0.065", "--json"]
    main(["recommend", *argv])
    result = json.loads(capsys.readouterr().out)
    assert result["choices"][0]["ranks"] == 2 and "--device cpu --tensor-parallel 2" in result["commands"][-1]
    main(["recommend", *argv, "--tensor-parallel", "1"])
    assert json.loads(capsys.readouterr().out)["commands"] == []


def cards(capsys, *argv):
    """The cards of `fastdecode-plan recommend` for a Llama-3-8B, by their memory in GB."""
    main(["recommend", "--model", "llama-3-8b", "--json", *argv])
    result = json.loads(capsys.readouterr().out)
    return result, {card["gpu_memory"] / 1e9: {held["kv"]: held for held in card["held"]} for card in result["cards"]}


def test_a_card_holds_what_lies_on_it_and_in_the_ram_beside_it(capsys):
    sizes = (8, 12, 16, 24, 48, 80)
    argv = [f"--gpu-memory={size}000000000" for size in sizes]
    lengths = ["--input-tokens", "3072", "--output-tokens", "1024"]
    result, found = cards(capsys, "--profile", "rtx-4090", "--profile", "ddr5-2ch", *argv, *lengths)
    assert list(found) == list(sizes) and result["source"] == "data sheet"
    # 16.06 GB of weights in fp16 do not fit the first three; 131072 bytes a token.
    assert [set(found[size]) for size in sizes] == [{"split"}] * 3 + [{"GPU-only", "hybrid", "split"}] * 3
    for size in sizes[3:]:
        alone, both, split = (found[size][kv] for kv in ("GPU-only", "hybrid", "split"))
        room = 0.9 * size * 1e9 - 16.06e9
        assert room - 2e9 < 131072 * alone["tokens"] < room
        assert both["sequences"] == alone["sequences"] + split["sequences"]
        assert both["tokens_per_second"] >= alone["tokens_per_second"]
    assert split["tokens"] == pytest.approx(96e9 / 131072)
    # The R-nodes read 62.7 GB/s, so all their tokens together once in 1.53 s.
    assert split["tpot"] == pytest.approx(96e9 / 62.7e9, rel=0.01)


def test_the_break_even_is_the_bandwidth_of_attention_in_ram_over_that_of_pcie(capsys):
    argv = ["--profile", "rtx-3060", "--profile", "ddr5-2ch", "--ram-share", "0.5"]
    slow, fast = (cards(capsys, *argv, "--ram-gbps", gbps)[0] for gbps in ("30", "300"))
    assert [(r["ram_gbps"], r["pcie_gbps"]) for r in (slow, fast)] == [(15.0, 20.0), (150.0, 20.0)]
    main(["recommend", "--model", "llama-3-8b", *argv, "--ram-gbps", "30"])
    assert "0.8x, bringing pages to the GPU would be faster" in capsys.readouterr().out


def test_an_s_node_without_a_gpu_has_no_room_for_resident_kv():
    with pytest.raises(SystemExit, match="no section gpu"):
        main(["recommend", "--model", "llama-7b", "--profile", "a10-epyc7452", "--gpu-memory", "24GB"])


def test_the_printed_commands_start_nodes(capsys):
    main(["recommend", "--profile", "a10-epyc7452", "--input-tokens", "200", "--output-tokens", "100", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["source"] == "data sheet"
    r_line, s_line = (line for line in result["commands"] if not line.startswith("#"))
    r_node, s_node = (NodeConfig.from_args(shlex.split(line)[1:]) for line in (r_line, s_line))
    first = result["choices"][0]
    assert len(s_node.r_node) == first["r_nodes"] and s_node.mini_batches == first["mini_batches"]
    assert r_node.kv_memory >= first["kv_bytes"]
    assert s_node.max_batch_size * s_node.mini_batches >= first["batch"]


def test_a_model_whose_path_has_a_space_stays_one_argument():
    lines = commands(best(Goal(100, 256))[0], Path("my models/llama"), 512, "tcp")
    assert NodeConfig.from_args(shlex.split(lines[-1])[1:]).model == Path("my models/llama")


def test_r_nodes_over_shared_memory_stand_beside_the_s_node_and_a_shape_is_no_checkpoint(capsys, tmp_path):
    here = tmp_path / "here.json"
    here.write_text(
        '{"version": 1, "name": "here", "source": "measured", "links": {"shm": {"layer_seconds": 34e-6, "gbps": 20}}}'
    )
    main(["recommend", "--model", "llama-3-8b", "--profile", "xeon-amx", "--profile", str(here), "--json"])
    result = json.loads(capsys.readouterr().out)
    *r_nodes, s_node = (NodeConfig.from_args(shlex.split(line)[1:]) for line in result["commands"] if line[0] != "#")
    assert result["transport"] == "shm" and len(r_nodes) == result["choices"][0]["r_nodes"]
    assert list(s_node.r_node) == [each.listen[0] for each in r_nodes]
    assert all(str(url).startswith("shm://") for url in s_node.r_node)
    assert s_node.model == Path("path/to/llama-3-8b")


def test_the_table_says_that_it_is_predicted(capsys):
    main(["recommend", "--profile", "a10-epyc7452", "--input-tokens", "200", "--rate", "1e9"])
    text = capsys.readouterr().out
    assert "predicted, not measured" in text and "no configuration meets the goal" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--transport", "shm"], "no link over shm; it has rdma"),
        (["--rate", "-1"], "--rate -1"),
        (["--input-tokens", "5000"], "1024 positions"),
    ],
)
def test_what_cannot_be_is_refused(argv, message):
    with pytest.raises(SystemExit, match=message):
        main(["recommend", "--profile", "a10-epyc7452", *argv])


def test_a_size_that_is_none_is_refused_with_the_sentence_of_the_node(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["recommend", "--profile", "rtx-4090", "--ram", "much"])
    assert "argument --ram: 'much' is not a size such as 4GiB or 512MiB" in capsys.readouterr().err
