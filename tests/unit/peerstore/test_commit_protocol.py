"""The commit protocol under any order of reports: commits, aborts and evictions."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerstore.commit_protocol import (
    MAX_ABORTED_VERSIONS,
    MAX_RETAINED_VERSIONS,
    CommitDecision,
    CommitReports,
    JobVersions,
    PartsReport,
    PartsTally,
    TooManyRetainedError,
    commit_leader,
    is_abandoned,
    is_superseded,
)
from peerstore.replication.replication_policy import ReplicationStatus
from peerstore.shard_records import ResumePoint, RetentionMark, ShardKey, VersionId

PARTS = 3
NODES = ("a", "b", "c")


def group(version, epoch=1, attempt=0):
    return VersionId(epoch, version, attempt, f"i{epoch}")


groups = st.builds(group, st.integers(0, 3), st.integers(1, 2))
parts = st.integers(0, PARTS - 1)
decided = st.builds(
    CommitDecision,
    committed=st.none() | groups,
    replicated=st.none() | groups,
    aborted=st.lists(groups, max_size=3, unique=True).map(tuple),
)


# -- what one node knows ----------------------------------------------------------------------------------------------

events = st.one_of(
    st.tuples(st.just("whole"), groups),
    st.tuples(st.just("settled"), groups),
    st.tuples(st.just("torn"), groups),
    st.tuples(st.just("left out"), groups, parts),
    st.tuples(st.just("lost"), groups, parts),
    st.tuples(st.just("mended"), groups, parts),
    st.tuples(st.just("dropped"), groups),
    st.tuples(st.just("went on"), groups),
)


def happen(versions, event):
    what, of, *part = event
    if what == "whole":
        versions.mark_committed(of, ())
    elif what == "settled":
        versions.mark_replicated(of)
    elif what == "torn":
        versions.mark_aborted([of])
    elif what == "left out":
        versions.abort_part(of, part[0], ())
    elif what == "lost":
        versions.lose_part(of, part[0])
    elif what == "mended":
        versions.repair_part(of, part[0])
    elif what == "dropped":
        versions.drop([of], 0)
    else:
        versions.resume_from(ResumePoint(of.epoch + 1, "next", 0, of), ())


@given(st.lists(events, max_size=25))
def test_there_are_never_two_answers_about_a_version(happened):
    versions = JobVersions()
    for event in happened:
        happen(versions, event)
        assert not versions.aborted.keys() & versions.committed.keys()
        assert versions.replicated not in versions.aborted
        for torn in versions.aborted:
            assert not versions.is_needed(torn)
            assert not versions.is_committed(torn)


@given(st.lists(events, max_size=25), groups)
def test_aborted_version_stays_aborted_unless_it_was_loaded(happened, torn):
    versions = JobVersions()
    for event in happened:
        happen(versions, event)
    if torn not in versions.mark_aborted([torn]) and torn not in versions.aborted:
        assert versions.is_committed(torn)
        return
    for event in happened:
        if event[0] != "went on":
            happen(versions, event)
            assert torn in versions.aborted


@given(st.lists(events, max_size=25), groups)
def test_dropped_version_cannot_be_committed(happened, gone):
    """The reporting node has not learned of the drop: a commit would make complete versions surplus."""
    versions = JobVersions()
    versions.drop([gone], 0)
    for event in happened:
        if event[0] != "went on":
            happen(versions, event)
            assert not versions.is_committed(gone)


@given(groups, parts, st.sets(parts), st.booleans())
def test_present_part_is_not_aborted(of, part, here, lost):
    """Its writer has not learned that the part was sealed."""
    versions = JobVersions()
    if lost:
        versions.lose_part(of, part)
    news = versions.abort_part(of, part, here)
    assert news == (part not in here and not lost)
    assert (of in versions.aborted) == news
    assert not versions.abort_part(of, part, here)


@given(st.lists(st.tuples(groups, parts), max_size=20))
def test_aborted_parts_are_remembered(left):
    versions = JobVersions()
    for of, part in left:
        versions.abort_part(of, part, ())
    said = {of: {part for other, part in left if other == of} for of, _ in left}
    assert versions.aborted == said


def test_aborted_versions_are_remembered_up_to_the_size_of_a_ping():
    versions = JobVersions()
    versions.mark_aborted([group(version) for version in range(3 * MAX_ABORTED_VERSIONS)])
    assert sorted(versions.aborted) == [
        group(version) for version in range(2 * MAX_ABORTED_VERSIONS, 3 * MAX_ABORTED_VERSIONS)
    ]


def test_versions_that_are_kept_are_counted_and_not_the_attempts_at_them():
    versions = JobVersions()
    whole = set()
    for attempt in range(3 * MAX_RETAINED_VERSIONS):
        versions.apply_retention(
            [versions.new_retention_mark(group(5, attempt=attempt), kept=True, now_ns=attempt + 1)], lambda: whole
        )
        whole.add(group(5, attempt=attempt))
        assert group(5, attempt=attempt) in versions.retained(whole)
        assert len(versions.retention) <= 2 * MAX_RETAINED_VERSIONS, "more than a ping may carry"
    for version in range(6, 5 + MAX_RETAINED_VERSIONS):
        versions.apply_retention(
            [versions.new_retention_mark(group(version), kept=True, now_ns=1000 + version)], lambda: whole
        )
    with pytest.raises(TooManyRetainedError):
        versions.apply_retention([versions.new_retention_mark(group(1000), kept=True, now_ns=2000)], lambda: whole)


def test_aborted_version_is_not_retained():
    versions = JobVersions()
    for version in range(3 * MAX_RETAINED_VERSIONS):
        versions.apply_retention([versions.new_retention_mark(group(version), kept=True, now_ns=version + 1)])
        versions.mark_aborted([group(version)])


@given(st.integers(0, 10), st.integers(0, 10), st.booleans())
def test_local_retention_mark_is_newer_than_received_ones(heard_ns, now_ns, kept):
    versions = JobVersions()
    versions.apply_retention([RetentionMark(group(1), not kept, heard_ns)])
    versions.apply_retention([versions.new_retention_mark(group(1), kept=kept, now_ns=now_ns)])
    assert versions.retention[group(1)].retained == kept


@given(st.sets(groups), st.none() | groups, st.sets(groups), st.booleans())
def test_no_version_is_surplus_without_one_to_resume_from(whole, replicated, damaged, guarded):
    versions = JobVersions(requires_replication=guarded, replicated=replicated, damaged=damaged)
    safe = versions.rollback_target(whole)
    if guarded:
        assert safe == (replicated if replicated not in damaged else None)
    else:
        assert safe == max(whole, default=None)
    for one in {*whole, *damaged}:
        assert is_superseded(one, safe) == (safe is not None and one < safe)
        assert not is_superseded(one, safe, {one})
        assert not is_abandoned(one, one.epoch, (), safe)
        assert not is_abandoned(one, one.epoch + 1, {one}, safe)
        assert is_abandoned(one, one.epoch + 1, (), safe) == (one != safe)


@example(group(3), group(1))
@given(groups, groups)
def test_abandoned_version_cannot_be_committed(left, base):
    versions = JobVersions()
    versions.mark_committed(left, ())
    said = ResumePoint(base.epoch + 1, "next", 0, base)
    versions.resume_from(said, ())
    assert versions.is_committed(base)
    if said.abandons(left):
        assert not versions.mark_committed(left, ())
        assert not versions.mark_replicated(left)
        assert not versions.is_committed(left)


@given(decided, decided)
def test_merged_decision_contains_both(one, later):
    both = one | later
    assert both == later | one
    assert {*both.aborted} == {*one.aborted, *later.aborted}
    assert both.committed in (one.committed, later.committed)
    assert all(
        said is None or (both.replicated is not None and said <= both.replicated)
        for said in (one.replicated, later.replicated)
    )


# -- counting ---------------------------------------------------------------------------------------------------------


@st.composite
def stories(draw):
    """Draw each node's reports of one version in order: parts sealed, replicated or missing."""
    owners = {part: draw(st.sampled_from(NODES)) for part in range(PARTS)}
    out = draw(st.sets(parts, max_size=1))
    order = draw(st.permutations([(part, state) for part in range(PARTS) for state in ("sealed", "safe")]))
    return owners, out, order


