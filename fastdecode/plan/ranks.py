"""The S-Part of an S-node on several NUMA nodes: with one rank, or with ranks of --tensor-parallel on each of them."""

from __future__ import annotations

from dataclasses import replace

from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import ProfileError, SNodeProfile, SPartTimes

_SUMS = 2  # of a layer over all ranks


def s_part_of_ranks(s_node: SNodeProfile, model: PlannedModel, ranks: int) -> SPartTimes:
    """The times of a model's S-Part by `ranks` ranks. Raises ProfileError for a number that the profile or the model
    does not allow.

    The weights of one rank lie in the memory of one NUMA node, and the cores of the others read an equal share of them
    from there. Ranks read their own memory, and sum up their rows twice a layer.
    """
    times, sockets = s_node.times(model.name, model.parameters), s_node.sockets
    if sockets is None:
        if ranks > 1:
            raise ProfileError(f"--tensor-parallel {ranks}: the profile has no section s_node.sockets")
        return times
    if ranks == 1:
        far_bytes = times.parameters * times.weight_bytes * (1 - 1 / sockets.n)
        far = 1e-9 * far_bytes / sockets.cross_gbps
        return replace(times, rows=tuple((n, max(seconds / sockets.n, far)) for n, seconds in times.rows))
    if ranks % sockets.n:
        raise ProfileError(f"--tensor-parallel {ranks}: {sockets.n} NUMA nodes cannot have equally many ranks")
    if model.n_kv_heads % ranks:
        raise ProfileError(
            f"--tensor-parallel {ranks}: the plan knows even shares of KV heads alone, and {model.name} has "
            f"{model.n_kv_heads} KV heads"
        )
    row = 1e-9 * model.q_bytes / model.n_layers / sockets.sum_gbps  # Q is about as wide as the rows that are summed
    sums = _SUMS * model.n_layers
    rows = ((n, seconds / sockets.n + sums * (sockets.sum_seconds + n * row)) for n, seconds in times.rows)
    return replace(times, rows=tuple(rows))
