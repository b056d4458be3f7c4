"""What the README shows is what was measured."""

import re
from pathlib import Path

from benchmarks.__main__ import read_raw
from benchmarks.summary import BEGIN, END, readme_table

ROOT = Path(__file__).parents[3]


def test_readme_table_matches_its_named_runs():
    text = (ROOT / "README.md").read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    runs = re.findall(r"`(benchmarks/results/[^`]+)`", shown)
    assert runs
    assert shown == readme_table(read_raw([ROOT / run for run in runs]))
