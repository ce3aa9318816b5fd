"""Predicts which R-nodes, batch and KV format serve a model at a rate, from profiles of hardware.

Every number of R-nodes, ranks and mini-batches and every KV format is tried. With --rate, the batch is the smallest
that keeps up; without, the smallest whose throughput is near the best. Configurations that keep --rate, --tpot and
--ttft come first. For a GPU that has memory for resident KV, the answer is what it holds, alone and with the RAM
beside it. The figures are predicted, not measured: requests are taken to have mean lengths and to come
evenly, so no request queues; `fastdecode-plan simulate` shows a trace's bursts.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from fastdecode.bench.options import print_result
from fastdecode.bench.serving.workload import read_trace
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import size_option
from fastdecode.engine.scheduling.ways import Way
from fastdecode.plan import cards
from fastdecode.plan.configurations import Configuration, Goal, choose
from fastdecode.plan.model import PlannedModel, find_planned_model, is_shape
from fastdecode.plan.options import add_model_argument, add_profile_arguments, profile_and_transport
from fastdecode.plan.profile import Profile
from fastdecode.region.contract import KV_DTYPES

COMMAND = ("recommend", "configurations that serve a model at a rate, and the commands to start them (predicted)")

_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan recommend`."""
    add = parser.add_argument
    add_model_argument(parser)
    add_profile_arguments(parser)
    add("--rate", type=float, metavar="R", help="requests a second to keep up with; default: as many as possible")
    add("--ttft", type=float, metavar="S", help="seconds to the first token of a request that does not queue")
    add("--tpot", type=float, metavar="S", help="seconds between two tokens of a stream")
    add("--trace", type=Path, metavar="FILE", help="take the mean lengths from a trace, as of fastdecode-bench serve")
    add("--input-tokens", type=int, default=1024, help="mean prompt, without --trace")
    add("--output-tokens", type=int, default=256, help="mean output, without --trace")
    add("--r-nodes", type=int, default=16, metavar="N", help="most R-nodes to try")
    add("--tensor-parallel", type=int, action="append", metavar="N", help="ranks of the S-Part (repeatable); default: "
        "1, and one on each NUMA node of the profile")  # fmt: skip
    add("--max-batch-tokens", type=int, default=512, help="most rows of a step")
    add("--s-price", type=float, help="price of the S-node an hour; default: the profile's")
    add("--r-price", type=float, help="price of an R-node an hour; default: the profile's")
    add("--top", type=int, default=5, metavar="N", help="configurations to print")
    add("--gpu-memory", type=size_option, action="append", metavar="SIZE",
        help="of the S-node's GPU (repeatable); default: the profile's")  # fmt: skip
    add("--kv-dtype", choices=KV_DTYPES, default="fp16", help="KV format, beside --gpu-memory")
    add("--ram-gbps", type=float, metavar="GBPS", help="bandwidth of the RAM beside the GPU; default: the profile's")
    add("--ram-share", type=float, default=0.7, metavar="SHARE", help="share of --ram-gbps at which R-nodes attend")
    add("--ram", type=size_option, metavar="SIZE", help="RAM for the KV-cache beside the GPU; default: the profile's")
    add("--plot", type=Path, metavar="FILE", help="plot throughput and time between tokens over the R-nodes")


