"""A cluster's hosts as Ray actors, one in each bundle of its placement groups.

A cluster has a Ray namespace of its own. Each node is a detached actor with a name, such as `r3@1.2`: R-node 3, in
bundle 2 of placement group 1. Routers, such as `router0`, are in no group. Ray starts an actor again when its process
or its machine is lost. So Ray's own tables say which nodes there are, and this module keeps no state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fastdecode.cluster.actors import DIRECTORY, DirectoryActor, HostActor, answer, log_name
from fastdecode.cluster.config import ClusterConfig, ClusterError, RayLost
from fastdecode.cluster.directory import Entry, View, in_order, links_to
from fastdecode.cluster.hosts import listens

log = logging.getLogger(__name__)

_ROUTER = "router"  # the role, with which the names begin
_NAME = re.compile(rf"([rsp]|{_ROUTER})(\d+)(?:@(\d+)\.(\d+))?")
_CALL_SECONDS = 5.0
_RESERVE_SECONDS = 30.0
_POLL_SECONDS = 0.25
_STRATEGIES = {"near": "PACK", "spread": "SPREAD"}
#: Memory of an R-node beside its KV-cache.
_R_NODE_BYTES = 1 << 30
_GIVE_TOKEN = (
    "give every machine the same file ~/.ray/auth_token, or set RAY_AUTH_TOKEN_PATH (ray get-auth-token --generate "
    "makes one)"
)
#: Ray places an actor that needs no resource on any machine, whatever machine it is asked for.
_ROUTER_BYTES = 1 << 20
#: Of the resource `router`: any number of routers may share a machine.
_ROUTER_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class NodeActor:
    """The actor of a node or a router: one that Ray lists, or one to be started."""

    role: str
    number: int  # of the node
    bundle: tuple[int, int] | None = None  # of a node: the number of its placement group, and its own number there

    @property
    def node(self) -> str:
        return f"{self.role}{self.number}"

    @property
    def name(self) -> str:
        return self.node if self.bundle is None else "{}@{}.{}".format(self.node, *self.bundle)

    @classmethod
    def from_name(cls, name: str) -> NodeActor | None:
        """None: it is the name of another actor."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        return cls(match[1], int(match[2]), (int(match[3]), int(match[4])) if match[3] else None)


