"""Files of results that are put together: every scene once, from the last file that has it."""

from __future__ import annotations

from benchmarks.table import joined


def run(revision, *titles):
    scene = {"subject": "P9", "state": "", "ranks": 4, "threads": 1, "of": revision}
    return {"groups": [{**scene, "title": title} for title in titles]}


def test_of_a_scene_that_several_files_have_the_last_one_counts():
    found = joined({"a": run("old", "a rank", "a node"), "b": run("new", "a node", "an error")})
    assert {group["title"]: group["of"] for group in found} == {"a rank": "old", "a node": "new", "an error": "new"}
    assert len(found) == 3


def test_one_file_stands_as_it_is():
    only = run("new", "a rank")
    assert joined({"a": only}) == only["groups"]
