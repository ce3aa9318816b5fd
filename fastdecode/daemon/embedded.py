"""The embedded R-node: what an S-node without `--r-node` starts and talks to over shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode.daemon.child import child_environment, module_command
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_checks import EMBEDDED_OPTIONS
from fastdecode.daemon.machine import usable_cpus
from fastdecode.daemon.process import die_with_parent
from fastdecode.daemon.split import Split
from fastdecode.daemon.tasks import wait_until

if TYPE_CHECKING:
    from fastdecode.daemon.rnode import RNode

log = logging.getLogger(__name__)

_START_SECONDS = 30.0
#: Microseconds that the threads of an R-node beside a GPU spin for the next layer of a step: longer than the GPU's part
#: of a layer, so that none sleeps within a step.
_GPU_STEP_SPIN_US = 20_000


class EmbeddedRNode:
    """The R-node of an S-node without `--r-node`, which talks to it over shared memory.

    If both parts take turns on the same cores with one mini-batch, the R-node's threads belong to this process, and the
    S-Part's thread stands in for one of them while it waits (region/stand_in.h). Otherwise the R-node is a child
    process, which the command line may bind to CPUs and memory of its own.
    """

    def __init__(self, config: NodeConfig, split: Split, brief: bool = False):
        """Prepare the R-node. `brief`: it is for a measurement, and the log need not show it.

        Start it after the S-node has loaded the weights: without `--kv-memory`, it takes a share of the memory that is
        free when it starts.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="fastdecode-"))  # mode 0700: only this user reaches the socket
        self.url = f"shm://{self._directory}/r.sock"
        self._log_level = logging.DEBUG if brief else logging.INFO
        if config.spin_us is None and split.in_turns:
            # A spinning thread of the R-node would keep its core from the S-Part of the next layer: at sched_yield,
            # Linux does not hand the core to a thread that has yielded, too.
            config = replace(config, spin_us=0)
        if config.step_spin_us is None and split.s_on_gpu:
            config = replace(config, step_spin_us=_GPU_STEP_SPIN_US)
        if config.tensor_parallel > 1:  # each rank has an R-node like this one
            from fastdecode.daemon.rnode_start import kv_memory

            config = replace(config, kv_memory=kv_memory(config) // config.tensor_parallel, tensor_parallel=1)
        chosen = config.cpus is not None or config.numa_node is not None
        self._run: _RNodeThreads | _RNodeProcess
        if split.in_turns and split.mini_batches == 1 and not chosen:
            self._run = _RNodeThreads(config, split, brief)
        else:
            self._run = _RNodeProcess(config, split, self.url, brief)

    async def start(self) -> None:
        """Start the R-node and wait until it listens. Raises ConfigError, TransportError, RuntimeError, ValueError."""
        try:
            log.log(self._log_level, "embedded R-node: %s", await self._run.start(self.url))
        except BaseException:
            await self.stop()
            raise

    async def restart(self) -> None:
        """Replace an R-node that is dead or does not answer. Raises like `start`, and OSError."""
        await self.stop()
        self._directory.mkdir(mode=0o700)
        await self.start()

    def remove_socket(self) -> None:
        """Remove the socket, so that nobody but the S-node can connect and a kill leaves no file behind."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def stop(self) -> None:
        """End the R-node. Idempotent."""
        await self._run.stop()
        self.remove_socket()


class _RNodeThreads:
    """An R-node in this process."""

    def __init__(self, config: NodeConfig, split: Split, brief: bool):
        self.config = config
        self._threads, self._brief = split.r_threads, brief
        self._node: RNode | None = None
        self._measuring: asyncio.Task[None] | None = None

    async def start(self, url: str) -> str:
        """Serve at `url`. Returns what the log says of the R-node."""
        from fastdecode.daemon.rnode_start import make_r_node, measure_roofline

        self._node = make_r_node(
            self.config, self._threads, stand_in=True, quiet=self._brief and not log.isEnabledFor(logging.DEBUG)
        )
        await self._node.serve([url], self.config.read_secret())
        if not self._brief:  # for the page of the cluster
            self._measuring = asyncio.create_task(measure_roofline(self._node, usable_cpus()[: self._threads]))
        return f"{self._threads} thread(s) of this process"

    async def stop(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
        if self._node is not None:
            await self._node.close()
            self._node = None


class _RNodeProcess:
    """A child process `fastdecode-node --role r`. The kernel kills it when this process dies, whatever the cause."""

    def __init__(self, config: NodeConfig, split: Split, url: str, brief: bool):
        self._process: asyncio.subprocess.Process | None = None
        self._threads = split.r_threads
        if brief and config.log_level == "info":
            config = replace(config, log_level="warning")
        self.argv = ["--role", "r", "--listen", url, "--threads", str(split.r_threads)]
        self.argv += ["--drain-seconds", "0"]  # it ends after its only S-node
        self.argv += config.to_args([name for name in EMBEDDED_OPTIONS if name != "threads"])
        self.argv += config.to_args(["spin_us", "step_spin_us", "secret_file", "log_level", "log_format"])

    async def start(self, url: str) -> str:
        """Wait until the child listens at `url`. Returns what the log says of the R-node."""
        process = self._process = await asyncio.create_subprocess_exec(
            *module_command("fastdecode.daemon.node", *self.argv),
            stdin=asyncio.subprocess.DEVNULL,
            env=child_environment(),
            # ^C in a terminal must not reach this child, which the parent's running requests still need.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        socket = Path(url.removeprefix("shm://"))
        if not await wait_until(lambda: socket.exists() or process.returncode is not None, _START_SECONDS):
            raise RuntimeError(f"the embedded R-node is not listening after {_START_SECONDS:.0f} s")
        if process.returncode is not None:
            raise RuntimeError(f"the embedded R-node ended at start (exit status {process.returncode})")
        return f"{self._threads} thread(s), pid {process.pid}"

    async def stop(self) -> None:
        """End the child with SIGTERM, or with SIGKILL if it has not ended after 5 seconds."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            log.warning("the embedded R-node does not end on SIGTERM; killing it")
            process.kill()
            await process.wait()
