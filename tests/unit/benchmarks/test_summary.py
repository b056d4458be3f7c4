"""The README's table of measurements is the output of ``benchmarks/summary.py``."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import read_raw
from benchmarks.summary import BEGIN, END, readme_table, seconds

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shown():
    return (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0].strip()


def named_runs(text):
    return read_raw([ROOT / run for run in re.findall(r"`(benchmarks/results/[^`]+)`", text)])


def test_readme_table_matches_its_named_runs(shown):
    assert named_runs(shown)
    assert shown == readme_table(named_runs(shown))


def test_readme_table_has_six_rows_that_name_their_device(shown):
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    assert all(re.search(r"\bCPU\b|\bNVIDIA H100\b", device) for _, device, *_ in rows)


def test_readme_table_refuses_runs_without_a_row(shown):
    runs = {name: raw for name, raw in named_runs(shown).items() if "recovery" not in name}
    with pytest.raises(LookupError, match="no run has a suitable row 'elastic run, a warm spare'"):
        readme_table(runs)


@pytest.mark.parametrize(("value", "text"), [(0.0874552, "87.5 ms"), (0.9994, "999 ms"), (1.9377, "1.94 s")])
def test_times_have_a_unit(value, text):
    assert seconds(value) == text
