"""The incarnation tracker: agreement of ranks, loads, new worlds, and other processes."""

import dataclasses
import multiprocessing as mp
from multiprocessing import resource_sharer

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from peerstore.errors import AgentUnreachableError
from peerstore.shard_records import VersionId
from tieredckpt import Checkpointer
from tieredckpt.errors import (
    DurableRefusedError,
    SaveFailedError,
    SettingsError,
    StoreBusyError,
    UsageError,
)
from tieredckpt.format.manifest import decode_meta
from tieredckpt.rank_error import RankError
from tieredckpt.session.incarnation import (
    CapturePoint,
    Incarnation,
    IncarnationTracker,
    SaveProposal,
    decide_save,
    use_world_epoch,
)
from tieredckpt.testing import memory_node

JOB = "job"
X, Y = Incarnation(3, "x"), Incarnation(4, "y")


def proposal(current=X, parts=2, base=None, reached=-1, known=0, **how):
    point = CapturePoint("life", current, parts, base, reached)
    return SaveProposal(
        **{"job": JOB, "step": 9, "point": point, "is_stale": False, "attempts": 0, "known_epoch": known} | how
    )


def test_agreeing_ranks_continue_their_incarnation():
    found = decide_save([proposal(base=4), proposal(base=4, attempts=2)], "new", 0)
    assert (found.incarnation, found.parts, found.base, found.attempt) == (X, 2, 4, 2)
    assert found.key(1).part == 1


@pytest.mark.parametrize(
    "other",
    [
        proposal(None, 0, base=5),
        proposal(Y),
        proposal(known=7),
        proposal(parts=3),
        proposal(None, 0),
    ],
    ids=["went back", "another incarnation", "heard of a newer one", "another world", "new"],
)
def test_single_differing_rank_starts_a_new_incarnation(other):
    for proposals in ([proposal(known=3), other], [other, proposal(known=3)]):
        found = decide_save(proposals, "new", 0)
        assert found.incarnation.name == "new"
        assert found.incarnation.epoch == max(one.known_epoch for one in proposals) + 1
        assert found.parts == 2


def test_later_incarnation_has_the_greater_epoch_even_if_unknown():
    """An agent that lost its memory and a node without any report both count from zero again."""
    numbers = []
    for _ in range(3):
        with memory_node(), Checkpointer(f"tiered://{JOB}") as ckpt:
            ckpt.save({"a": torch.ones(1)}, 1).wait()
            numbers.append(ckpt.session.incarnation.current.epoch)
    assert numbers == sorted(set(numbers))


def test_a_clock_that_went_back_makes_no_lower_number():
    assert [decide_save([proposal(None, 0, known=7)], "new", at).incarnation.epoch for at in (0, 5, 8, 9)] == [
        8,
        8,
        8,
        9,
    ]


def test_epoch_of_the_world_replaces_the_clock():
    tracker = IncarnationTracker(JOB)
    with use_world_epoch(500):
        point = tracker.capture()
    for known, at, expected in ((7, 0, 500), (7, 900, 500), (600, 900, 601)):
        made = tracker.propose(9, point, known, None)
        assert decide_save([made, made], "new", at).incarnation.epoch == expected
    assert tracker.capture().world_epoch == 0


def test_new_incarnation_starts_at_the_rewind_of_a_rank():
    assert decide_save([proposal(base=1, reached=20), proposal(None, 0, base=10)], "new", 0).base == 10


def test_new_incarnation_without_a_rewind_keeps_saved_steps():
    assert decide_save([proposal(base=1, reached=20), proposal(None, 0)], "new", 0).base == 20
    assert decide_save([proposal(None, 0)] * 2, "new", 0).base is None
    assert decide_save([proposal(None, 0, base=-1)] * 2, "new", 0).base == -1


def test_state_staged_before_a_load_is_saved_only_in_its_own_incarnation():
    assert decide_save([proposal(is_stale=True), proposal(is_stale=True)], "new", 0).incarnation == X
    with pytest.raises(SaveFailedError, match="A newer incarnation writes now"):
        decide_save([proposal(is_stale=True), proposal(is_stale=True, known=4)], "new", 0)
    with pytest.raises(SaveFailedError, match="A newer incarnation writes now"):
        decide_save([proposal(is_stale=True), proposal(None, 0, base=4)], "new", 0)


def test_ranks_that_save_different_steps_are_refused():
    with pytest.raises(UsageError, match="rank 1 saves step 8 of job while rank 0 saves step 9"):
        decide_save([proposal(), proposal(step=8)], "new", 0)