def commands(configuration: Configuration, model: Path | None, max_batch_tokens: int, transport: str) -> list[str]:
    """The lines that start a configuration. R-nodes over shared memory stand beside the S-node; the others have a
    machine each, r-node-1, r-node-2, ..."""
    memory = f"{ceil(1.1 * configuration.kv_bytes / _GIB)}GiB"  # a tenth more, for sequences that are unevenly long
    local, numbers = transport == "shm", range(1, configuration.r_nodes + 1)
    urls = [f"shm:///tmp/r-node-{i}.sock" if local else f"{transport}://r-node-{i}:7300" for i in numbers]
    secret = [] if local else ["--secret-file", "secret"]
    r_argv = [
        ["--role", "r", "--listen", url, "--kv-memory", memory, *secret]
        for url in (urls if local else [f"{transport}://0.0.0.0:7300"])
    ]
    argv = ["--role", "s"]
    argv += ["--model", str(model)] if model else []
    argv += ["--kv-dtype", configuration.kv_dtype, "--mini-batches", str(configuration.mini_batches)]
    argv += [
        "--max-batch-size",
        str(min(max_batch_tokens, ceil(1.25 * configuration.batch / configuration.mini_batches))),
    ]
    argv += ["--max-batch-tokens", str(max_batch_tokens), "--schedule", "stable", *secret]
    if configuration.ranks > 1:
        argv += ["--device", "cpu", "--tensor-parallel", str(configuration.ranks)]
    for url in urls:
        argv += ["--r-node", url]
    for each in (*r_argv, argv):
        NodeConfig.from_args(each)  # a line that the node would refuse must not be printed
    lines = [shlex.join(["fastdecode-node", *each]) for each in (*r_argv, argv)]
    if local:
        return ["# on one machine, each in a terminal of its own", *lines]
    hosts = "r-node-1" if configuration.r_nodes == 1 else f"r-node-1 to r-node-{configuration.r_nodes}"
    return [f"# on {hosts}", lines[0], "# on the S-node", lines[1]]


def run(args: argparse.Namespace) -> None:
    """Print the best configurations. Raises ProfileError, CheckpointError, ValueError, OSError."""
    profile, transport = profile_and_transport(args)
    profile = _priced(profile, args)
    model, goal = find_planned_model(args.model), _goal(args)
    if goal.n_prompt + goal.n_output > model.max_positions:
        raise ValueError(
            f"prompt and output have {goal.n_prompt + goal.n_output:.0f} tokens; {model.name} has "
            f"{model.max_positions} positions"
        )
    assert profile.s_node is not None
    if args.gpu_memory or profile.s_node.gpu is not None:
        _recommend_cards(args, profile, transport, model, goal)
        return
    if args.plot:
        from fastdecode.plan import plots  # fails here rather than after the work
    sockets = profile.s_node.sockets
    ranks = args.tensor_parallel or [1, *([sockets.n] if sockets and sockets.n > 1 else [])]
    configurations = choose(model, profile, goal, transport, args.r_nodes, ranks)
    if not configurations:
        raise ValueError("not even one sequence fits into the KV-cache of the R-nodes")
    if args.plot:
        plots.configurations(configurations, goal, args.plot)
    # A shape has no checkpoint, so its line cannot be run as it stands.
    checkpoint = Path("path/to") / args.model if is_shape(args.model) else args.model
    result = {
        "model": model.name,
        "profile": profile.name,
        "source": profile.source,
        "transport": transport,
        "goal": asdict(goal),
        "choices": [asdict(configuration) for configuration in configurations[: args.top]],
        "commands": commands(configurations[0], checkpoint, args.max_batch_tokens, transport)
        if configurations[0].meets
        else [],
    }
    print_result(args, result, _print_table)


def _recommend_cards(
    args: argparse.Namespace, profile: Profile, transport: str, model: PlannedModel, goal: Goal
) -> None:
    """Print what GPUs of several sizes hold. Raises ProfileError."""
    assert profile.s_node is not None and profile.r_node is not None
    gpu = profile.s_node.gpu
    profile = cards.with_ram(profile, args.ram_gbps, args.ram_share, args.ram)
    memories = args.gpu_memory or [gpu.memory if gpu else 0.0]
    rows = [
        {
            "gpu_memory": memory,
            "kv_room": cards.kv_room(profile, model, memory),
            "held": [asdict(c) for c in cards.capacities(profile, transport, model, args.kv_dtype, goal, memory)],
        }
        for memory in memories
    ]
    ram_gbps, pcie_gbps = cards.break_even(profile, transport, args.kv_dtype, model.group)
    result = {
        "model": model.name,
        "profile": profile.name,
        "source": profile.source,
        "kv_dtype": args.kv_dtype,
        "goal": asdict(goal),
        "cards": rows,
        "ram_gbps": ram_gbps,
        "pcie_gbps": pcie_gbps,
    }
    print_result(args, result, _print_cards)