@given(stories())
def test_tally_state_follows_from_sealed_copied_and_missing_parts(story):
    owners, out, order = story
    of, tally = group(1), PartsTally()
    sealed, safe, told = set(), set(), []
    for part, state in order:
        if part not in out:
            (sealed if state == "sealed" else safe).add(part)
        for node in NODES:
            mine = {p for p in range(PARTS) if owners[p] == node}
            left = tuple(sorted(mine & out)) if part in out else ()
            kept, rest = tuple(sorted(mine & safe)), tuple(sorted(mine & (sealed - safe)))
            tally.add(PartsReport(of, PARTS, kept, node, 1, rest, left))
        torn = tally.newly_aborted()
        done = tally.newly_complete(me="a", living=NODES, life=lambda _: 1)
        told.append((torn, done))
        complete, there = len(safe) == PARTS, len(sealed | safe) == PARTS
        assert not (done.replicated and not complete)
        assert not (done.committed and not there)
        if done.replicated:
            break
    wholes = [done.committed for _, done in told if done.committed]
    torns = [torn for torn, _ in told if torn]
    if out:
        assert wholes == []
        assert torns == [(of,)]
    else:
        assert torns == []
        assert [done.replicated for _, done in told if done.replicated] == [of]
        assert wholes[0] == of


