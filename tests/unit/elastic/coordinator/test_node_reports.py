"""Progress counted report by report equals a recount of the newest reports."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.control.control_plane import RankProgress
from elastic.coordinator.node_reports import MAX_STANDBY_PEERS, WorldProgress, standby_peers
from elastic.world.world_state import NodeMember, WorldState
from peerstore.membership.topology import NodeId, PeerNode
from tests.support.example_counts import examples

WORLD = WorldSpec(3, ("n0", "n8", "n16"), 0, "")
OTHER = WorldSpec(2, ("n0",), 0, "")
reports = st.builds(
    NodeStatus,
    st.just(1),
    st.sampled_from([*WORLD.ranked_nodes, "n24"]),
    st.just(1),
    st.just(2),
    world=st.sampled_from([WORLD, WORLD, WORLD, OTHER, None]),
    paused=st.none() | st.integers(-1, 4),
    finished=st.booleans(),
    rank_progress=st.lists(st.none() | st.builds(RankProgress, st.just(9), st.integers(-1, 4)), max_size=2).map(tuple),
)


def whole(newest: dict[str, NodeStatus]) -> tuple[bool, int, int | None]:
    """Recount the world's progress from the newest reports."""
    inside = [newest[node] for node in WORLD.ranked_nodes if node in newest]
    said = [says for says in inside if says.world is not None and says.world.epoch == WORLD.epoch]
    complete = len(said) == len(WORLD.ranked_nodes)
    sealed = [-1 if one is None else one.sealed for says in said for one in says.rank_progress]
    steps = [says.paused for says in said if not says.finished]
    agreed = complete and bool(steps) and None not in steps
    return complete, min(sealed, default=-1) if complete else -1, max(steps) if agreed else None


@settings(max_examples=examples(300))
@given(st.lists(reports | st.sampled_from(WORLD.ranked_nodes), max_size=30))
def test_incremental_progress_equals_full_recount(script):
    state, newest = WorldProgress(WORLD), {}
    for one in script:
        if isinstance(one, str):
            state.forget(one)
            newest.pop(one, None)
        else:
            state.update(one)
            newest[one.node] = one
        assert (state.is_complete, state.sealed_by_all, state.pause_target) == whole(newest)


def test_standby_peers_are_few_and_the_first_by_name():
    names = [f"n{number:02d}" for number in range(30)]
    world = WorldState(1, ranked_nodes=("n01",), members={name: NodeMember(name, 1, 1) for name in reversed(names)})
    listed = standby_peers(world, lambda node: None if node == "n03" else PeerNode(NodeId(node), f"{node}:1"))
    assert len(listed) == MAX_STANDBY_PEERS
    assert [peer.id for peer in listed[:4]] == ["n00", "n02", "n04", "n05"]