def _print_cards(result: dict[str, Any]) -> None:
    goal = result["goal"]
    print(f"{result['model']} on {result['profile']} ({result['source']}), KV {result['kv_dtype']}")
    print(f"sequences of {goal['n_prompt']:.0f} + {goal['n_output']:.0f} tokens; predicted, not measured")
    print(
        f"{'GPU GiB':>7} {'KV GiB':>7} {'KV':>9} {'tokens':>8} {'sequences':>9} {'tokens/s':>9} {'TPOT ms':>8} "
        f"{'on R-nodes':>10}"
    )
    for card in result["cards"]:
        size = f"{card['gpu_memory'] / _GIB:7.1f} {max(0.0, card['kv_room']) / _GIB:7.1f}"
        if card["kv_room"] < 0:
            print(f"{size} the weights do not fit")
            continue
        for held in card["held"]:
            far, waits = held["far_tpot"], "wait" if held["way"] == Way.NEAR.value else ""
            print(
                f"{size} {held['kv']:>9} {held['tokens']:8.0f} {held['sequences']:9d} "
                f"{held['tokens_per_second']:9.0f} {1e3 * held['tpot']:8.1f} "
                f"{waits if far is None else f'{1e3 * far:.1f}':>10}"
            )
    ram, pcie = result["ram_gbps"], result["pcie_gbps"]
    verdict = "attending there pays" if ram > pcie else "bringing pages to the GPU would be faster"
    print(f"break-even: R-nodes read {ram:.1f} GB/s in RAM, PCIe brings {pcie:.1f}: {ram / pcie:.1f}x, {verdict}")


def _priced(profile: Profile, args: argparse.Namespace) -> Profile:
    """The profile with the prices of the command line."""
    assert profile.s_node is not None and profile.r_node is not None
    s_node = profile.s_node if args.s_price is None else replace(profile.s_node, price=args.s_price)
    r_node = profile.r_node if args.r_price is None else replace(profile.r_node, price=args.r_price)
    return replace(profile, s_node=s_node, r_node=r_node)


def _goal(args: argparse.Namespace) -> Goal:
    n_prompt, n_output = args.input_tokens, args.output_tokens
    if args.trace:
        requests = read_trace(args.trace)
        n_prompt = fmean(request.prompt_tokens for request in requests)
        n_output = fmean(request.output_tokens for request in requests)
    if min(n_prompt, n_output) < 1:
        raise ValueError("--input-tokens and --output-tokens must be at least 1")
    for name in ("rate", "ttft", "tpot"):
        if (value := getattr(args, name)) is not None and value <= 0:
            raise ValueError(f"--{name} {value:g}: it must be more than 0")
    return Goal(n_prompt, n_output, args.rate, args.ttft, args.tpot, args.max_batch_tokens)


def _print_table(result: dict[str, Any]) -> None:
    goal = result["goal"]
    print(f"{result['model']} on {result['profile']} ({result['source']}), links over {result['transport']}")
    wanted = f"{goal['rate']:g} requests/s of" if goal["rate"] else "as many requests as possible of"
    print(f"{wanted} {goal['n_prompt']:.0f} + {goal['n_output']:.0f} tokens; predicted, not measured")
    print(
        f"{'ranks':>5} {'R-nodes':>7} {'KV':>9} {'mini-b.':>7} {'batch':>6} {'TPOT ms':>8} {'TTFT s':>7} "
        f"{'tokens/s':>9} {'binds':>14} {'balance':>8} {'KV GiB':>7} {'per 1M':>7}"
    )
    for c in result["choices"]:
        cost = "" if c["cost"] is None else f"{c['cost']:.3f}"
        print(
            f"{c['ranks']:5d} {c['r_nodes']:7d} {c['kv_dtype']:>9} {c['mini_batches']:7d} {c['batch']:6d} "
            f"{1e3 * c['tpot']:8.1f} {c['ttft']:7.2f} {c['tokens_per_second']:9.0f} {c['binding']:>14} "
            f"{c['balance']:8.1f} "
            f"{c['kv_bytes'] / _GIB:7.1f} {cost:>7}" + ("" if c["meets"] else "  misses the goal")
        )
    print("\n".join(["", *result["commands"]] if result["commands"] else ["no configuration meets the goal"]))
