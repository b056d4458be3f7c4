"""Counting replicated parts: shortcuts change no result, and large jobs are notified in part."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from peerstore.commit_protocol import BROADCAST_FANOUT, CommitDecision, PartsReport, PartsTally, broadcast_targets
from peerstore.shard_records import VersionId

NODES = ("a", "b", "c", "d")
LIVES = {"a": 1, "b": 1, "c": 2, "d": 1}
NOTES = st.builds(
    PartsReport,
    version_id=st.integers(1, 3).map(lambda version: VersionId(1, version, 0, "i")),
    total_parts=st.integers(0, 4),
    replicated_parts=st.lists(st.integers(-1, 4), max_size=5).map(tuple),
    node=st.sampled_from(NODES),
    generation=st.integers(0, 3),
    sealed_parts=st.lists(st.integers(-1, 4), max_size=5).map(tuple),
)


class Plain:
    """The rule without any shortcut."""

    def __init__(self):
        self.boundaries = {}

    def add(self, note):
        known = self.boundaries.get((note.version_id, note.node))
        if known is None or note.generation >= known.generation:
            self.boundaries[note.version_id, note.node] = note

    def complete_name_digests(self, me, living):
        found = []
        for group in {group for group, _ in self.boundaries}:
            counted = [
                note
                for (of, node), note in self.boundaries.items()
                if of == group and (node == me or (node in living and LIVES[node] <= note.generation))
            ]
            in_all = max((note.total_parts for note in counted), default=0)
            if in_all and set(range(in_all)) <= {part for note in counted for part in note.replicated_parts}:
                found.append(group)
        newest = max(found, default=None)
        self.boundaries = {key: note for key, note in self.boundaries.items() if key[0] != newest}
        return newest


@given(st.lists(st.tuples(NOTES, st.sets(st.sampled_from(NODES))), max_size=30))
def test_tally_agrees_with_the_plain_rule(told):
    tally, plain = PartsTally(), Plain()
    for note, living in told:
        tally.add(note)
        plain.add(note)
        assert tally.newly_complete(
            me="a", living=living, life=LIVES.__getitem__
        ).replicated == plain.complete_name_digests("a", living)


def test_later_copies_are_not_recounted_for_each_report():
    """Each node reports that its part is sealed, and later that its copies exist."""
    nodes = [f"n{number:03d}" for number in range(300)]
    tally, of, looked, said = PartsTally(), VersionId(1, 1, 0, "i"), [], []

    def life(node):
        looked.append(node)
        return 1

    for safe in (False, True):
        for part, node in enumerate(nodes):
            parts, sealed = ((part,), ()) if safe else ((), (part,))
            tally.add(PartsReport(of, len(nodes), parts, node, 1, sealed))
            said.append(tally.newly_complete(me=nodes[0], living=nodes, life=life))
    assert [found for found in said if found] == [CommitDecision(committed=of), CommitDecision(of, of)]
    assert len(looked) <= 2 * len(nodes)


@given(st.integers(0, 3 * BROADCAST_FANOUT))
def test_small_job_is_notified_completely_and_a_large_one_in_part(count):
    living = [f"n{number:05d}" for number in range(count)]
    told = broadcast_targets(living, "n00000")
    others = set(living) - {"n00000"}
    assert set(told) <= others
    assert len(told) == len(set(told))
    if len(others) <= BROADCAST_FANOUT:
        assert set(told) == others
    else:
        assert BROADCAST_FANOUT / 2 <= len(told) <= BROADCAST_FANOUT
        gaps = [int(b[1:]) - int(a[1:]) for a, b in itertools.pairwise(told)]
        assert max(gaps) == min(gaps), "they are from all of the job"
