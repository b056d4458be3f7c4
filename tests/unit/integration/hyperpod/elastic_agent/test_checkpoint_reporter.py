"""Complete steps reported to the agent, and its answers, which decide where a job begins."""

from __future__ import annotations

import logging
import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from elastic.errors import ControlDeadlineError, ControlPlaneUnavailableError
from integration.hyperpod.elastic_agent.checkpoint_reporter import CheckpointReporter, expected_step_from_path
from integration.hyperpod.elastic_agent.environment import ResumeFrom
from peerstore.errors import UnavailableError
from peerstore.shard_records import VersionId
from tests.support.example_counts import examples
from tests.support.local_nodes import wait_until
from tieredckpt.checkpointer.progress_hook import (
    ExpectedStep,
    check_restored_step,
    gather_expected_step,
    newest_complete_step,
    newest_expected_step,
    notify_progress_hook,
    use_progress_hook,
)
from tieredckpt.errors import CheckpointNotFoundError, TierUnavailableError
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import LoadChoice, StepInventory, StepStatus


class Agent:
    """The agent's end of a channel: it records messages and sends a fixed answer."""

    def __init__(self, path: object = None, error: Exception | None = None) -> None:
        self.path, self.error = path, error
        self.heard: list[tuple[str, dict]] = []

    def connect(self) -> Agent:
        if self.error is not None and "no elastic agent" in str(self.error):
            raise self.error
        return self

    def send(self, kind: str, /, **fields: object) -> None:
        self.heard.append((kind, fields))

    def request(self, kind: str, /, timeout_s: float, **fields: object) -> dict:
        if self.error is not None:
            raise self.error
        return {"type": kind, "path": self.path}

    def flush(self, timeout_s: float) -> None: ...

    @property
    def steps(self) -> list[object]:
        return [fields["step"] for kind, fields in self.heard if kind == "ckpt_info_update"]


def whole(step: int, epoch: int = 1) -> StepStatus:
    return StepStatus(VersionId(epoch, step, 0, f"i{epoch}"), 1, {0: (Tier.MEMORY,)})


def torn(step: int) -> StepStatus:
    return StepStatus(VersionId(1, step, 0, "i1"), 2, {0: (Tier.MEMORY,)})


class Commits:
    """The part of a session that knows its newest complete step."""

    def __init__(self, committed: VersionId | None) -> None:
        self.committed = committed

    def newest_complete_step(self) -> int:
        return -1 if self.committed is None else self.committed.version


class Session:
    """The part of a session that a reporter reads."""

    def __init__(self, job: str = "job", *views: StepStatus, sealed: int = -1, committed: int | None = None) -> None:
        self.job, self.views, self.sealed_step = job, views, sealed
        self.commits = Commits(None if committed is None else VersionId(1, committed, 0, "i1"))
        self.surveys = 0
        self.away = False

    def choose_step(self, inventory: StepInventory) -> LoadChoice:
        return inventory.choose(avoid_after=0)

    def list_steps(self, *, fresh: bool = False) -> StepInventory:
        self.surveys += 1
        if self.away:
            raise UnavailableError("the node agent does not answer")
        return StepInventory(self.views)


@pytest.fixture
def made():
    accounts: list[CheckpointReporter] = []

    def make(agent: Agent, **options: object) -> CheckpointReporter:
        accounts.append(CheckpointReporter(agent.connect, **options))  # type: ignore[arg-type]
        return accounts[-1]

    yield make
    for one in accounts:
        one.close()


# -- what is reported -------------------------------------------------------------------------------------------------


def test_step_sealed_by_all_ranks_is_reported_once_with_its_address(made):
    agent = Agent()
    mine = made(agent)
    session = Session(sealed=7, committed=7)
    for _ in range(3):
        mine.on_sealed(session)
    wait_until(lambda: agent.steps)
    mine.flush()
    assert agent.heard == [
        ("ckpt_init", {"prefix": "tiered://job", "checkpoint_types": {"model_checkpoint": 1}}),
        ("ckpt_info_update", {"step": 7, "path": "tiered://job/step-7", "checkpoint_type": "model_checkpoint"}),
    ]


def test_single_node_queries_its_agent_for_the_complete_step(made):
    agent = Agent()
    mine = made(agent, alone=lambda: True)
    session = Session("job", whole(3), whole(5), torn(6), sealed=6)
    mine.on_sealed(session)
    wait_until(lambda: agent.steps == [5])
    session.views = (*session.views, whole(6, epoch=2))
    wait_until(lambda: agent.steps == [5, 6])  # it checks again while its own last step is incomplete


def test_unconfirmed_step_is_not_reported(made):
    agent = Agent()
    mine = made(agent)
    session = Session(sealed=7)
    mine.on_sealed(session)
    mine.flush()
    assert agent.steps == []
    session.away = True
    mine.flush()
    assert agent.steps == []


def test_silent_rank_neither_sends_nor_receives(made):
    agent = Agent("tiered://job/step-3")
    mine = made(agent, speaks=False)
    mine.on_sealed(Session(sealed=7, committed=7))
    mine.flush()
    assert mine.expected_step("job") is None
    assert agent.heard == []


def test_agent_serves_a_single_job(made):
    agent = Agent()
    mine = made(agent)
    assert mine.expected_step("job") is None
    assert mine.expected_step("another") is None
    mine.on_sealed(Session("another", sealed=7, committed=7))
    mine.flush()
    assert [kind for kind, _ in agent.heard] == ["ckpt_init"]


