"""Sequences on the S-Part's own device: it is filled first, and R-nodes take the rest."""

from __future__ import annotations

import pytest
from engines.scheduler_world import World

from fastdecode.region.contract import PAGE_TOKENS

pytestmark = pytest.mark.quick


def places(world: World) -> list[int]:
    return [seq.placed_on.position for seq in sorted(world.scheduler.running, key=lambda seq: seq.order)]


def test_the_device_is_filled_before_r_nodes_get_a_sequence():
    """Three pages, of which a newcomer leaves one; two R-nodes of the same size stay empty until then."""
    world = World(leases=((3, 16), (40, 16), (40, 16)), mini_batches=1, max_batch_tokens=512, resident=1)
    for _ in range(4):
        world.add(100, 4)
    world.begin(0)
    assert places(world)[:2] == [0, 0]
    assert sorted(places(world)[2:]) == [1, 2]


def test_a_sequence_that_the_device_cannot_hold_goes_to_an_r_node():
    world = World(leases=((3, 16), (40, 16)), mini_batches=1, max_batch_tokens=1024, resident=1)
    world.add(5 * PAGE_TOKENS, 4)
    world.add(100, 4)
    world.begin(0)
    assert places(world) == [1, 0]


def test_idle_prefixes_leave_the_device_for_a_newcomer_although_r_nodes_have_room():
    world = World(leases=((4, 16), (40, 16)), mini_batches=1, max_batch_tokens=512, resident=1, prefix_cache=True)
    world.add(3 * PAGE_TOKENS - 10, 4, end_after=2)
    world.run()
    assert world.cluster.nodes[0].pages_evictable == 3
    world.add(3 * PAGE_TOKENS - 10, 4)
    assert world.begin(0) is None and world.free()
    world.begin(0)
    assert places(world) == [0]
