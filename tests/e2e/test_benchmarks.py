"""The benchmarks run, compare what they measured, and say so when it is wrong. How fast anything is, is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main

pytestmark = pytest.mark.e2e

_ROOT = Path(__file__).parents[2]
_COMPARED = {"P1": 3, "P2": 5, "P3": 7, "P8": 1, "P11": 8}


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=_ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=200)


def left_behind() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("tieredckpt-bench-*")}


@pytest.fixture(scope="module")
def raw_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of everything, as small as it goes."""
    before = left_behind()
    out = tmp_path_factory.mktemp("bench") / "raw.json"
    ran = bench("--size", "8MiB", "--rounds", 1, "--ranks", 1, "--threads", 1, "--out", out)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "FAILED" not in ran.stdout
    assert left_behind() <= before
    return out


@pytest.fixture(scope="module")
def groups(raw_file: Path) -> list[dict[str, Any]]:
    return json.loads(raw_file.read_text())["groups"]


def test_every_subject_and_state_is_there(groups: list[dict[str, Any]]) -> None:
    found = {(group["subject"], group["state"]) for group in groups}
    for subject in ("P1", "P2", "P3"):
        assert {(subject, "A"), (subject, "B"), (subject, "C")} <= found
    assert {"P7", "P8", "P10", "P11"} <= {subject for subject, _ in found}


def test_whatever_moves_bytes_was_compared(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        for row in group["rows"]:
            if row.get("compared"):
                assert row["equal"] is True, (group["subject"], group["state"], row)
        if group["subject"] in _COMPARED:
            assert sum(bool(row["equal"]) for row in group["rows"]) == _COMPARED[group["subject"]], group


def test_an_opponent_without_samples_says_why(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        for row in group["rows"]:
            assert row["samples"] or row["note"], row


def test_the_table_has_every_row_and_target(raw_file: Path, groups: list[dict[str, Any]], tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    assert main(["table", str(raw_file), "--to", str(page)]) == 0
    text = page.read_text()
    for group in groups:
        assert f"## {group['subject']}: " in text
        for row in group["rows"]:
            assert f"| {row['name']} |" in text
    assert "less than async_save" in text


def test_a_wrong_byte_is_a_failed_row_and_two_ranks_plan_without_a_collective(tmp_path: Path) -> None:
    spoilt = {"P1": "Checkpointer.save", "P2": "dcp.save(FileSystemWriter)", "P3": "dcp.load(TieredReader)"}
    out = tmp_path / "raw.json"
    ran = bench(
        *("--only", "P1,P2,P3,P8", "--states", "C", "--ranks", 2, "--threads", 1, "--rounds", 1, "--size", "4MiB"),
        *(argument for name in spoilt.values() for argument in ("--spoil", name)),
        *("--out", out),
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    groups = {group["subject"]: group for group in json.loads(out.read_text())["groups"]}
    for subject, name in spoilt.items():
        assert [row["name"] for row in groups[subject]["rows"] if row["equal"] is False] == [name]
        assert f"FAILED: {subject} state C, 2 ranks, 1 thread each: {name}" in ran.stdout
    ours, plain, _ = groups["P8"]["rows"]
    assert ours["equal"] is True
    assert ours["collectives"] == [0]
    assert plain["collectives"][0] > 0  # the counter counts


def test_an_unknown_subject_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "P99"])
    assert "P99: known are P1" in capsys.readouterr().err
