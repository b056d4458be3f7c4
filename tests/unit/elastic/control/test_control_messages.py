"""Incremental messages between supervisor and coordinator add up to the full messages."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.control_messages import (
    MAX_NODE_MESSAGE_BYTES,
    MAX_NODES,
    CommandKind,
    CoordinatorCodec,
    NodeCodec,
    NodeCommand,
    NodeDesired,
    NodeStatus,
    RankFailure,
    WorldSpec,
)
from elastic.control.control_plane import NoticeKind, RankProgress
from elastic.control.epoch_state import ChangeMessage, EpochMessage
from peerstore.errors import ProtocolError
from tests.support.example_counts import examples

replace = msgspec.structs.replace
encode = msgspec.msgpack.Encoder().encode

WORLDS = st.builds(WorldSpec, st.integers(0, 3), st.sampled_from([("n0",), ("n0", "n8")]), st.just(0), st.just(""))
SECONDS = st.none() | st.just(5.0)
CHANGES = st.none() | st.builds(ChangeMessage, st.sampled_from(NoticeKind), st.just("a change"), SECONDS)
EPOCHS = st.builds(EpochMessage, st.integers(-1, 3), CHANGES, CHANGES, st.none() | st.integers(-1, 9))
REPORTS = st.fixed_dictionaries(
    {},
    optional={
        "spawn_count": st.integers(0, 3),
        "epoch_state": EPOCHS,
        "ready": st.booleans(),
        "sealed": st.none() | st.integers(-1, 3),
        "exited_ranks": st.just(()) | st.tuples(st.builds(RankFailure, st.integers(0, 1), st.just("it was killed"))),
        "rank_progress": st.lists(st.none() | st.builds(RankProgress, st.integers(-1, 9)), max_size=2).map(tuple),
        "drain_within_s": st.none() | st.just(9.0),
        "generation": st.integers(1, 2),
    },
)
ORDERS = st.fixed_dictionaries(
    {},
    optional={
        "acknowledged": st.integers(0, 9),
        "world": st.none() | WORLDS,
        "epoch_state": EPOCHS,
        "commands": st.just(()) | st.tuples(st.builds(NodeCommand, st.integers(1, 9), st.sampled_from(CommandKind))),
        "superseded": st.booleans(),
    },
)
SPEAKS_OF = st.sampled_from(["nothing", "heard", "own", "before"])


class Both:
    """Both ends of a connection; the node adopts each world that it receives."""

    def __init__(self, says: NodeStatus) -> None:
        self.node = NodeCodec()
        self.says, self.hears = says, NodeDesired("c", 1)
        self.coordinator = CoordinatorCodec(msgspec.msgpack.decode(self.node.encode(says), type=NodeStatus))
        self.heard: NodeDesired | None = None
        self.worlds: list[WorldSpec] = []

    def say(self, **changes) -> None:
        self.says = replace(self.says, number=self.says.number + 1, **changes)
        assert self.coordinator.decode(self.node.encode(self.says)) == self.says

    def tell(self, **changes) -> None:
        self.hears = replace(self.hears, **changes)
        self.heard = self.node.decode(self.coordinator.encode(self.hears))
        assert self.heard == self.hears
        if self.heard.world is not None:
            self.worlds.append(self.heard.world)


@settings(max_examples=examples(200))
@given(st.none() | WORLDS, st.lists(st.tuples(REPORTS, SPEAKS_OF) | ORDERS, max_size=20), WORLDS)
def test_successive_changes_add_up_to_the_full_message(known, script, own):
    both = Both(NodeStatus(1, "n0", 1, 2, world=known))
    for one in script:
        if isinstance(one, dict):
            both.tell(**one)
            continue
        changes, of = one
        if of == "heard" and both.worlds:
            changes = {**changes, "world": both.worlds[-1]}
        elif of == "before" and both.worlds:
            changes = {**changes, "world": both.worlds[0]}
        elif of == "own":
            changes = {**changes, "world": own}
        elif of == "nothing":
            changes = {**changes, "world": None}
        both.say(**changes)


def test_a_report_does_not_grow_with_the_job():
    """A heartbeat, a step and a world's acknowledgment cost as much among 2,000 nodes as among 2."""

    def bytes_of(nodes: int) -> list[int]:
        end, places = NodeCodec(), tuple(f"ip-10-0-{place}.cluster.local" for place in range(nodes))
        says = NodeStatus(1, places[0], 1, 8, rank_progress=(RankProgress(-1),) * 8, silent_s=(0.1,) * 8)
        coordinator = CoordinatorCodec(msgspec.msgpack.decode(end.encode(says), type=NodeStatus))
        heard = end.decode(coordinator.encode(NodeDesired("c", 1, 1, world=WorldSpec(0, places, 0, ""))))
        inside = replace(says, number=2, world=heard.world)
        later = replace(inside, number=3, rank_progress=(RankProgress(7, 6),) * 8, silent_s=(0.2,) * 8)
        bodies = [end.encode(inside), end.encode(later), coordinator.encode(replace(heard, acknowledged=3))]
        return [len(body) for body in bodies]

    assert bytes_of(2000) == bytes_of(2)
    assert sum(bytes_of(2000)) < 1000


def test_world_sent_to_all_nodes_is_encoded_and_stored_once():
    packed, kept = [], WorldSpec(4, ("n0", "n8"), 0, "")

    def pack(formed):
        packed.append(formed)
        return msgspec.Raw(encode(formed))

    ends = [CoordinatorCodec(NodeStatus(1, node, 1, 1), pack, lambda _: kept) for node in ("n0", "n8")]
    for end in ends:
        end.encode(NodeDesired("c", 1, 1, world=kept))
        end.encode(NodeDesired("c", 1, 2, world=kept))
    assert packed == [kept, kept]  # packed once per connection: each codec retains its packed world
    again = CoordinatorCodec(NodeStatus(1, "n0", 1, 1, world=WorldSpec(4, ("n0", "n8"), 0, "")), pack, lambda _: kept)
    assert again.status.world is kept


def test_reference_to_an_unsent_world_is_a_protocol_error():
    end = CoordinatorCodec(NodeStatus(1, "n0", 1, 1))
    with pytest.raises(ProtocolError, match="world number 1"):
        end.decode(encode({"type": "changed", "world": {"type": "told", "number": 1}}))


def test_the_largest_job_that_may_be_fits_a_message():
    longest = WorldSpec(1, tuple(f"{place:0128d}" for place in range(MAX_NODES)), 0, "x" * 2000)
    assert len(NodeCodec().encode(NodeStatus(1, "n0", 1, 8, world=longest))) < MAX_NODE_MESSAGE_BYTES
