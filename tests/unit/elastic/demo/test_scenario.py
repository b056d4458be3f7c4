"""The demo's comparison: the loss of each step in the last world that computed it."""

from __future__ import annotations

import json

import pytest

from elastic.demo import scenario as demo
from elastic.demo.scenario import DemoFailedError, ElasticDemo, losses_by_step, read_demo_events


def step(number: int, loss: str, epoch: int = 0) -> dict[str, object]:
    return {"step": number, "loss": loss, "epoch": epoch}


def test_repeated_step_uses_the_loss_of_the_later_world():
    told = [step(0, "a"), step(1, "b"), step(1, "c", epoch=1), step(2, "d", epoch=1)]
    assert losses_by_step(reversed(told)) == {0: "a", 1: "c", 2: "d"}


def test_disagreeing_ranks_of_one_world_are_an_error():
    with pytest.raises(DemoFailedError, match="step 1"):
        losses_by_step([step(1, "a"), step(1, "b")])


def test_the_line_a_process_died_in_is_left_out(tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps(step(0, "a")) + "\n" + '{"step": 1, "lo')
    assert list(read_demo_events(tmp_path)) == [step(0, "a")]


def test_a_long_wait_prints_its_progress(tmp_path, monkeypatch):
    printed = []
    story = ElasticDemo(tmp_path, tmp_path, {}, printed.append)
    told = tmp_path / "events/1.jsonl"
    results = iter([0, 0, 1])
    monkeypatch.setattr(demo, "PROGRESS_S", -1.0)
    told.write_text(json.dumps({"event": "step", **step(7, "a")}) + "\n")
    assert story._until(lambda: next(results), "step 9", "kill a rank") == 1
    assert len(printed) == 2
    assert all("waiting for step 9; the newest step is 7" in line for line in printed)


def test_a_wait_beyond_the_limit_names_the_act_and_the_event(tmp_path):
    story = ElasticDemo(tmp_path, tmp_path, {}, print)
    story.limit_s = 0.0
    with pytest.raises(DemoFailedError, match="kill a rank: waited 0 s for step 9"):
        story._until(lambda: None, "step 9", "kill a rank")
