"""The shipped rules, by the agent's own matcher, over lines that our code prints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

import integration.hyperpod
from elastic.control.control_plane import RankAssignment
from elastic.workers.rank_timeline import RankTimeline
from integration.hyperpod.operator import parse_job_resource
from tieredckpt.checkpointer.progress_hook import SaveRestoreLog
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.event_log import event_log_from_environ
from tieredckpt.event_log import event_types as ev
from tieredckpt.event_log.log_writer import NullEventLog, StdoutEventLog, stdout_line

RULES = {
    rule["name"]: rule
    for rule in yaml.safe_load((Path(integration.hyperpod.__file__).parent / "log_rules.yaml").read_text())
}


@pytest.fixture
def agents():
    return pytest.importorskip("hyperpod_elastic_agent.logagent.log_agent")


@pytest.fixture
def printed(capfd):
    """The output of a rank that enters a world, restores, trains, saves and receives a fault."""
    ledger = StdoutEventLog(NullEventLog())
    record = RankTimeline(ledger, {"ELASTIC_NODE": "n0"})
    record.waiting_began()
    record.assigned(RankAssignment(1, 0, 1, 0, 1, 0, 1, "nowhere:1"))
    record.groups_ready()
    with SaveRestoreLog(ledger).record_restore() as told:
        told.step = 11
    for step in (12, 13):
        record.step_began(step)
        record.step_metrics(2.5, None, None)
        record.step_ended(step)
    ledger.write(ev.SaveEvent(0, 13, SaveState.STAGED.value, time.time(), 0.25))
    record.fault_detected()
    record.ended("job failed", "JobFailedError: 3 restarts\nwithin a minute")
    return capfd.readouterr().out.splitlines(keepends=True)


def test_each_event_is_a_line_of_its_own(printed):
    words = [text.split("seconds=")[0].split("epoch=")[0].strip() for text in printed]
    assert words == [
        "tieredckpt restore step=11 mode=snapshot",
        "tieredckpt first-step",
        "tieredckpt step=12",
        "tieredckpt step=13",
        "tieredckpt save step=13 state=staged blocked_",
        "tieredckpt broken",
        "tieredckpt ended how=job-failed JobFailedError: 3 restarts within a minute",
    ]
    assert all(text.endswith("\n") for text in printed)
    assert "loss=2.5" in printed[2]


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_knows_its_line_and_no_other(name, agents, printed):
    rule = agents.LogEvaluator(RULES[name])
    of = {"FirstStep": "first-step", "StepHang": "step=12", "StepSlow": "step=12", "SaveSlow": "save"}[name]
    for text in printed:
        matches = rule.log_pattern.match(text) is not None
        assert matches == (f"tieredckpt {of.partition('=')[0]}" in text), text
        assert not rule.log_pattern.match(f"[0] {text}"), "lines are known from their beginning"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("StepSlow", stdout_line(ev.StepEvent(1, 0, 12, 0.0, 61.0, 2.5))),
        ("SaveSlow", stdout_line(ev.SaveEvent(0, 12, "staged", 0.0, 10.5))),
    ],
)
def test_persistent_slowness_is_reported(name, text, agents):
    rule = agents.LogEvaluator(RULES[name])
    states = [rule.evaluate(f"{text}\n")[0] for _ in range(RULES[name]["metricEvaluationDataPoints"])]
    assert states[-1] is agents.LogState.SLOW
    assert set(states[:-1]) == {agents.LogState.HEALTHY}
    quick = text.replace("=61.", "=1.").replace("=10.5", "=0.5")
    assert rule.evaluate(f"{quick}\n")[0] is agents.LogState.HEALTHY


def test_hang_is_detected_only_after_the_first_step(agents, monkeypatch):
    rule = agents.LogEvaluator(RULES["StepHang"])
    now = time.time()
    monkeypatch.setattr(agents.time, "time", lambda: now + 1e6)
    assert rule.evaluate("something else\n")[0] is agents.LogState.WAITING, "another node's rule has no steps to see"
    assert rule.evaluate(f"{stdout_line(ev.StepEvent(1, 0, 12, 0.0, 1.0))}\n")[0] is agents.LogState.HEALTHY
    monkeypatch.setattr(agents.time, "time", lambda: now + 1e6 + 601)
    assert rule.evaluate(None)[0] is agents.LogState.HANGING


def test_missing_first_step_is_a_hang(agents, monkeypatch):
    rule, other = agents.LogEvaluator(RULES["FirstStep"]), agents.LogEvaluator(RULES["FirstStep"])
    now = time.time()
    assert (
        rule.evaluate(f"{stdout_line(ev.StageEvent(1, 0, ev.STAGE_FIRST_STEP, 0.0, 1.0))}\n")[0]
        is agents.LogState.HEALTHY
    )
    monkeypatch.setattr(agents.time, "time", lambda: now + 3601)
    assert other.evaluate(None)[0] is agents.LogState.HANGING
    assert rule.evaluate(None)[0] is agents.LogState.HEALTHY


def test_rules_match_the_aws_model_and_the_job_parser(agents):
    models = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")
    for rule in RULES.values():
        models.LogMonitoringConfiguration.model_validate(rule, by_alias=False, by_name=True)
    job = {
        "kind": "HyperPodPyTorchJob",
        "spec": {
            "replicaSpecs": [{"name": "pods", "replicas": 1}],
            "runPolicy": {"logMonitoringConfiguration": list(RULES.values())},
        },
    }
    assert len(parse_job_resource(job).log_rules) == len(RULES)


def test_only_local_rank_zero_prints_events_when_enabled():
    assert isinstance(event_log_from_environ({"TIEREDCKPT_STDOUT_EVENTS": "1", "LOCAL_RANK": "0"}), StdoutEventLog)
    assert not isinstance(event_log_from_environ({"TIEREDCKPT_STDOUT_EVENTS": "1", "LOCAL_RANK": "1"}), StdoutEventLog)
    assert not isinstance(event_log_from_environ({"LOCAL_RANK": "0"}), StdoutEventLog)


def test_stdout_events_switch_is_a_known_setting():
    from tieredckpt.settings import load_settings

    load_settings({"TIEREDCKPT_STDOUT_EVENTS": "1"})
