"""The benchmark of prepared batches compares its measurements. Speed is not tested."""

import dataclasses

import pytest

from benchmarks.prepared import Run, rows, same, trainer

SMALL = Run("loader", count=3, step_s=0, batch_size=2, length=64, ahead=2)


@pytest.fixture
def found(tmp_path):
    ours = dataclasses.replace(SMALL, kind="cache", directory=str(tmp_path / "prepared"))
    return {"loader": trainer(SMALL), "from nothing": trainer(ours), "there": trainer(ours)}


def test_all_hand_out_the_same_batches(found):
    assert same(found)
    assert {len(one["waits"]) for one in found.values()} == {3}
    assert len(set(found["there"]["digests"])) == 3
    found["there"]["digests"][1] = "another"
    assert not same(found)


def test_resumed_trainer_reads_the_remaining_batches(found):
    rest = trainer(dataclasses.replace(SMALL, first=1, count=2))
    assert rest["digests"] == found["loader"]["digests"][1:]


def test_table_shows_times_relative_to_ours(found):
    found["cache, compared with its checksum"] = found.pop("there")
    lines = list(rows({"scenes": {"ready": [found]}}))
    assert [line[2] for line in lines] == list(found)
    assert lines[-1][-1] == "1.00"