@given(st.sets(st.sampled_from(NODES)), st.booleans())
def test_commit_needs_a_quorum_and_an_abort_a_single_report(living, quorum):
    reports = CommitReports("a")
    for part, node in enumerate(NODES):
        reports.add(PartsReport(group(1), PARTS, (part,), node, 1))
    reports.add(PartsReport(group(2), 0, (), "b", 1, (), (0,)))
    found = reports.decide(living={"a", *living}, life=lambda _: 1, replicated=None, quorum=quorum)
    assert found.aborted == (group(2),)
    assert (found.replicated == group(1)) == (quorum and {"a", *living} == {*NODES})


def test_unacknowledged_reports_go_to_the_next_leader():
    reports, of = CommitReports("b"), ShardKey("job", 1, 1, "i1", 0, 0)
    standing = [ReplicationStatus(of, is_owner=True, copies=1, missing=1, unplaceable=0)]

    def said(living):
        return reports.pending(
            standing,
            {of.version_id: PARTS},
            living=dict.fromkeys(living),
            replicated=None,
            life=1,
            left_out={group(0): {2}},
        )

    teller, notes = said("abc")
    assert teller == commit_leader("abc") == "a"
    assert notes == [
        PartsReport(group(0), 0, (), "b", 1, (), (2,)),
        PartsReport(group(1), PARTS, (), "b", 1, (0,)),
    ]
    for note in notes:
        reports.mark_reported(teller, note)
    assert said("abc") == ("a", [])
    assert said("bc") == ("b", notes)  # the first leader is gone: the next one receives all reports


@pytest.mark.parametrize(
    ("living", "standby", "leader"), [("abc", "a", "b"), ("abc", "ac", "b"), ("ac", "ac", "a"), ("abc", "", "a")]
)
def test_standby_node_leads_no_commit_while_a_node_with_a_vote_lives(living, standby, leader):
    """The node may have an older member list without the reporting nodes."""
    assert commit_leader(living, standby) == leader
    reports, of = CommitReports("b"), ShardKey("job", 1, 1, "i1", 0, 0)
    standing = [ReplicationStatus(of, is_owner=True, copies=2, missing=0, unplaceable=0)]
    told, _ = reports.pending(
        standing, {of.version_id: PARTS}, living=dict.fromkeys(living), standby=standby, replicated=None, life=1
    )
    assert told == leader
