"""The step that a load takes: the choice among all versions, and all callers that report it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from elastic.supervisor import memory_tier
from elastic.workers import shared_agent
from peerstore.shard_records import ShardKey, UnrecognizedSlot, VersionId
from tests.support.cluster_views import cluster_node, cluster_status
from tests.support.example_counts import examples
from tieredckpt.agent.stopped_step import StoppedStep, report_last_stop
from tieredckpt.checkpointer import hydrate_from_survivors
from tieredckpt.checkpointer.progress_hook import newest_complete_step
from tieredckpt.cli import status as status_command
from tieredckpt.cli.tier_client import TierClient
from tieredckpt.dcp import tiered_reader
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
    FormatVersionError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.fsspec_view import step_files
from tieredckpt.location import parse_location
from tieredckpt.resolve_step import Tier
from tieredckpt.session.session import Session
from tieredckpt.settings import Settings
from tieredckpt.step_inventory import StepInventory, StepStatus
from tieredckpt.whatif.node_loss import LossAnalysis

ONE, TWO = VersionId(1, 1, 0, "a"), VersionId(1, 2, 0, "a")
NEAR = StepStatus(ONE, 8, {0: (Tier.MEMORY,), 7: (Tier.MEMORY,)})
HERE = (Tier.MEMORY,)
AVOID_AFTER = Settings().memory.avoid_after_crashed_loads


@st.composite
def histories(draw) -> StepInventory:
    """Draw the versions of up to three incarnations, each with a base step, as one node may see them."""
    bases = draw(st.lists(st.none() | st.integers(-1, 6), min_size=3, max_size=3))
    which = draw(st.sets(st.tuples(st.integers(1, 3), st.integers(0, 8)), max_size=8))
    views = []
    for epoch, step in sorted(which):
        durable = draw(st.booleans())
        whole = (0, 1) if durable else draw(st.sampled_from([(0, 1), (0,), (1,)]))
        found = {part: HERE for part in whole if not durable or draw(st.booleans())}
        crashed = draw(st.sampled_from([0, 0, 0, AVOID_AFTER - 1, AVOID_AFTER]))
        quarantined = draw(st.sampled_from(["", "", "", "NaN"]))
        views.append(
            StepStatus(
                VersionId(epoch, step, 0, f"i{epoch}"), 2, found, bases[epoch - 1], durable=durable,
                crashed_loads=crashed, quarantined=quarantined,
            )
        )  # fmt: skip
    unreachable = draw(st.sampled_from([{}, {}, {Tier.PEER: "n2: no answer"}, {Tier.DURABLE: "away"}]))
    plain = tuple(draw(st.sets(st.integers(0, 10), max_size=2)))
    complete = [view.version_id for view in views if view.candidate.is_complete]
    return StepInventory(tuple(views), unreachable, plain, once_complete=max(complete, default=None))


class Agent:
    """The part of a node agent that lists one fixed inventory."""

    def __init__(self, inventory: StepInventory) -> None:
        self.inventory = inventory
        stopped = msgspec.msgpack.encode(StoppedStep(1, 1))
        status = SimpleNamespace(jobs=[SimpleNamespace(job="job", versions=1, clients=0)])
        self.store = SimpleNamespace(blobs=SimpleNamespace(get=lambda *_: stopped), status=lambda: status)
        self.steps = SimpleNamespace(names=lambda *_: SimpleNamespace(names=(), objects=()))

    def list_steps(self, *_: object, **__: object) -> StepInventory:
        return self.inventory

    def drain_status(self, _: str) -> list:
        return []

    def close(self) -> None: ...


def session_with(inventory: StepInventory) -> SimpleNamespace:
    one = SimpleNamespace(settings=Settings(), job="job", sealed_step=-1, agent=Agent(inventory), _inventory=inventory)
    one.incarnation = SimpleNamespace(newest_step=None)
    one.commits = SimpleNamespace(newest_complete_step=lambda: -1)
    one.list_steps = one.agent.list_steps
    one.choose_step = lambda *some: Session.choose_step(one, *some)
    return one


def step_or_none(call) -> int:
    try:
        return call()
    except TieredCheckpointError:
        return -1


def load(session: SimpleNamespace) -> int:
    with mock.patch.object(tiered_reader, "open_session", return_value=session):
        return step_or_none(lambda: TieredReader("job", settings=session.settings).check_choice().step)


def listed_files(session: SimpleNamespace) -> list[int]:
    with mock.patch.object(step_files, "open_session", return_value=session):
        return step_files.JobStepFiles("job").steps()


def required_by_survivors(session: SimpleNamespace) -> int:
    names, _ = hydrate_from_survivors._required_names(session)
    return -1 if names is None else names.step


def resumed_by_elastic_run(session: SimpleNamespace) -> int:
    with (
        mock.patch.object(memory_tier, "silence_of_agent", return_value=""),
        mock.patch.object(memory_tier, "NodeAgentClient", return_value=session.agent),
    ):
        return memory_tier._newest_steps(session.settings, 0).get("job", (-1, False))[0]


def in_shared_agent(session: SimpleNamespace) -> int:
    with mock.patch.object(shared_agent, "list_agent_steps", return_value=session.agent.inventory):
        found = shared_agent.SharedAgentSteps("/nowhere").expected_step("job")
    return -1 if found is None else found.step


def in_status(session: SimpleNamespace) -> int:
    state = SimpleNamespace(
        job="job", epoch=1, clients=0, versions=1, newest_replicated=None, expires_in_s=None
    )  # fmt: skip
    newest = status_command._job_json(session.agent, state, AVOID_AFTER)["newest_complete"]
    return -1 if newest is None else newest


def inspected(session: SimpleNamespace) -> int:
    client = TierClient(session.settings, None, "not asked", SimpleNamespace())
    return client.choose_attempt(parse_location("job"), session.agent.inventory).version_id.version


def refused_saves(session: SimpleNamespace) -> int:
    """Return the step behind which a run that has restored nothing may not save."""
    behind = [-1]
    for step in range(11):
        try:
            Session.check_step_order(session, step)
        except UsageError:
            behind.append(step + 1)
    return max(behind)


def without_loss(inventory: StepInventory) -> int:
    nodes = cluster_status(
        cluster_node("n0", holds={view.version_id: sorted(view.found) for view in inventory.views if view.found},
                     bases={view.version_id.epoch: view.base for view in inventory.views})
    )  # fmt: skip
    step = LossAnalysis(nodes, inventory, lambda _, parts: len(parts) == 2, worn_after=AVOID_AFTER).resumable_step
    return -1 if step is None else step


@hypothesis.given(histories())
@hypothesis.settings(max_examples=examples(400), deadline=None)
def test_all_callers_choose_the_step_of_a_load(inventory: StepInventory) -> None:
    session, choice = session_with(inventory), inventory.choose(avoid_after=AVOID_AFTER)
    step, tiered = load(session), [one.version_id.version for one in choice.loadable]
    assert choice.step == step
    assert newest_complete_step(session, ask=True, fresh=True) == step
    assert resumed_by_elastic_run(session) == step
    assert in_shared_agent(session) == step
    assert in_status(session) == step
    assert without_loss(inventory) == step
    assert refused_saves(session) == (newest if (newest := max([step, *tiered])) > 0 else -1)
    assert listed_files(session) == sorted({*tiered, *inventory.plain})
    assert required_by_survivors(session) == next(iter(tiered), -1)
    reported = report_last_stop(session.agent, "job", avoid_after=AVOID_AFTER).newest_complete
    if choice.plain is not None:
        assert reported is None
        with pytest.raises(UsageError, match=f"step of tiered://job is {step}, a plain checkpoint"):
            inspected(session)
    elif step < 0:
        assert reported is None
        with pytest.raises(type(choice.error(parse_location("job")))):
            inspected(session)
    else:
        assert reported.step == step
        assert inspected(session) == step


def test_memory_and_durable_views_of_a_step_are_merged():
    far = StepStatus(ONE, 0, {}, durable=True, quarantined="bad")
    seen = StepInventory((NEAR,)).merge(
        StepInventory((far, StepStatus(TWO, 0, {}, durable=True)), {Tier.MEMORY: "no agent"}, (5,))
    )
    assert [view.version_id for view in seen.views] == [ONE, TWO]
    assert seen.views[0].found == NEAR.found
    assert seen.views[0].durable
    assert seen.views[0].quarantined == "bad"
    assert seen.plain == (5,)
    assert seen.unreachable == {Tier.MEMORY: "no agent"}


@pytest.mark.parametrize(
    ("unreachable", "kind"),
    [
        ({}, CheckpointNotFoundError),
        ({Tier.MEMORY: "no agent"}, CheckpointNotFoundError),
        ({Tier.DURABLE: "away"}, TierUnavailableError),
        ({Tier.PEER: "n2: no answer"}, TierUnavailableError),
        ({Tier.MEMORY: "no agent", Tier.DURABLE: "away"}, TierUnavailableError),
    ],
)
def test_absent_only_where_the_store_answered(unreachable, kind):
    error = StepInventory((), unreachable).choose(3, avoid_after=0).error(parse_location("job/step-3"))
    assert type(error) is kind
    assert "tiered://job/step-3" in str(error)
    assert all(text in str(error) for text in unreachable.values())


TORN = StepStatus(TWO, 2, {0: HERE})
DAMAGED = StepStatus(TWO, 2, {0: HERE}, damaged={1: "a flipped bit"})
NEWER_FORMAT = UnrecognizedSlot("s", 1, "format 9", "job", ShardKey("job", 5, 1, "a", 0, 0), 9, 2)
NO_FORMAT = UnrecognizedSlot("s", 1, "Input/output error", "job", ShardKey("job", 5, 1, "a", 0, 0))


@pytest.mark.parametrize(
    ("inventory", "kind", "words"),
    [
        (StepInventory((TORN,)), CheckpointTornError, "step 2 was started and never completed"),
        (StepInventory((TORN,), once_complete=TWO), CheckpointLostError, "lack parts of each"),
        (StepInventory((), once_complete=TWO), CheckpointLostError, "missing all parts"),
        (StepInventory((DAMAGED,)), CheckpointDamagedError, "none of them can be used"),
        (StepInventory((), torn=(TWO,)), CheckpointTornError, "a rank aborted its part"),
        (StepInventory((), unrecognized=(NEWER_FORMAT,)), FormatVersionError, "step 5 of job 'job'.*Install a newer"),
        (StepInventory((), unrecognized=(NO_FORMAT,)), TierUnavailableError, "step 5 of job 'job'.*Input/output"),
    ],
)
def test_each_reason_has_an_error_of_its_own(inventory, kind, words):
    choice = inventory.choose(avoid_after=0)
    assert choice.step == -1
    with pytest.raises(kind, match=words):
        raise choice.error(parse_location("job"))


def test_older_unreadable_slots_are_ignored():
    whole = StepStatus(VersionId(1, 7, 0, "a"), 1, {0: HERE})
    assert StepInventory((whole,), unrecognized=(NEWER_FORMAT,)).choose(avoid_after=0).unreadable is None
    assert StepInventory((NEAR,), unrecognized=(NEWER_FORMAT,)).choose(avoid_after=0).unreadable is not None


def test_failed_steps_are_not_taken_again():
    steps = StepInventory(tuple(StepStatus(VersionId(1, s, 0, "a"), 1, {0: HERE}) for s in (1, 2)), plain=(2, 4))
    assert steps.choose(avoid_after=0).plain == 4
    assert steps.choose(avoid_after=0, failed={4}).version_id == TWO
    assert steps.choose(avoid_after=0, failed={4, TWO}).plain == 2
    assert steps.choose(avoid_after=0, failed={4, 2, TWO}).version_id == ONE
    none = steps.choose(avoid_after=0, failed={4, 2, ONE, TWO})
    error = none.error(parse_location("job"), failed=["step 4: torn"], advice="")
    assert str(error) == "no step of tiered://job can be used: step 4: torn"


def test_epoch_of_a_step_is_respected():
    steps = StepInventory(tuple(StepStatus(VersionId(e, 3, 0, "a"), 1, {0: HERE}) for e in (1, 2)), plain=(3,))
    assert steps.choose(3, 1, avoid_after=0).version_id == VersionId(1, 3, 0, "a")
    missing = steps.choose(3, 7, avoid_after=0)
    assert "there are steps 3@1, 3@2" in str(missing.error(parse_location("job/step-3@7")))
    gone = msgspec.structs.replace(steps, once_complete=VersionId(2, 3, 0, "a"), views=())
    assert gone.choose(3, 1, avoid_after=0).resolution.lost == ()


def test_named_step_may_be_quarantined_only_for_an_inspection():
    bad = StepInventory((StepStatus(TWO, 1, {0: HERE}, quarantined="NaN"),))
    assert bad.choose(2, avoid_after=0).step == -1
    assert bad.choose(2, avoid_after=0, allow_quarantined=True).step == 2


@pytest.mark.parametrize(
    ("chosen_at", "lost_at", "known", "repeated_s"),
    [
        (3, 4.5, TWO, 1.5),
        (3, 3, TWO, 0),
        (3, None, TWO, float("inf")),
        (3, 2, TWO, float("inf")),
        (0, 4.5, TWO, float("inf")),
        (None, 4.5, TWO, float("inf")),
        (None, None, None, float("inf")),
        (3, None, ONE, 0),
        (3, None, None, 0),
    ],
    ids=[
        "both saved",
        "at once",
        "nothing of the newest found",
        "clocks differ",
        "unknown time",
        "no complete step",
        "nothing known",
        "chosen is the newest",
        "none was complete",
    ],
)
def test_repeated_work_is_the_time_between_two_saves(chosen_at, lost_at, known, repeated_s):
    views = []
    if chosen_at is not None:
        views.append(StepStatus(ONE, 1, {0: HERE}, saved_ns=int(chosen_at * 1e9)))
    if lost_at is not None:
        views.append(StepStatus(TWO, 2, {0: HERE}, saved_ns=int(lost_at * 1e9)))
    inventory = StepInventory(tuple(views), {Tier.PEER: "n2: no answer"}, once_complete=known)
    assert inventory.choose(avoid_after=0).repeated_s == repeated_s
