"""Pods that cannot run, and the job among the examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.hyperpod.job_resource import parse_job_resource
from integration.hyperpod.operator import sim_pods
from integration.hyperpod.operator.decision import DesiredPods
from integration.hyperpod.operator.sim_pods import LocalPods
from tieredckpt.bounded_yaml import load_yaml

JOB = Path(__file__).parents[5] / "examples" / "hyperpod_job.yaml"


class Clock:
    now = 1_000_000.0
    back_s = 0.0
    """So far the one on the wall has been set back."""

    def time(self):
        return self.now - self.back_s

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr(sim_pods, "time", one)
    return one


def started(tmp_path, clock, command, seconds, *, set_back=False):
    """Return the number of pods that ended on one node and the message of the last one."""
    spec = parse_job_resource(load_yaml(JOB.read_text()))
    (group,) = spec.groups
    group.template["spec"]["containers"][0] |= {"command": command, "args": []}
    pods, events = LocalPods(spec, 1, tmp_path), []
    end = clock.now + seconds
    while clock.now < end:
        pods.scale_to(DesiredPods({group.name: 1}), {})
        for child in pods._children.values():
            child.wait()
        pods.endpoints({})
        events += pods.take_events()
        clock.now += 0.5
        if events and set_back:
            clock.back_s = 3600.0
    pods.close()
    return len(events), events[-1].message if events else ""


def test_example_job_parses():
    spec = parse_job_resource(load_yaml(JOB.read_text()))
    assert spec.name == "example"
    assert [group.name for group in spec.groups] == ["pods"]


def test_a_pod_that_cannot_run_is_tried_less_and_less_often(tmp_path, clock):
    tries, words = started(tmp_path, clock, ["/bin/sh", "-c", "echo No module named uvicorn; exit 1"], 150.0)
    assert 4 <= tries <= 8
    assert "No module named uvicorn" in words
    assert "has another one in" in words


def test_killed_pod_is_replaced_without_backoff(tmp_path, clock):
    tries, _ = started(tmp_path, clock, ["/bin/sh", "-c", "kill -9 $$"], 20.0)
    assert tries >= 18


def test_clock_set_back_delays_no_pod(tmp_path, clock):
    tries, _ = started(tmp_path, clock, ["/bin/sh", "-c", "kill -9 $$"], 20.0, set_back=True)
    assert tries >= 18
