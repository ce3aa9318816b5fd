"""The options of a node: a frozen dataclass whose fields are the options of the command line.

The metadata of a field hold the option's help, the roles that have it, and the function that parses its text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastdecode.daemon import option_values
from fastdecode.region.contract import KV_DTYPES
from fastdecode.text.output.forms import REASONING_FORMS, TOOL_FORMS

#: How a GPU and the R-nodes exchange rows.
EXCHANGES = ("auto", "staged", "bypass")
#: What the R-nodes divide among themselves.
PARTITIONS = ("sequences", "heads", "tokens")
#: Formats of the weights in memory.
WEIGHTS = ("auto", "dense", "int8", "int4")


def _option(
    help: str,
    default: Any = None,
    *,
    role: str = "sr",
    parse: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    many: bool = False,
) -> Any:
    """A field of NodeOptions. `role` lists the roles that have the option; a tuple default makes it repeatable, and
    `many` lets one option have several values instead."""
    metadata = {"help": help, "role": role, "parse": parse, "choices": choices, "metavar": metavar, "many": many}
    return dataclasses.field(default=default, metadata=metadata)


def _file(help: str, *, role: str = "sr") -> Any:
    """An option that names a file."""
    return _option(help, role=role, parse=Path, metavar="FILE")


def _size(help: str, *, role: str = "sr") -> Any:
    """An option that is a number of bytes."""
    return _option(help, role=role, parse=option_values.memory, metavar="SIZE")


#: Options of one role.
_s_option = partial(_option, role="s")
_s_file = partial(_file, role="s")
_s_size = partial(_size, role="s")
_r_option = partial(_option, role="r")
_r_size = partial(_size, role="r")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options of a node, by the topics of option_help.py. None: the node chooses the value at start, from the
    machine or the model."""

    role: str = _option(
        "s: hold the weights, schedule, and serve the API. r: hold KV-cache and compute attention.",
        "s",
        choices=("s", "r"),
    )
    check: bool = _option("print a report of the machine and, with --model, of the model, and exit", False)
    config: Path | None = _file(
        "YAML file with options; environment variables (FASTDECODE_ and the option's name) and the command line go "
        "before it"
    )

    model: Path | None = _s_option(
        "Hugging Face model directory, GGUF file, owner/name of a model that hf download has fetched, or 'chat' for a "
        "small model to talk to; default: the demo model, for tests",
        parse=Path,
        metavar="PATH",
    )
    weights: str = _s_option(
        "format of the weights in memory. auto: as stored; dense: in --dtype; int8, int4: rounded at load",
        "auto",
        choices=WEIGHTS,
    )
    kv_dtype: str = _s_option(
        "format of the KV-cache; int8-int4: K in int8, V in int4", "fp16", parse=option_values.dtype, choices=KV_DTYPES
    )
    max_model_len: int | None = _s_option(
        "longest sequence (prompt and output); default: the model's limit",
        parse=option_values.positive,
        metavar="TOKENS",
    )
    lora: tuple[tuple[str, Path], ...] = _s_option(
        "a LoRA adapter in PEFT's format (repeatable), which requests choose by NAME as their model",
        (),
        parse=option_values.named_directory,
        metavar="NAME=DIR",
    )
    served_model_name: tuple[str, ...] = _s_option(
        "the model's name in the API, or several; default: the directory's or file's name",
        (),
        parse=option_values.name,
        metavar="NAME",
        many=True,
    )
    chat_template: Path | None = _s_file("file with a chat template (Jinja) to use instead of the model's own")
    generation_config: str = _s_option(
        "defaults of sampling. auto: from the model's generation_config.json, or its card; none: OpenAI's",
        "auto",
        choices=("auto", "none"),
    )
    tool_parser: str = _s_option(
        "how the model writes tool calls; auto: as its chat template says", "auto", choices=("auto", *TOOL_FORMS)
    )
    drop_hosted_tools: bool = _s_option(
        "drop tools that only their vendor runs, such as web_search, from requests; default: such a request is refused",
        False,
    )
    reasoning_parser: str = _s_option(
        "how the model writes its reasoning, which chats get as reasoning_content; none: as a part of the content",
        "auto",
        choices=("auto", "none", *REASONING_FORMS),
    )
    backend: str = _s_option(
        "native: the decoder of fastdecode; transformers: any model of transformers; auto: native if it can",
        "auto",
        choices=("auto", "native", "transformers"),
    )
    dtype: str = _s_option(
        "dtype of weights and activations; auto: the checkpoint's dtype, or one that the CPU computes fast",
        "auto",
        parse=option_values.dtype,
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    no_calibration: bool = _s_option(
        "int4: round each weight to the nearest number, not by the inputs of a text: loads sooner, answers worse", False
    )
    save_weights: Path | None = _s_option(
        "directory to make of the model with the weights that --weights int8 or int4 rounds: a later --model DIR takes "
        "them as they are, and loads sooner",
        None,
        parse=Path,
        metavar="DIR",
    )

    host: str = _s_option("address that the API listens on", "127.0.0.1")
    port: int = _s_option("port that the API listens on; 0: any free one", 8000, parse=option_values.port)
    api_key_file: Path | None = _s_file(
        "file with the keys, one a line, of which clients must present one; default: no key is needed"
    )
    router_only: bool = _s_option(
        "answer only routers that prove --secret-file, or with --api-key-file only clients with a key; /health is open",
        False,
    )
    ssl_certfile: Path | None = _s_file("certificate chain (PEM) with which the API is served over TLS")
    ssl_keyfile: Path | None = _s_file("private key (PEM) of --ssl-certfile; default: it is in that file")
    cors_origin: tuple[str, ...] = _s_option(
        "origin of web pages that may use the API (repeatable), e.g. https://chat.example.org; '*': all pages",
        (),
        parse=option_values.origin,
        metavar="ORIGIN",
    )
    api_processes: int = _s_option(
        "processes that serve the API, beside the engine's; 0: the engine's process serves the API, for debugging",
        1,
        parse=option_values.non_negative,
        metavar="N",
    )
    resume_seconds: float = _s_option(
        "seconds for which a stream of a request with Last-Event-ID waits for its client if the connection is lost; "
        "0: events get no ids",
        30.0,
        parse=option_values.seconds,
        metavar="SECONDS",
    )
    stored_memory: int | None = _s_size(
        "memory for the events of such streams, and of responses in the background; default: 256MiB"
    )
    otlp_traces_endpoint: str | None = _s_option(
        "URL that takes OpenTelemetry's spans of the requests by OTLP over HTTP, e.g. http://localhost:4318/v1/traces "
        "(extra otel)",
        parse=option_values.http_url,
        metavar="URL",
    )
    no_access_log: bool = _s_option("do not log a line for every request", False)

    r_node: tuple[str, ...] = _s_option(
        "an R-node to use (repeatable); default: an embedded R-node, over shared memory",
        (),
        parse=option_values.url,
        metavar="URL",
    )
    listen: tuple[str, ...] = _r_option(
        "URL that S-nodes connect to (repeatable): tcp://host:port, shm:///path/to/socket, rdma://host:port",
        (),
        parse=option_values.url,
        metavar="URL",
    )
    secret_file: Path | None = _file("file with the secret that S-nodes and R-nodes share, 16 bytes or more")
    r_nodes_file: Path | None = _s_file(
        "file with the R-nodes to use, one URL a line; R-nodes that join or leave it are taken up or emptied while the "
        "node runs"
    )
    r_nodes_dns: str | None = _s_option(
        "use an R-node at each address of a host name, tcp://host:port, as the name resolves from time to time",
        parse=option_values.named_host,
        metavar="URL",
    )
    partition: str = _s_option(
        "sequences: each R-node holds whole sequences; heads: each R-node of --r-node holds a part of the KV heads of "
        "every sequence; tokens: each one holds a part of the tokens of every sequence",
        "sequences",
        choices=PARTITIONS,
    )
    connect_seconds: float = _s_option(
        "at start, how long to wait for R-nodes that cannot be reached yet", 5.0, parse=option_values.seconds
    )
    reconnect_seconds: float = _s_option(
        "how long requests wait for an R-node when the last one has been lost, before they end with an error",
        10.0,
        parse=option_values.seconds,
    )
    insecure: bool = _r_option("listen on an address that other hosts can reach even without --secret-file", False)

    prefill_listen: str | None = _s_option(
        "URL at which this S-node computes prompts for other ones: tcp://host:port",
        parse=option_values.tcp_address,
        metavar="URL",
    )
    prefill_at: tuple[str, ...] = _s_option(
        "the --prefill-listen of an S-node that is to compute this one's long prompts (repeatable)",
        (),
        parse=option_values.tcp_url,
        metavar="URL",
    )
    prefill_file: Path | None = _s_file(
        "file with such URLs, one a line, in place of --prefill-at; changes of the file are followed"
    )

    kv_memory: int | None = _size(
        "memory for the KV-cache of this (or the embedded) R-node, and for the activation regions of its links; "
        "default: half of the available memory"
    )
    kv_lease: int | None = _s_size(
        "KV-cache memory to lease from each R-node at once and for good; default: a lease that grows on demand, or all "
        "of an embedded R-node"
    )
    max_lease: int | None = _r_size(
        "the most KV-cache memory that one link may lease, so the most of one S-node; default: all of it"
    )
    orphan_seconds: float = _r_option(
        "seconds for which the KV-cache of streams stays when their S-node is lost or ends, so that another S-node "
        "adopts it; 0: it goes at once",
        20.0,
        parse=option_values.seconds,
        metavar="SECONDS",
    )
    gpu_kv: int | None = _s_option(
        "memory of the S-Part's GPU for KV pages, where sequences are placed before R-nodes get any; auto: what "
        "--gpu-memory-utilization leaves, which is the default; 0: none",
        None,
        parse=option_values.gpu_memory,
        metavar="auto|SIZE|0",
    )
    gpu_slowdown: float = _s_option(
        "part by which steps of sequences on the S-Part's GPU may become longer for sequences on R-nodes",
        0.03,
        parse=option_values.part,
        metavar="PART",
    )
    gpu_memory_utilization: float = _s_option(
        "part of a GPU's memory that may be in use: weights, steps, KV pages, and K and V of prompts that take several "
        "steps",
        0.9,
        parse=option_values.part,
        metavar="PART",
    )
    staging_memory: int | None = _s_size(
        "memory of the S-Part for the K and V of prompts that take several steps. Default: what is left of a GPU's; "
        "R-nodes attend for longer prompts. Or an eighth of a CPU's available one; a longer prompt is taken alone"
    )
    state_memory: int | None = _s_size(
        "memory of the S-Part for the states of sequences, in a model whose layers keep states (Qwen3.5). Default: as "
        "much as all mini-batches need with guesses and the prefix cache, at most a quarter of the free memory; "
        "sequences without a state wait"
    )
    no_prefix_cache: bool = _s_option(
        "compute every prompt as a whole: share no KV-cache between sequences, and keep none of ended sequences", False
    )
    huge_pages: str = _option(
        "huge pages for the KV-cache. madvise: transparent ones; hugetlb: from the pool that vm.nr_hugepages reserves",
        "madvise",
        choices=("madvise", "hugetlb", "off"),
    )
    prefault: bool = _option(
        "take the KV-cache's memory from the OS as soon as it is leased, not while it fills", False
    )

    max_batch_size: int = _s_option("most sequences in a mini-batch", 256, parse=option_values.positive)
    target_tbt_ms: float = _s_option(
        "milliseconds between two tokens of a stream that should not be exceeded: while a stream runs, prompts are "
        "cut into chunks that keep it, and sequences that would make steps longer wait; 0: no bound, prompts take up "
        "to --max-batch-tokens rows of every step",
        200.0,
        parse=option_values.milliseconds,
        metavar="MS",
    )
    max_batch_tokens: int | None = _s_option(
        "most rows in a step: decoding sequences and prompt tokens together; default: 512 on a CPU; on a GPU measured "
        "at start, up to 8192",
        parse=option_values.positive,
    )
    mini_batches: int | None = _s_option(
        "mini-batches in flight: the S-Part of one overlaps the R-Part of another; default: 2, or 1 if both parts take "
        "turns on the same cores",
        parse=option_values.positive,
    )
    max_queued: int = _s_option(
        "most requests that wait for others to end; the API refuses further ones with status 429",
        1024,
        parse=option_values.non_negative,
    )
    schedule: str = _s_option(
        "which requests start when there is room. greedy: all; stable: those with which the forecast KV load stays "
        "even and within the cache",
        "greedy",
        choices=("greedy", "stable"),
    )
    speculate: str = _s_option(
        "guess up to K tokens of a sequence and verify them in one step, which leaves the output as it is. suffix:K: "
        "from the sequence's own text; mtp:K: by the MTP head that ships with the model, on a CPU; off: guess none",
        "off",
        parse=option_values.speculation,
        metavar="off|suffix:K|mtp:K",
    )

    device: str = _option(
        "where the S-Part runs, or where an R-node holds KV pages and attends; auto: an S-Part on a GPU if there is "
        "one, an R-node on CPUs",
        "auto",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int | None = _option(
        "attention threads of this (or the embedded) R-node; default: all cores, or beside an S-Part a share of them",
        parse=option_values.positive,
    )
    s_threads: int | None = _s_option(
        "threads of the S-Part on a CPU; default: all cores, or the cores that an embedded R-node leaves",
        parse=option_values.positive,
    )
    tensor_parallel: int = _s_option(
        "processes of this machine that share the weights: each has a part of the heads and of the columns, threads of "
        "its own (--s-threads), and links of its own to the R-nodes. On CPUs; for which models, see docs/models.md",
        1,
        parse=option_values.positive,
        metavar="N",
    )
    cpus: tuple[int, ...] | None = _option(
        "cpus to pin the attention threads to, e.g. 0-3,8", parse=option_values.cpu_list, metavar="LIST"
    )
    numa_node: int | None = _option(
        "NUMA node to bind the threads and the memory of this (or the embedded) R-node to",
        parse=option_values.non_negative,
        metavar="N",
    )
    spin_us: int | None = _option(
        "microseconds that a waiter spins before it sleeps; default: 50 at an S-node, 100 at an R-node; at an "
        "embedded one 0 if it takes turns with the S-Part on the same cores",
        parse=option_values.non_negative,
    )
    step_spin_us: int | None = _option(
        "microseconds that an attention thread spins for the next layer of a step that is under way, if that is longer "
        "than --spin-us; default: 0, and 20000 at an embedded R-node beside a GPU",
        parse=option_values.non_negative,
    )
    exchange: str = _s_option(
        "how a GPU and the R-nodes exchange rows. bypass: the GPU's streams ring the R-nodes and wait for them; "
        "staged: the host does so; auto: bypass if the check at start passes, else staged",
        "auto",
        choices=EXCHANGES,
    )
    tune: str = _s_option(
        "threads and mini-batches of an S-Part on a CPU with an embedded R-node, unless an option says them. auto: the "
        "fastest in a measurement of some seconds at the first start, remembered for the machine and the model; "
        "always: of a new measurement; off: all cores in turns. On a GPU off leaves out the measurement of "
        "--max-batch-tokens",
        "auto",
        choices=("auto", "always", "off"),
    )

    log_level: str = _option("least severe messages to log", "info", choices=("debug", "info", "warning", "error"))
    log_format: str = _option("text: lines for people; json: one JSON object a line", "text", choices=("text", "json"))
    drain_seconds: float = _option(
        "on SIGTERM, how long running requests may continue at an S-node, and how long an R-node waits for its S-nodes "
        "to move their sequences away",
        30.0,
        parse=option_values.seconds,
    )

    @property
    def step_rows(self) -> int:
        """The most rows in a step. On a GPU, device_plan.plan_steps chooses --max-batch-tokens if it is not given."""
        return self.max_batch_tokens or max(512, self.max_batch_size)

    @property
    def uses_r_nodes(self) -> bool:
        """True if the S-node uses R-nodes that run already; False: it starts an embedded one."""
        return bool(self.r_node or self.r_nodes_file or self.r_nodes_dns)

    @property
    def parts(self) -> int:
        """The number of R-nodes that share the heads or the tokens of each sequence."""
        return len(self.r_node) if self.partition != "sequences" else 1

    @property
    def team(self) -> str:
        """What the R-nodes of a team share, if there is one: a key of transports.partition.PARTITIONS."""
        return "heads" if self.partition == "sequences" else self.partition