class RayCluster:
    """A cluster on Ray, to be started, changed and ended."""

    def __init__(self, name: str):
        self._name = name

    @classmethod
    @contextlib.contextmanager
    def connect(cls, config: ClusterConfig) -> Iterator[RayCluster]:
        """Connect to Ray. Raises ClusterError."""
        began = not ray.is_initialized()
        if began:
            if config.ray_head is not None and not listens(*config.ray_head):  # Ray itself would try for minutes
                raise RayLost(f"nothing listens at ray-address {config.ray_address!r}")
            try:
                with _without_stderr():
                    ray.init(
                        address=config.ray_address,
                        namespace=f"fastdecode-{config.name}",
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                    )
            except ray.exceptions.AuthenticationError:
                raise ClusterError(f"ray-auth is token, but this machine has no Ray token: {_GIVE_TOKEN}") from None
            except (ConnectionError, RuntimeError, ValueError):
                raise RayLost(
                    f"no Ray cluster answers at ray-address {config.ray_address!r}; if one runs there, its token "
                    f"differs from this machine's: {_GIVE_TOKEN}"
                ) from None
        try:
            yield cls(config.name)
        except (ray.exceptions.RpcError, ray.exceptions.RaySystemError):
            raise RayLost("Ray's head does not answer") from None
        finally:
            if began:
                ray.shutdown()

    # -- what there is --------------------------------------------------------------------------------------------

    def _directory(self) -> Any:
        try:
            return ray.get_actor(DIRECTORY)
        except ValueError:
            raise ClusterError(f"no cluster {self._name!r} is up") from None

    @staticmethod
    def actors(*roles: str) -> list[NodeActor]:
        """The nodes and routers of these roles, or of all, that Ray lists, whether or not they report. Routers come
        first."""
        found = filter(None, map(NodeActor.from_name, ray.util.list_named_actors()))
        wanted = [actor for actor in found if not roles or actor.role in roles]
        return sorted(wanted, key=lambda actor: (actor.role != _ROUTER, actor.role, actor.number))

    def view(self) -> View:
        """What the nodes report. Raises ClusterError."""
        view: View = answer(self._directory().view.remote())
        return view

    def status(self) -> tuple[View, str]:
        """What the nodes report, and a sentence if the directory cannot say it. Raises ClusterError."""
        directory = self._directory()
        try:
            view: View = answer(directory.view.remote())
        except ClusterError:
            why = "The directory is lost, and Ray starts it again"
        else:
            if view.settled:
                return view, ""
            why = "The directory was started a few seconds ago"
        return View(self._ask_hosts(), settled=False), f"{why}; the table shows what each node has just answered."

    def _ask_hosts(self) -> tuple[Entry, ...]:
        """An entry of each node that Ray lists, by its host. That of a host without an answer has the state silent."""
        calls: dict[Any, NodeActor] = {ray.get_actor(actor.name).entry.remote(): actor for actor in self.actors()}
        answered, _ = ray.wait([*calls], num_returns=len(calls), timeout=_CALL_SECONDS)
        found = {actor.node: Entry(actor.node, actor.role, "silent", "", "") for actor in calls.values()}
        for call in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                found[calls[call].node] = ray.get(call)
        return in_order(found.values())

    def log_end(self, node: str) -> str:
        """The last lines that a node and its host have written. Raises ClusterError."""
        names = {actor.node: actor.name for actor in self.actors()}
        if node not in names:
            raise ClusterError(f"there is no node {node}; status shows them all")
        lines: str = answer(ray.get_actor(names[node]).log_end.remote())
        return lines

    # -- up and down ----------------------------------------------------------------------------------------------

    def up(self, config: ClusterConfig) -> None:
        """Start all nodes and the routers, and wait until they serve. Raises ClusterError."""
        with contextlib.suppress(ValueError):
            ray.get_actor(DIRECTORY)
            raise ClusterError(f"the cluster {self._name!r} is up already; scale changes it, down ends it")
        directory = ray.remote(DirectoryActor).options(
            name=DIRECTORY, lifetime="detached", max_restarts=-1, max_task_retries=0, num_cpus=0
        )
        try:
            answer(directory.remote(config).config.remote(), _RESERVE_SECONDS)
            counts = {"s": config.s_nodes.count, "p": config.prefill_nodes.count, "r": config.r_nodes.count}
            self._add(config, [role for role, count in counts.items() for _ in range(count)])
            self._add_routers(config, config.router.count)
            self.wait(config)
        except BaseException:
            self.down(drain=False)
            raise

    def down(self, *, drain: bool = True) -> None:
        """End the routers, then the S-nodes, and last the R-nodes. `drain`: let requests end first."""
        if drain:
            for role, seconds in ((_ROUTER, None), ("s", None), ("p", 0.0), ("r", 0.0)):
                self._drain_actors(self.actors(role), seconds)
        for name in ray.util.list_named_actors():
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name), no_restart=True)
        for number in self._groups():
            remove_placement_group(get_placement_group(self._group_name(number)))

    def wait(self, config: ClusterConfig) -> View:
        """Wait until all nodes that Ray lists serve, and each S-node has a link to each R-node. Raises ClusterError
        after `start_seconds`."""
        deadline = time.monotonic() + config.start_seconds
        while True:
            try:
                view = self.view()
            except ClusterError:  # machines that start many processes answer late
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
                continue
            running = {entry.name for entry in view.entries if entry.state == "running"}
            missing = {actor.node for actor in self.actors()} - running
            n_s_nodes = sum(entry.role in "sp" for entry in view.entries)
            r_nodes = [entry for entry in view.entries if entry.role == "r"]
            unlinked = [entry.name for entry in r_nodes if len(links_to(entry, view)) < n_s_nodes]
            if not missing and not unlinked:
                return view
            if time.monotonic() > deadline:
                if not missing:
                    raise ClusterError(
                        f"{', '.join(unlinked)} got no link from every S-node within {config.start_seconds:.0f} s; "
                        "the logs of S-nodes say why"
                    )
                reasons = {e.name: e.load["status"] for e in view.entries if "status" in e.load}
                nodes = [f"{name} ({reasons.get(name) or self._last_line(name)})" for name in sorted(missing)]
                raise ClusterError(
                    f"{', '.join(nodes)} did not come up within {config.start_seconds:.0f} s; their logs are the files "
                    f"{log_name(self._name, '*')} of Ray's (ray logs, or /tmp/ray/session_latest/logs)"
                )
            time.sleep(_POLL_SECONDS)

    def _last_line(self, node: str) -> str:
        try:
            *_, last = self.log_end(node).splitlines()
        except (ClusterError, ValueError):
            return "its log is empty"
        return last

    # -- changes --------------------------------------------------------------------------------------------------

    def scale(self, role: str, count: int) -> None:
        """Start or drain nodes of a role until there are `count`, and wait until they serve. Raises ClusterError."""
        config: ClusterConfig = answer(self._directory().config.remote())
        if count < 1 and role != "p":
            raise ClusterError("a cluster needs at least one S-node, one R-node and one router")
        actors = self.actors(role)
        if role == _ROUTER:
            self._end(actors[count:])
            self._add_routers(config, count)
            self.wait(config)
        elif count > len(actors):
            self._add(config, [role] * (count - len(actors)))
            self.wait(config)
        else:
            self._end(actors[count:])

    def drain(self, target: str) -> list[str]:
        """Drain and end a node or a router, or all of the machine with this address or Ray id. Returns the names.
        Raises ClusterError."""
        actors, names = self.actors(), {target}
        if target not in {actor.node for actor in actors}:
            names = {e.name for e in self.view().entries if target in (e.machine, e.ray_node)}
        leaving = [actor for actor in actors if actor.node in names]
        if not leaving:
            raise ClusterError(f"there is no node or machine {target}; status shows them all")
        for what, role in (("R-node", "r"), ("S-node", "s"), ("router", _ROUTER)):
            if names.issuperset(actor.node for actor in actors if actor.role == role):
                raise ClusterError(f"{target}: the cluster would have no {what} left; scale it up first")
        self._end(leaving)
        return [actor.node for actor in leaving]

    def _end(self, actors: Sequence[NodeActor]) -> None:
        """Drain nodes and routers, and end them. S-nodes end before R-nodes: their sequences would only be moved
        about."""
        directory = self._directory()
        for roles in (("s", _ROUTER), ("p",), ("r",)):
            ending = [actor for actor in actors if actor.role in roles]
            self._drain_actors(ending)
            for actor in ending:
                ray.kill(ray.get_actor(actor.name), no_restart=True)
                answer(directory.forget.remote(actor.node))
        used = {actor.bundle[0] for actor in self.actors() if actor.bundle is not None}
        for number in self._groups():
            if number not in used:
                remove_placement_group(get_placement_group(self._group_name(number)))

    @staticmethod
    def _drain_actors(actors: Sequence[NodeActor], seconds: float | None = None) -> None:
        """Drain actors at the same time. A lost or unreachable actor has nothing to drain."""
        calls: list[Any] = []
        for actor in actors:
            with contextlib.suppress(ValueError):
                calls.append(ray.get_actor(actor.name).drain.remote(seconds))
        for call in calls:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                log.warning("a node was not drained, because its actor is lost")
            except ray.exceptions.RayError as error:
                log.warning("a node was not drained: %s", str(error).splitlines()[0])

    def _add_routers(self, config: ClusterConfig, count: int) -> None:
        """Start routers until there are `count`, each on a machine that has the fewest: the first one here. If machines
        offer Ray a resource of the name `router`, only these get any."""
        here = ray.get_runtime_context().get_node_id()
        on = Counter(entry.ray_node for entry in self.view().entries if entry.role == _ROUTER)
        alive = [node for node in ray.nodes() if node["Alive"]]
        offering = [node for node in alive if _ROUTER in node["Resources"]]
        machines = [node["NodeID"] for node in offering or alive]
        share = {_ROUTER: _ROUTER_SHARE} if offering else {}
        taken = {router.number for router in self.actors(_ROUTER)}
        started = []
        while len(taken) < count:
            machine = min(machines, key=lambda machine: (on[machine], machine != here))
            on[machine] += 1
            router = NodeActor(_ROUTER, _next_number(taken))
            strategy = NodeAffinitySchedulingStrategy(machine, soft=True)
            wanted = {"num_cpus": 0, "memory": _ROUTER_BYTES, "resources": share}
            started.append(self._start(router, config, scheduling_strategy=strategy, **wanted))
        for call in started:
            answer(call, config.start_seconds)

    def _add(self, config: ClusterConfig, roles: Sequence[str]) -> None:
        """Start nodes of these roles: in bundles that ended nodes have left, then in a new placement group."""
        taken = {role: {actor.number for actor in self.actors(role)} for role in "rsp"}
        taken_bundles = {actor.bundle for actor in self.actors()}
        missing: list[str] = []
        actors: list[NodeActor] = []
        free = {
            role: [
                (number, i)
                for number in self._groups()
                for i, specs in enumerate(get_placement_group(self._group_name(number)).bundle_specs)
                if (number, i) not in taken_bundles and specs == _bundle(config, role)
            ]
            for role in "rsp"
        }
        for role in roles:
            if free[role]:
                bundle = free[role].pop(0)
                for others in free.values():  # nodes of two roles may want the same of a machine
                    if bundle in others:
                        others.remove(bundle)
                actors.append(NodeActor(role, _next_number(taken[role]), bundle))
            else:
                missing.append(role)
        if missing:
            group = max(self._groups(), default=-1) + 1
            self._reserve(group, config, missing)
            actors += [NodeActor(role, _next_number(taken[role]), (group, i)) for i, role in enumerate(missing)]
        started = []
        for actor in actors:
            assert actor.bundle is not None, "nodes are in bundles"
            resources, (number, index) = _bundle(config, actor.role), actor.bundle
            strategy = PlacementGroupSchedulingStrategy(
                get_placement_group(self._group_name(number)), placement_group_bundle_index=index
            )
            started.append(
                self._start(
                    actor,
                    config,
                    num_cpus=resources["CPU"],
                    num_gpus=resources.get("GPU", 0),
                    memory=resources["memory"],
                    scheduling_strategy=strategy,
                )
            )
        for call in started:
            answer(call, config.start_seconds)

    def _reserve(self, number: int, config: ClusterConfig, roles: Sequence[str]) -> PlacementGroup:
        """Reserve a bundle for each node. Raises ClusterError if Ray has no room for them."""
        bundles = [_bundle(config, role) for role in roles]
        group = placement_group(
            bundles, strategy=_STRATEGIES[config.placement], name=self._group_name(number), lifetime="detached"
        )
        if not group.wait(_RESERVE_SECONDS):
            remove_placement_group(group)
            wanted = {key: sum(bundle.get(key, 0) for bundle in bundles) for key in ("CPU", "GPU", "memory")}
            free = ray.available_resources()
            lists = [
                ", ".join(f"{key} {_amount(key, amounts.get(key, 0))}" for key in wanted) for amounts in (wanted, free)
            ]
            raise ClusterError(
                f"Ray has no room for {len(roles)} node(s) within {_RESERVE_SECONDS:.0f} s: wanted are {lists[0]} in "
                f"all, free are {lists[1]} on all machines together"
            )
        return group

    @staticmethod
    def _start(actor: NodeActor, config: ClusterConfig, **resources: Any) -> Any:
        """Start a host's actor. Returns the call that ends once the actor is there."""
        host = ray.remote(HostActor).options(
            name=actor.name, lifetime="detached", max_restarts=-1, max_task_retries=0, max_concurrency=4, **resources
        )
        return host.remote(actor.role, actor.node, config).entry.remote()

    def _groups(self) -> list[int]:
        """The numbers of the cluster's placement groups."""
        prefix = self._group_name(0)[:-1]
        found = [
            group["name"]
            for group in ray.util.placement_group_table().values()
            if group["state"] != "REMOVED" and group["name"].startswith(prefix)
        ]
        return sorted(int(name.removeprefix(prefix)) for name in found)

    def _group_name(self, number: int) -> str:
        return f"fastdecode/{self._name}/{number}"


def _bundle(config: ClusterConfig, role: str) -> dict[str, float]:
    """The resources that Ray is to reserve for a node."""
    if role == "r":
        return {"CPU": float(config.r_nodes.cpus), "memory": float(config.r_nodes.kv_bytes + _R_NODE_BYTES)}
    share = config.prefill_nodes if role == "p" else config.s_nodes
    gpus = {"GPU": float(share.gpus)} if share.gpus else {}
    return {"CPU": float(share.cpus), "memory": float(share.bytes)} | gpus


def _next_number(taken: set[int]) -> int:
    number = next(n for n in range(len(taken) + 1) if n not in taken)
    taken.add(number)
    return number


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what is written to stderr: no option keeps Ray's C++ from logging each failed try to connect there."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _amount(key: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if key == "memory" else f"{value:g}"