def test_older_step_after_a_rewind_is_reported(made):
    agent = Agent()
    mine = made(agent)
    mine.on_sealed(Session(sealed=7, committed=7))
    wait_until(lambda: agent.steps == [7])
    mine.on_sealed(Session(sealed=5, committed=5))
    wait_until(lambda: agent.steps == [7, 5])


# -- what was told ----------------------------------------------------------------------------------------------------


def test_the_operators_step_is_expected(made):
    found = made(Agent("tiered://job/step-240")).expected_step("job")
    assert (found.step, found.is_required) == (240, False)
    assert made(Agent("tiered://job/step-240"), how=ResumeFrom.OPERATOR).expected_step("job").is_required
    assert made(Agent(None)).expected_step("job") is None


@pytest.mark.parametrize("path", ["s3://b/step_240", "tiered://other/step-240", "tiered://job", 7, ["x"], "tiered://"])
def test_a_step_that_cannot_be_read_is_unknown_and_not_none(path):
    found = expected_step_from_path("job", path, ResumeFrom.NEWEST)
    assert found is not None
    assert found.step is None
    assert "is no step of this job" in found.source


@hypothesis.given(st.none() | st.text() | st.integers() | st.dictionaries(st.text(), st.text()))
@hypothesis.settings(max_examples=examples(60))
def test_any_agent_answer_is_parsed_or_unknown(path):
    found = expected_step_from_path("job", path, ResumeFrom.NEWEST)
    assert found is None or found.step is None or found.step >= 0
    assert (found is None) == (path is None or path == "")


@pytest.mark.parametrize(
    "error",
    [ControlDeadlineError("the agent said no ckpt_info_get"), ControlPlaneUnavailableError("no elastic agent answers")],
)
def test_unreachable_agent_means_an_unknown_step(made, error):
    mine = made(Agent(error=error))
    found = mine.expected_step("job")
    assert found.step is None
    with pytest.raises(TierUnavailableError, match="did not report the job's progress"):
        check_restored_step("job", found, -1)
    mine.on_sealed(Session(sealed=7, committed=7))  # the training does not end because of it
    mine.flush()


# -- where a job begins -----------------------------------------------------------------------------------------------


def test_a_job_that_was_somewhere_never_begins_from_nothing():
    with pytest.raises(CheckpointNotFoundError, match="would lose 241 steps"):
        check_restored_step("job", ExpectedStep(240, "the agent says 240"), -1)


def test_difference_between_tiers_and_operator_is_logged(caplog):
    caplog.set_level(logging.INFO)
    check_restored_step("job", ExpectedStep(240, "it says 240"), 240)
    check_restored_step("job", None, -1)
    assert not caplog.records
    check_restored_step("job", ExpectedStep(240, "it says 240"), 250)
    check_restored_step("job", ExpectedStep(240, "it says 240"), 200)
    check_restored_step("job", ExpectedStep(None, "it says what is no step"), 7)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert "resuming from step 250, which is newer and complete" in caplog.messages[0]
    assert "resuming from step 200, 40 steps are repeated" in caplog.messages[1]
    assert "resuming from step 7, the newest complete one" in caplog.messages[2]


def test_ranks_with_different_steps_agree_on_the_newest():
    some = [
        None,
        ExpectedStep(3, "three"),
        ExpectedStep(None, "something"),
        ExpectedStep(8, "eight"),
        ExpectedStep(8, "eight", True),
    ]
    assert newest_expected_step(some) == ExpectedStep(8, "eight", True)
    assert newest_expected_step(some[:3]) == ExpectedStep(3, "three")
    assert newest_expected_step([None, ExpectedStep(None, "something")]) == ExpectedStep(None, "something")
    assert newest_expected_step([None, None]) is None


def test_all_ranks_receive_the_step_of_one_rank(made):
    mine = made(Agent("tiered://job/step-4"))

    def from_all(text: str) -> list[str]:
        return ["null", text]

    assert gather_expected_step("job", from_all) is None
    with use_progress_hook(mine):
        assert gather_expected_step("job", from_all).step == 4
        notify_progress_hook(Session(sealed=5, committed=5))
    assert gather_expected_step("job", from_all) is None


def test_newest_complete_step_is_the_one_a_restore_loads():
    spoilt = StepStatus(VersionId(1, 9, 0, "i1"), 1, {0: (Tier.MEMORY,)}, quarantined="damaged")
    session = Session("job", whole(3), torn(8), spoilt, sealed=9)
    assert newest_complete_step(session, ask=False) == -1  # type: ignore[arg-type]
    assert newest_complete_step(session, ask=True) == 3  # type: ignore[arg-type]
    session.commits.committed = VersionId(1, 9, 0, "i1")
    session.surveys = 0
    assert newest_complete_step(session, ask=True) == 9  # type: ignore[arg-type]
    assert session.surveys == 0
    assert newest_complete_step(session, ask=True, fresh=True) == 9  # type: ignore[arg-type]
    assert session.surveys == 1


def test_closed_reporter_sends_nothing():
    agent = Agent()
    mine = CheckpointReporter(agent.connect)  # type: ignore[arg-type]
    mine.on_sealed(Session(sealed=7, committed=7))
    wait_until(lambda: agent.steps)
    mine.close()
    mine.on_sealed(Session(sealed=8, committed=8))
    assert agent.steps == [7]
    assert not [one for one in threading.enumerate() if one.name == "hyperpod-progress"]