def test_failed_rank_fails_the_save_of_all_with_its_reason():
    with pytest.raises(SaveFailedError, match="rank 1 cannot save step 9 of job: no agent"):
        decide_save([proposal(), proposal(problem=RankError("no agent"))], "new", 0)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (SettingsError("agent.node"), SettingsError),
        (DurableRefusedError("no bucket"), DurableRefusedError),
        (StoreBusyError("later"), StoreBusyError),
        (AgentUnreachableError("no agent"), SaveFailedError),
    ],
)
def test_failed_rank_fails_the_save_of_all_with_the_kind_of_its_error(problem, kind):
    refused = proposal(problem=RankError.of(problem))
    with pytest.raises(kind, match=f"rank 1 cannot save step 9 of job: {problem}") as raised:
        decide_save([proposal(), refused], "new", 0)
    assert type(raised.value) is kind


def test_newest_complete_version_is_shared_with_all():
    whole = VersionId(3, 7, 0, "x")
    assert (
        decide_save(
            [proposal(newest_complete=whole), proposal(newest_complete=VersionId(3, 6, 0, "x"))], "new", 0
        ).newest_complete
        == whole
    )
    assert decide_save([proposal()], "new", 0).newest_complete is None


def agree(owners, step, points=None, known=0, name="n"):
    points = points or [owner.capture() for owner in owners]
    pairs = list(zip(owners, points, strict=True))
    decision = decide_save([owner.propose(step, point, known, None) for owner, point in pairs], name, 0)
    for part, (owner, point) in enumerate(pairs):
        owner.adopt(decision, point)
        owner.record_sealed(decision.key(part))
    return decision


def test_every_try_at_a_step_is_an_attempt_that_all_ranks_count_alike():
    owners = [IncarnationTracker(JOB) for _ in range(2)]
    assert [agree(owners, step).attempt for step in (5, 6, 5, 5)] == [0, 0, 1, 2]
    assert owners[0].next_key(6, 0).attempt == 1
    assert agree(owners, 6).attempt == 2
    owners[1].skip_attempts(7, 3)
    assert agree(owners, 7).attempt == 3


def test_an_owner_does_not_remember_every_step():
    owner = IncarnationTracker(JOB)
    for step in range(1000):
        agree([owner], step)
    assert len(owner._attempts) < 100


def test_save_in_progress_during_a_load_does_not_revive_its_incarnation():
    owner = IncarnationTracker(JOB)
    first = agree([owner], 20)
    point = owner.capture()
    owner.rewind_to(10)
    assert agree([owner], 21, [point]).incarnation == first.incarnation
    assert owner.current is None
    second = agree([owner], 11, known=first.incarnation.epoch, name="second")
    assert (second.incarnation.name, second.base) == ("second", 10)
    with pytest.raises(SaveFailedError):
        agree([owner], 22, [point], known=second.incarnation.epoch)


def test_owner_counts_the_ranks_that_agreed():
    owners = [IncarnationTracker(JOB) for _ in range(2)]
    agree(owners, 3)
    assert owners[0].agreed_rank_count == 2
    owners[0].rewind_to(2, ranks=1)
    assert owners[0].agreed_rank_count == 1
    assert agree(owners, 4, known=1, name="second").base == 2
    assert owners[0].agreed_rank_count == 2
    agree(owners[:1], 5, known=2)
    assert (owners[0].agreed_rank_count, owners[1].agreed_rank_count) == (1, 2)
    owners[0].leave_world()
    assert owners[0].agreed_rank_count is None


def test_leaving_a_world_keeps_its_saves():
    owner = IncarnationTracker(JOB)
    owner.rewind_to(4)
    owner.leave_world()
    assert owner.capture().base == 4
    first = agree([owner], 7)
    owner.leave_world()
    assert (owner.current, owner.capture().base) == (None, 7)
    assert agree([owner], 8, known=first.incarnation.epoch, name="second").base == 7


# -- a process that saves for this one ----------------------------------------------------------------------------


def save_for(pipe):
    """Save like DCP's background process, for the owner that the save names."""
    mine = IncarnationTracker(JOB)
    while (task := pipe.recv()) is not None:
        given, step, known = task
        mine.take_over(given)
        pipe.send(agree([mine], step, known=known, name=f"background-{step}"))


class Trainer:
    def __init__(self):
        context = mp.get_context("fork")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=save_for, args=(there,), daemon=True)
        self.process.start()
        there.close()
        self.owner = IncarnationTracker(JOB)
        self.epoch = 0

    def save(self, step):
        return self._known(agree([self.owner], step, known=self.epoch, name=f"trainer-{step}"))

    def save_in_background(self, step):
        self.pipe.send((self.owner.hand_over(), step, self.epoch))
        return self._known(self.pipe.recv())

    def _known(self, decision):
        self.epoch = max(self.epoch, decision.incarnation.epoch)
        return decision

    def close(self):
        self.pipe.send(None)
        self.process.join(200)
        resource_sharer.stop(10)  # its thread passed the memory's descriptor to the other process
        assert self.process.exitcode == 0
        self.pipe.close()


@pytest.fixture
def trainer():
    one = Trainer()
    yield one
    one.close()


