"""Joining result files, and targets without their rows."""

from __future__ import annotations

from benchmarks.goals import Verdict
from benchmarks.table import joined, verdict_cells


def run(revision, *titles):
    scene = {"subject": "P9", "state": "", "ranks": 4, "threads": 1, "of": revision}
    return {"groups": [{**scene, "title": title} for title in titles]}


def test_last_file_wins_for_a_scene_in_several_files():
    found = joined({"a": run("old", "a rank", "a node"), "b": run("new", "a node", "an error")})
    assert {group["title"]: group["of"] for group in found} == {"a rank": "old", "a node": "new", "an error": "new"}
    assert len(found) == 3


def test_single_file_is_returned_unchanged():
    only = run("new", "a rank")
    assert joined({"a": only}) == only["groups"]


def test_target_without_its_rows_is_not_measured_and_not_missed():
    verdict = Verdict("P1", "state A", "trainer blocked", float("nan"), 0.1, False, "R")
    assert verdict_cells(verdict) == ("trainer blocked", "state A", "", "at most 0.1 R", "not measured")
