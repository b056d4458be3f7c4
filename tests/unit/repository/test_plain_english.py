"""``.ci/words.py``: ``make check`` fails on sentences that are not plain English."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[3] / ".ci/words.py"


def check(*files: Path) -> tuple[int, str]:
    command = [sys.executable, str(CHECK), *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout


BROKEN = [
    ("clause", "module.py", '"""Return the steps of %s asks."""', "whoever"),
    ("idiom", "module.py", "# The agent %s after an error.", "goes on"),
    ("coined", "module.py", 'raise ValueError("the step is %s")', "torn"),
    ("long", "page.md", "The %s ends.", " ".join(["agent"] * 30)),
    ("summary", "module.py", '"""Return the steps%s"""', ""),
    ("help", "module.py", "option(help=%r)", "if the agent is slow"),
    ("test-name", "test_module.py", "def %s(): ...", "test_what_is_lost"),
    ("asides", "page.md", "The agent %s stops.", "(a) (b) (c)"),
]


@pytest.mark.parametrize(("rule", "name", "text", "phrase"), BROKEN, ids=[rule for rule, *_ in BROKEN])
def test_sentence_that_breaks_a_rule_is_reported(tmp_path, rule, name, text, phrase):
    (tmp_path / name).write_text(f"{text % phrase}\n")
    code, said = check(tmp_path / name)
    assert code == 1
    assert f"{tmp_path / name}:1: {rule}: " in said


def test_plain_sentences_and_code_blocks_pass(tmp_path):
    (tmp_path / "module.py").write_text('"""Return the steps of the job."""\n\nx = 1  # The agent continues.\n')
    (tmp_path / "page.md").write_text("# Steps\n\nThe agent continues.\n\n```\nwhoever goes on\n```\n")
    assert check(tmp_path / "module.py", tmp_path / "page.md") == (0, "")