def test_trainer_learns_the_incarnation_agreed_in_the_background(trainer):
    first = trainer.save_in_background(1)
    assert trainer.owner.current == first.incarnation
    assert trainer.save(2).incarnation == first.incarnation
    assert [trainer.save_in_background(2).attempt, trainer.save(2).attempt] == [1, 2]


def test_background_process_rewinds_with_its_trainer(trainer):
    first = trainer.save_in_background(1)
    trainer.owner.rewind_to(0)
    assert trainer.owner.current is None
    second = trainer.save_in_background(1)
    assert (second.incarnation.epoch, second.base, second.attempt) == (first.incarnation.epoch + 1, 0, 0)
    assert trainer.owner.current == second.incarnation


@pytest.mark.slow
@settings(max_examples=20)
@given(ways=st.lists(st.sampled_from(["save", "background", "load", "leave"]), max_size=12))
def test_trainer_and_background_share_an_incarnation(ways):
    trainer = Trainer()
    try:
        wanted = None
        for step, way in enumerate(ways):
            if way == "load":
                trainer.owner.rewind_to(step)
                wanted = None
            elif way == "leave":
                trainer.owner.leave_world()
                wanted = None
            else:
                found = (trainer.save if way == "save" else trainer.save_in_background)(step).incarnation
                assert found.epoch == trainer.epoch
                assert wanted in (None, found)
                wanted = found
    finally:
        trainer.close()


# -- the state machine --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rank:
    owner: IncarnationTracker
    branch: object = None
    """The reference model: the last event of this rank's incarnation."""
    life: int = 0


class Ranks(RuleBasedStateMachine):
    """Random sets of ranks save or load together; differing histories separate their incarnations."""

    captured = Bundle("captured")

    def __init__(self):
        super().__init__()
        self.ranks = [Rank(IncarnationTracker(JOB)) for _ in range(3)]
        self.epoch, self.step, self.names = 0, 0, 0

    some = st.sets(st.integers(0, 2), min_size=1).map(sorted)

    @rule(who=some)
    def save(self, who):
        self.step += 1
        self.names += 1
        owners = [self.ranks[one].owner for one in who]
        found = agree(owners, self.step, known=self.epoch, name=f"n{self.names}")
        branches = {self.ranks[one].branch for one in who}
        together = branches == {(tuple(who), found.incarnation)}
        assert together == (found.incarnation.name != f"n{self.names}")
        assert found.incarnation.epoch >= self.epoch
        self.epoch = found.incarnation.epoch
        for one in who:
            self.ranks[one].branch = (tuple(who), found.incarnation)

    @rule(who=some, step=st.integers(0, 30))
    def load(self, who, step):
        for one in who:
            self.ranks[one].owner.rewind_to(step, len(who))
            self.ranks[one].branch = "went back"
            self.ranks[one].life += 1

    @rule(who=some)
    def leave(self, who):
        for one in who:
            self.ranks[one].owner.leave_world()
            self.ranks[one].branch = "left"
            self.ranks[one].life += 1

    @rule(target=captured, one=st.integers(0, 2))
    def capture(self, one):
        return one, self.ranks[one].owner.capture(), self.ranks[one].life

    @rule(what=captured)
    def save_late(self, what):
        one, point, life = what
        rank = self.ranks[one]
        self.names += 1
        before = rank.owner.current
        try:
            found = agree([rank.owner], self.step + 100, [point], known=self.epoch, name=f"n{self.names}")
        except SaveFailedError:
            assert rank.life != life
            assert rank.owner.current == before
            return
        assert rank.life == life or found.incarnation.name != f"n{self.names}"
        if rank.life == life:
            rank.branch = ((one,), found.incarnation)
            self.epoch = found.incarnation.epoch

    @invariant()
    def what_an_owner_writes_for_is_what_it_was_last_told(self):
        for rank in self.ranks:
            expected = rank.branch[1] if isinstance(rank.branch, tuple) else None
            assert rank.owner.current == expected


TestRanks = pytest.mark.slow(Ranks.TestCase)


def test_save_that_ends_after_a_load_keeps_its_own_base():
    """Another thread loads between the capture and its seal."""
    with memory_node() as node, Checkpointer("tiered://late") as ckpt:
        ckpt.restore({"w": torch.zeros(3)})
        state = {"w": torch.ones(3)}
        ckpt.save(state, 20).wait()
        seal = ckpt.session.seal

        def late(*args, **named):
            ckpt.session.loads.rewind_to(7)
            return seal(*args, **named)

        ckpt.session.seal = late
        ckpt.save(state, 21).wait()
        ckpt.session.seal = seal
        bases = {fact.key.version: decode_meta(fact.meta).base for fact in node.store.list_shards("late")}
        assert bases == {20: -1, 21: -1}
        ckpt.save(state, 8).wait()
        assert {decode_meta(f.meta).base for f in node.store.list_shards("late") if f.key.version == 8} == {7}
