"""The driver of random faults, with one small seed; `make nightly` runs thousands."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tests.faults.__main__ import main
from tests.faults.figures import Record, SeedLine, summary
from tests.faults.job import CLOCK
from tests.faults.judge import AppliedFault, Violation
from tests.faults.schedule import FaultKind, JobShape
from tests.faults.seed import FaultTiming, SeedOutcome

SEED = "27272"
"""A rank killed just after sealed memory was damaged, with a durable tier."""


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_paused_node_and_two_killed_coordinators_break_no_rule(tmp_path, capsys):
    words = ["--per-seed", "2", "--steps", "250", "--out", str(tmp_path), "--patience", "200"]
    assert main(["--seed", "2220", *words]) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert "coordinator killed twice" in output
    assert "node paused" in output


@pytest.mark.e2e
@pytest.mark.timeout(280)
def test_driver_finds_no_violation_with_a_single_seed(tmp_path, capsys):
    words = ["--per-seed", "2", "--steps", "250", "--out", str(tmp_path), "--patience", "120"]
    assert main(["--seed", SEED, *words]) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    assert "2 faults in 1 seeds, 0 more without a target, 0 seeds with violations" in output, output
    assert "rank killed" in output
    assert "rendezvous" in output, "no stage of a recovery was found in the event log"


def test_shifted_clock_applies_to_every_interpreter(tmp_path):
    (tmp_path / "clock").write_text("-3600")
    code = "import time; print(time.time() - time.clock_gettime(time.CLOCK_REALTIME))"
    environ = {"PYTHONPATH": str(CLOCK), "FAULTS_CLOCK": str(tmp_path / "clock")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True, timeout=200)
    assert float(done.stdout) == pytest.approx(-3600, abs=1)


SHAPE = JobShape(2, 0, 1, 0, "ddp", 1)


def outcome(seed, *seconds, **changed):
    took = tuple(
        FaultTiming(AppliedFault(number, FaultKind.RANK_KILLED, 1.0, 1.0, "n0"), one, {"groups": 0.5})
        for number, one in enumerate(seconds)
    )
    return msgspec.structs.replace(SeedOutcome(seed, SHAPE, took, 0, (), 9.0, 1.5), **changed)


def test_record_is_resumed(tmp_path):
    record = Record(tmp_path / "faults.jsonl")
    assert record.read() == []
    many = [outcome(3, 1.0, None), outcome(4), outcome(3, 2.0, hosts=True)]
    for one in many:
        record.add(one)
    assert record.read() == many
    lines = (tmp_path / "faults.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 6, "one for each fault and one for each seed"
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    assert Record(cut).read() == many[:2], "a seed without its last line is run again"
    assert isinstance(msgspec.json.decode(lines[2], type=SeedLine), SeedLine)


def test_summary_has_figures_by_kind_and_stage_and_every_violation():
    wrong = Violation("bits", "loss of step 7")
    text = summary([outcome(1, *(float(n) for n in range(1, 101))), outcome(2, None, violations=(wrong,), missed=2)])
    assert "101 faults in 2 seeds, 2 more without a target, 1 seeds with violations" in text
    (kind,) = (line.split() for line in text.splitlines() if line.startswith("rank killed"))
    assert kind == ["rank", "killed", "100", "50.0", "90.0", "99.0", "100.0"]
    assert any(line.split() == ["groups", "101", *["0.5"] * 4] for line in text.splitlines())
    assert "VIOLATION, seed 2: bits: loss of step 7" in text


def test_driver_without_seeds_has_an_empty_summary():
    assert "0 faults in 0 seeds" in summary([])
