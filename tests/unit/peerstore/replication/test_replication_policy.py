import pytest

from peerstore.commit_protocol import CommitReports
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    FencedError,
    LeaseLostError,
    PeerUnreachableError,
    ShardDamagedError,
    ShardPendingError,
)
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.replication.replication_policy import (
    MAX_BUSY_S,
    REFUSED_RETRY_S,
    UNREACHABLE_AFTER,
    ReplicationPolicy,
    ReplicationState,
    ReplicationTask,
    ReplicationView,
    pending_reports,
)
from peerstore.shard_records import ResumePoint, ShardInfo, ShardKey, VersionId

NODES = {name: PeerNode(NodeId(name), f"{name}:1") for name in ("n1", "n2", "n3")}
KEY = ShardKey("job", 5, 1, "a", 0, 0)


def fact(key=KEY, *, whole=False, holders=()):
    return ShardInfo(key, 2, 100, b"", 0, whole, holders)


def look(now=0.0, *, living=("n1", "n2"), facts=None, settled=None, epoch=1, base=None, life=lambda _: 1):
    return ReplicationView(now, {name: NODES[name] for name in living}, facts or [fact()], settled, epoch, base, life)


def accounts(copies=2):
    return ReplicationState(NodeId("n1"), ReplicationPolicy(copies))


def notes(book, seen):
    return pending_reports(CommitReports("n1"), book.statuses(seen), seen, me="n1")[1]


def test_sealed_shard_is_replicated_once_to_the_partner():
    book = accounts()
    duty = book.next_task(look())
    assert duty == ReplicationTask(KEY, "n2", ("n1", "n2"))
    book.task_done(duty, 1, None)
    assert not isinstance(book.next_task(look()), ReplicationTask)
    assert book.confirmed_holders(KEY, lambda _: 1) == ("n2",)


