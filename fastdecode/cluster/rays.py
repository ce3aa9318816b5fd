"""A cluster's hosts as Ray actors, one in each bundle of its placement groups.

A cluster has a Ray namespace of its own. Each node is a detached actor with a name, such as `r3@1.2`: R-node 3, in
bundle 2 of placement group 1. Ray starts an actor again when its process or its machine is lost. So Ray's own tables
say which nodes there are, and this module keeps no state.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
    """The actor of a node: one that Ray lists, or one to be started in its bundle."""

    role: str
    number: int  # of the node
    group: int
    bundle: int

    @property
    def node(self) -> str:
        return f"{self.role}{self.number}"

    @property
    def name(self) -> str:
        return f"{self.node}@{self.group}.{self.bundle}"

    @classmethod
    def from_name(cls, name: str) -> NodeActor:
        node, _, position = name.partition("@")
        group, _, bundle = position.partition(".")
        return cls(node[0], int(node[1:]), int(group), int(bundle))


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

    def actors(self, role: str = "rsp") -> list[NodeActor]:
        """The nodes that Ray lists, whether or not they report."""
        names = [name for name in ray.util.list_named_actors() if "@" in name]
        return sorted((p for p in map(NodeActor.from_name, names) if p.role in role), key=lambda p: (p.role, p.number))

    @staticmethod
    def routers() -> list[str]:
        """The names of the routers that Ray lists, by their numbers."""
        names = [name for name in ray.util.list_named_actors() if name.startswith(_ROUTER)]
        return sorted(names, key=lambda name: int(name.removeprefix(_ROUTER)))

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
        names = [*self.routers(), *(actor.name for actor in self.actors())]
        nodes = {ray.get_actor(name).entry.remote(): name.partition("@")[0] for name in names}
        answered, _ = ray.wait([*nodes], num_returns=len(nodes), timeout=_CALL_SECONDS)
        found = {}
        for call in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                found[nodes[call]] = ray.get(call)
        for node in nodes.values():
            found.setdefault(node, Entry(node, node.rstrip("0123456789"), "silent", "", ""))
        return in_order(found.values())

    def log_end(self, node: str) -> str:
        """The last lines that a node and its host have written. Raises ClusterError."""
        lines: str = answer(ray.get_actor(self._actor_name(node)).log_end.remote())
        return lines

    def _actor_name(self, node: str) -> str:
        """The name of a node's or a router's actor. Raises ClusterError."""
        names = {name: name for name in self.routers()} | {actor.node: actor.name for actor in self.actors()}
        if node not in names:
            raise ClusterError(f"there is no node {node}; status shows them all")
        return names[node]

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
            self._drain_actors(self.routers())
            self._drain_actors([actor.name for actor in self.actors("s")])
            self._drain_actors([actor.name for actor in self.actors("p")], 0.0)
            self._drain_actors([actor.name for actor in self.actors("r")], 0.0)
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
                continue
            running = {entry.name for entry in view.entries if entry.state == "running"}
            missing = {actor.node for actor in self.actors()} | {*self.routers()}
            missing -= running
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
        if role == _ROUTER:
            self._end([], self.routers()[count:])
            self._add_routers(config, count)
            self.wait(config)
            return
        actors = self.actors(role)
        if count > len(actors):
            self._add(config, [role] * (count - len(actors)))
            self.wait(config)
        else:
            self._end(actors[count:])

    def drain(self, target: str) -> list[str]:
        """Drain and end a node or a router, or all of the machine with this address or Ray id. Returns the names.
        Raises ClusterError."""
        actors, routers = self.actors(), self.routers()
        names = {target}
        if target not in {*routers, *(actor.node for actor in actors)}:
            names = {e.name for e in self.view().entries if target in (e.machine, e.ray_node)}
        leaving, closing = [actor for actor in actors if actor.node in names], [r for r in routers if r in names]
        if not leaving and not closing:
            raise ClusterError(f"there is no node or machine {target}; status shows them all")
        of_role = {role: [actor.node for actor in actors if actor.role == role] for role in "rs"}
        for what, all_of_them in (("R-node", of_role["r"]), ("S-node", of_role["s"]), ("router", routers)):
            if names.issuperset(all_of_them):
                raise ClusterError(f"{target}: the cluster would have no {what} left; scale it up first")
        self._end(leaving, closing)
        return [*closing, *(actor.node for actor in leaving)]

    def _end(self, actors: Sequence[NodeActor], routers: Sequence[str] = ()) -> None:
        """Drain nodes and routers, and end them. S-nodes end before R-nodes: their sequences would only be moved
        about."""
        directory = self._directory()
        for role in "spr":
            ending = {actor.name: actor.node for actor in actors if actor.role == role}
            if role == "s":
                ending |= {name: name for name in routers}
            self._drain_actors([*ending])
            for name, node in ending.items():
                ray.kill(ray.get_actor(name), no_restart=True)
                answer(directory.forget.remote(node))
        used = {actor.group for actor in self.actors()}
        for number in self._groups():
            if number not in used:
                remove_placement_group(get_placement_group(self._group_name(number)))

    @staticmethod
    def _drain_actors(names: Sequence[str], seconds: float | None = None) -> None:
        """Drain actors at the same time. A lost or unreachable actor has nothing to drain."""
        calls = []
        for name in names:
            with contextlib.suppress(ValueError):
                calls.append(ray.get_actor(name).drain.remote(seconds))
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
        taken = {int(name.removeprefix(_ROUTER)) for name in self.routers()}
        started = []
        while len(taken) < count:
            machine = min(machines, key=lambda machine: (on[machine], machine != here))
            on[machine] += 1
            name = f"{_ROUTER}{_next_number(taken)}"
            strategy = NodeAffinitySchedulingStrategy(machine, soft=True)
            wanted = {"num_cpus": 0, "memory": _ROUTER_BYTES, "resources": share}
            started.append(self._start(_ROUTER, name, config, scheduling_strategy=strategy, **wanted))
        for call in started:
            answer(call, config.start_seconds)

    def _add(self, config: ClusterConfig, roles: Sequence[str]) -> None:
        """Start nodes of these roles: in bundles that ended nodes have left, then in a new placement group."""
        taken = {role: {actor.number for actor in self.actors(role)} for role in "rsp"}
        taken_bundles = {(actor.group, actor.bundle) for actor in self.actors()}
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
                actors.append(NodeActor(role, _next_number(taken[role]), *bundle))
            else:
                missing.append(role)
        if missing:
            group = max(self._groups(), default=-1) + 1
            self._reserve(group, config, missing)
            actors += [NodeActor(role, _next_number(taken[role]), group, i) for i, role in enumerate(missing)]
        started = []
        for actor in actors:
            resources = _bundle(config, actor.role)
            strategy = PlacementGroupSchedulingStrategy(
                get_placement_group(self._group_name(actor.group)), placement_group_bundle_index=actor.bundle
            )
            started.append(
                self._start(
                    actor.role,
                    actor.name,
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
    def _start(role: str, name: str, config: ClusterConfig, **resources: Any) -> Any:
        """Start a host's actor. Returns the call that ends once the actor is there."""
        actor = ray.remote(HostActor).options(
            name=name, lifetime="detached", max_restarts=-1, max_task_retries=0, max_concurrency=4, **resources
        )
        return actor.remote(role, name.partition("@")[0], config).entry.remote()

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
