"""The benchmarks run, compare their results, and report wrong bytes, without a check of speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hydrate, replicate, reshard
from benchmarks.__main__ import main
from benchmarks.peer_memory import row_names
from peerstore.daemon_process import process_start_time

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NODE_THAT_READS = row_names("hydrates")[1][0]
_ROOT = Path(__file__).parents[2]
_COMPARED = {"P1": 3, "P2": 5, "P3": 7, "P4": 5, "P5": 6, "P6": 2, "P8": 1, "P11": 8}
_ON_OTHER_NODES = 4
"""Number of P11's rows that concern several nodes."""
_ON_NODES = {"P4": replicate.OURS, "P5": hydrate.OURS, "P6": reshard.OURS, "P11": NODE_THAT_READS}
_OPPONENTS = {"torchft": 3, "nixl_cu12": 2}
"""Optional packages that P5 compares with, and their numbers of rows."""


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=_ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=800)


def left_behind() -> set[str]:
    """Return folders whose creators have ended; other benchmarks may be running."""
    names = {path.name for path in Path("/dev/shm").glob("tieredckpt-bench-*-*")}
    return {name for name in names if process_start_time(int(name.split("-")[2])) < 0}


_PARTS = {"one node": ("P1,P2,P3,P7,P8,P10,P11", "A,B,C"), "several nodes": ("P4,P5,P6", "B,C,U")}
"""Nightly parts; the tests that spoil a byte cover a small part of each in every run."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.nightly) for name in _PARTS])
def part(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def raw_file(part: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all parts of one group of benchmarks with minimal sizes, and return the raw results."""
    before = left_behind()
    out = tmp_path_factory.mktemp("bench") / "raw.json"
    only, states = _PARTS[part]
    small = ("--size", "8MiB", "--rounds", 1, "--ranks", 1, "--threads", 1, "--worlds", "2-3")
    ran = bench("--only", only, "--states", states, *small, "--out", out)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "FAILED" not in ran.stdout
    assert left_behind() <= before
    return out


@pytest.fixture(scope="module")
def groups(raw_file: Path) -> list[dict[str, Any]]:
    return json.loads(raw_file.read_text())["groups"]


def test_benchmark_covers_every_subject_and_state(part: str, groups: list[dict[str, Any]]) -> None:
    found = {(group["subject"], group["state"]) for group in groups}
    if part == "several nodes":
        assert found == {("P4", "B"), ("P4", "C"), ("P5", "B"), ("P5", "C"), ("P6", "B"), ("P6", "U")}
        return
    for subject in ("P1", "P2", "P3"):
        assert {(subject, "A"), (subject, "B"), (subject, "C")} <= found
    assert {"P7", "P8", "P10", "P11"} <= {subject for subject, _ in found}


def test_every_byte_mover_was_verified(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        for row in group["rows"]:
            if row.get("compared"):
                assert row["equal"] is True, (group["subject"], group["state"], row)
        if group["subject"] in _COMPARED:
            expected = _COMPARED[group["subject"]]
            if group["subject"] == "P11" and group["title"]:
                expected = _ON_OTHER_NODES
            if group["subject"] == "P5":
                expected += sum(count for name, count in _OPPONENTS.items() if find_spec(name) is not None)
            assert sum(bool(row["equal"]) for row in group["rows"]) == expected, group


def test_bytes_of_several_nodes_are_counted(part: str, groups: list[dict[str, Any]]) -> None:
    if part == "one node":
        return
    counted = {
        (group["subject"], row["name"]): row["samples"][0]
        for group in groups
        for row in group["rows"]
        if row["unit"] == "B" and row["samples"]
    }
    changed, sent = counted["P4", replicate.DELTA_CHANGED], counted["P4", replicate.DELTA_SENT]
    assert 0 < sent <= 1.05 * changed
    needed, moved = counted["P6", reshard.NEEDED], counted["P6", reshard.MOVED]
    assert needed <= moved <= 1.05 * needed


def test_competitor_without_samples_has_a_reason(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        for row in group["rows"]:
            assert row["samples"] or row["note"], row


def test_the_table_has_every_row_and_target(
    part: str, raw_file: Path, groups: list[dict[str, Any]], tmp_path: Path
) -> None:
    page = tmp_path / "benchmarks.md"
    assert main(["table", str(raw_file), "--to", str(page)]) == 0
    text = page.read_text()
    for group in groups:
        assert f"## {group['subject']}: " in text
        for row in group["rows"]:
            assert f"| {row['name']} |" in text
    assert ("less than async_save" in text) == (part == "one node")


@pytest.mark.nightly
def test_wrong_byte_fails_its_row_and_ranks_plan_without_collective(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "subjects", ["P5", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("P4,P6", "P11"))]
)
def test_a_wrong_byte_from_another_node_is_a_failed_row(tmp_path: Path, subjects: str) -> None:
    spoilt = {subject: _ON_NODES[subject] for subject in subjects.split(",")}
    out = tmp_path / "raw.json"
    ran = bench(
        *("--only", subjects, "--states", "C,U", "--ranks", 1, "--worlds", "3-2"),
        *("--rounds", 1, "--size", "4MiB"),
        *(argument for name in set(spoilt.values()) for argument in ("--spoil", name)),
        *("--out", out),
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    for group in json.loads(out.read_text())["groups"]:
        if group["subject"] == "P11" and "fresh" not in group["title"]:
            continue
        wrong = [row["name"] for row in group["rows"] if row["equal"] is False]
        assert spoilt[group["subject"]] in wrong, group
        assert group["subject"] == "P11" or len(wrong) == 1, group


def test_an_unknown_subject_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "P99"])
    assert "P99: known are P1" in capsys.readouterr().err
