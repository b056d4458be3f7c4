"""What the demo compares: the loss of each step as the world that did it last found it."""

from __future__ import annotations

import json

import pytest

from elastic.demo.story import DemoFailedError, all_told, losses_of


def step(number: int, loss: str, epoch: int = 0) -> dict[str, object]:
    return {"step": number, "loss": loss, "epoch": epoch}


def test_a_step_done_again_counts_as_the_later_world_found_it():
    told = [step(0, "a"), step(1, "b"), step(1, "c", epoch=1), step(2, "d", epoch=1)]
    assert losses_of(reversed(told)) == {0: "a", 1: "c", 2: "d"}


def test_ranks_of_one_world_that_do_not_agree_are_no_result():
    with pytest.raises(DemoFailedError, match="step 1"):
        losses_of([step(1, "a"), step(1, "b")])


def test_the_line_a_process_died_in_is_left_out(tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps(step(0, "a")) + "\n" + '{"step": 1, "lo')
    assert list(all_told(tmp_path)) == [step(0, "a")]
