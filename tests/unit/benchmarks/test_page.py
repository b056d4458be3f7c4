"""docs/benchmarks.md as the output of ``benchmarks/page.py``: tables, ratios, notes and results."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import read_raw
from benchmarks.page import markdown, read_reasons

ROOT = Path(__file__).parents[3]
MACHINE = {
    "packages": {"torch": "2"}, "revision": "abc", "date": "today", "load_before": 0.0, "cpu": "a processor",
    "cores": 2, "memory_bytes": 1 << 30, "kernel": "6", "python": "3",
}  # fmt: skip


def row(name, *samples, kind="ours", equal=None, note=""):
    return {
        "name": name, "kind": kind, "unit": "s", "samples": list(samples), "first": None, "equal": equal,
        "compared": equal is not None, "note": note,
    }  # fmt: skip


def page(*groups):
    parameters = {"size_bytes": 1 << 30, "rounds": 2}
    return markdown({"a.json": {"machine": MACHINE, "parameters": parameters, "groups": groups}}, reasons={})


def recovery(title, *rows):
    return {"subject": "P9", "title": title, "state": "", "ranks": 4, "threads": 1, "rows": rows}


def cells(text, name):
    """Return the cells of the first line that starts with this name."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return line.split("|")[2:-1]


def test_benchmarks_page_matches_its_named_runs():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    command = re.search(r"`python -m benchmarks table ([^`]+)`", text)
    assert command is not None
    raws = read_raw([ROOT / name for name in command[1].split()])
    assert text == markdown(raws, reasons=read_reasons())


def test_scenes_of_one_size_are_columns_with_ratios_to_our_first_row():
    text = page(
        recovery("64 MiB, DDP, killed", row("ours", 1, 1), row("theirs", 2, 6, kind="opponent")),
        recovery("64 MiB, FSDP2, killed", row("ours", 2, 2)),
    )
    assert cells(text, "ours") == [" 1.00 s ", " 2.00 s "]
    assert cells(text, "theirs") == [" 4.00 s (2.00 to 6.00 s), 4.00 x ", "  "]


def test_only_stages_of_our_first_row_are_shown():
    rows = (
        row("ours", 1, 1), row("ours, cold", 2, 2), row("theirs", 3, 3, kind="opponent"), row("detect: ours", 0.5, 0.5),
        row("detect: ours, cold", 1, 1), row("detect: theirs", 2, 2, kind="opponent"),
        row("abort: theirs", 2, 2, kind="opponent"),
    )  # fmt: skip
    text = page(recovery("64 MiB, DDP, killed", *rows))
    assert cells(text, "detect") == [" 500 ms "]
    assert "detect: " not in text
    assert "abort" not in text


def test_result_that_differs_is_named_in_its_cell_and_above():
    text = page(recovery("64 MiB, DDP, killed", row("ours", 1, 1, equal=True), row("bad", 1, 1, equal=False)))
    assert "**not equal**" in cells(text, "bad")[0]
    assert "1 were equal. Not equal: bad." in text


def test_note_of_one_column_names_it_and_a_common_one_does_not():
    text = page(
        recovery("64 MiB, DDP, killed", row("ours", 1, 1, note="a warm spare. Steps lost: 0")),
        recovery("64 MiB, FSDP2, killed", row("ours", 1, 1, note="a warm spare. Steps lost: 1")),
    )
    lines = text.splitlines()
    at = lines.index("| ours |  | a warm spare |")
    assert lines[at + 1 : at + 3] == [
        "| ours | DDP, killed | Steps lost: 0 |",
        "| ours | FSDP2, killed | Steps lost: 1 |",
    ]