@pytest.mark.parametrize(
    ("error", "again_s"),
    [
        (PeerUnreachableError(""), 1.0),
        (ArenaBusyError(""), 1.0),
        (LeaseLostError("the transfer was aborted"), 1.0),
        (OSError(""), 5.0),
        (ArenaFullError(""), REFUSED_RETRY_S),
        (ShardDamagedError(""), REFUSED_RETRY_S),
        (FencedError(""), REFUSED_RETRY_S),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failed_replication_is_retried(error, again_s):
    book = accounts()
    duty = book.next_task(look())
    book.task_failed(duty, error, 0.0)
    assert not isinstance(book.next_task(look(again_s - 0.1)), ReplicationTask)
    assert book.next_task(look(again_s + 0.1)) == duty


def test_copy_on_one_node_keeps_the_error_of_another():
    book, three = accounts(copies=3), {"living": ("n1", "n2", "n3")}
    first = book.next_task(look(**three))
    book.task_failed(first, ShardDamagedError("it arrived damaged"), 0.0)
    second = book.next_task(look(0.1, **three))
    assert second.target != first.target
    book.task_done(second, 1, None)
    assert book.last_errors(KEY) == f"{first.target}: it arrived damaged"
    book.confirm_holder(KEY, first.target, 1)
    assert book.last_errors(KEY) == ""


def test_unneeded_shard_is_not_reported():
    book = accounts()
    assert [note.sealed_parts for note in notes(book, look())] == [(0,)]
    assert notes(book, look(epoch=2)) == []
    book.task_failed(book.next_task(look()), FencedError("obsolete"), 0.0)
    assert notes(book, look()) == []


def test_busy_partner_is_passed_over_after_a_limit():
    book = accounts()
    duty = book.next_task(look())
    book.task_failed(duty, ArenaBusyError(""), 0.0)
    assert [(note.replicated_parts, note.sealed_parts) for note in notes(book, look(MAX_BUSY_S))] == [((), (0,))]
    book.task_failed(duty, ArenaBusyError(""), MAX_BUSY_S)
    assert [note.replicated_parts for note in notes(book, look(MAX_BUSY_S + 0.1))] == [(0,)]
    three = {"living": ("n1", "n2", "n3")}
    assert book.next_task(look(MAX_BUSY_S + 0.1, **three)) == ReplicationTask(KEY, "n3", ("n1", "n3"))
    assert book.next_task(look(MAX_BUSY_S + REFUSED_RETRY_S + 0.1)) == duty


@pytest.mark.parametrize("between", [ShardPendingError("not verified yet"), PeerUnreachableError("")])
def test_occasionally_busy_partner_is_retried(between):
    book = accounts()
    duty = book.next_task(look())
    for now, error in enumerate([ArenaBusyError(""), between, between, between, between, ArenaBusyError("")]):
        book.task_failed(duty, error, float(now))
    assert book.next_task(look(7.0)) == duty


def test_unreachable_live_partner_is_replaced_and_retried_later():
    book, living = accounts(), ("n1", "n2", "n3")
    duty = book.next_task(look(living=living))
    (other,) = {"n2", "n3"} - {duty.target}
    now = 0.0
    for _ in range(UNREACHABLE_AFTER):
        assert book.next_task(look(now, living=living)) == duty
        book.task_failed(duty, PeerUnreachableError("timed out"), now)
        now += 1.5
    assert book.next_task(look(now, living=living)) == ReplicationTask(KEY, other, ("n1", other))
    assert book.statuses(look(now, living=living))[0].missing == 1
    assert isinstance(book.next_task(look(now + REFUSED_RETRY_S, living=living)), ReplicationTask)
    assert book.next_task(look(now + REFUSED_RETRY_S, living=living)).target == duty.target


def test_only_partner_is_never_replaced():
    book, now = accounts(), 0.0
    for _ in range(2 * UNREACHABLE_AFTER):
        duty = book.next_task(look(now))
        assert duty.target == "n2"
        book.task_failed(duty, PeerUnreachableError("timed out"), now)
        assert book.statuses(look(now))[0].missing == 1
        now += 1.5


def test_intermittent_partner_is_not_replaced():
    book, living, now = accounts(), ("n1", "n2", "n3"), 0.0
    duty = book.next_task(look(living=living))
    for _ in range(3):
        for _ in range(UNREACHABLE_AFTER - 1):
            book.task_failed(duty, PeerUnreachableError("reset"), now)
            now += 1.5
        book.task_done(duty, 1, None)
        assert book.statuses(look(now, living=living))[0].missing == 0
    assert book.partners(look(living=living).alive) == (duty.target,)
    assert not isinstance(book.next_task(look(now, living=living)), ReplicationTask)


def test_past_version_is_replicated_when_the_job_resumed_from_it():
    book, now = accounts(), 100.0
    assert not isinstance(book.next_task(look(now, epoch=2)), ReplicationTask)
    assert isinstance(book.next_task(look(now, epoch=2, facts=[fact(whole=True)])), ReplicationTask)
    assert isinstance(book.next_task(look(now, epoch=2, settled=KEY.version_id)), ReplicationTask)
    assert not isinstance(book.next_task(look(now, settled=VersionId(1, 6, 0, "a"))), ReplicationTask)


def test_restarted_partner_gets_the_copy_again():
    book = accounts()
    duty = book.next_task(look())
    book.task_done(duty, 1, None)
    assert book.next_task(look(life=lambda _: 2)) == duty
    book.task_done(duty, 2, None)
    assert not isinstance(book.next_task(look(life=lambda _: 2)), ReplicationTask)


def test_copy_holder_replicates_to_a_restarted_writer():
    """The live writer may have lost its shard, and other nodes rely on it to replicate."""
    book = accounts()
    copy = [fact(holders=("n2", "n1"))]
    book.confirm_holder(KEY, "n2", 1)
    assert not isinstance(book.next_task(look(facts=copy)), ReplicationTask)
    assert book.next_task(look(facts=copy, life=lambda _: 2)) == ReplicationTask(KEY, "n2", ("n2", "n1"))


def test_only_the_resume_point_of_the_past_is_replicated():
    book, now = accounts(), 100.0
    kept = fact(whole=True)
    assert isinstance(
        book.next_task(look(now, epoch=2, facts=[kept], base=ResumePoint(2, "b", 0, KEY.version_id))), ReplicationTask
    )
    assert not isinstance(
        book.next_task(look(now, epoch=2, facts=[kept], base=ResumePoint(1, "a", 1, VersionId(1, 4, 0, "a")))),
        ReplicationTask,
    )


def test_partner_that_learned_of_a_rewind_gets_the_copy_again():
    """The partner had treated the version as surplus and may have evicted or not repaired it."""
    book = accounts()
    duty = book.next_task(look())
    book.task_done(duty, 1, None)
    back = ResumePoint(1, "a", 1, KEY.version_id)
    assert book.next_task(look(base=back)) == duty
    book.task_done(duty, 1, None)
    assert book.next_task(look(base=back)) == duty, "it received the version before it learned of the rewind"
    book.task_done(duty, 1, back)
    assert not isinstance(book.next_task(look(base=back)), ReplicationTask)


def test_fenced_version_is_offered_at_once_when_the_job_rewinds_to_it():
    book = accounts()
    duty = book.next_task(look())
    book.task_failed(duty, FencedError("older than version 6, which is replicated"), 0.0)
    assert not isinstance(book.next_task(look()), ReplicationTask)
    assert book.next_task(look(base=ResumePoint(1, "a", 1, KEY.version_id))) == duty


@pytest.mark.parametrize(
    ("standby", "copies", "partners"),
    [
        ((), 2, 1),
        (("n3",), 2, 1),
        (("n2", "n3"), 2, 1),
        (("n3",), 3, 2),
        (("n2", "n3"), 1, 0),
    ],
)
def test_standby_nodes_get_replicas_only_where_others_are_too_few(standby, copies, partners):
    found = accounts(copies).partners(NODES, tuple(map(NodeId, standby)))
    assert len(found) == partners
    ranked = set(NODES) - {"n1", *standby}
    assert ranked <= set(found) or (len(ranked) >= partners and set(found) <= ranked)


def test_nodes_with_ranks_are_placed_as_if_there_were_no_standby():
    ranked = {name: PeerNode(NodeId(name), f"{name}:1") for name in map("n{:02}".format, range(12))}
    spare = {name: PeerNode(NodeId(name), f"{name}:1") for name in map("s{:02}".format, range(5))}
    for name in ranked:
        state = ReplicationState(NodeId(name), ReplicationPolicy(2))
        assert state.partners({**ranked, **spare}, tuple(map(NodeId, spare))) == state.partners(ranked)
