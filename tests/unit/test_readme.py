"""What the README shows is what was measured."""

import json
from pathlib import Path

from benchmarks.summary import BEGIN, END, readme_table

ROOT = Path(__file__).parents[2]


def test_the_readmes_table_is_that_of_a_run():
    text = (ROOT / "README.md").read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    runs = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert shown in [readme_table(json.loads(run.read_text()), str(run.relative_to(ROOT))) for run in runs]
