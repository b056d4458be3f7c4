"""``elastic plan``: its output, and that the documentation shows the same output."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic.cli.plan import batch_plan_command

ROOT = Path(__file__).parents[4]


def run(*args):
    return CliRunner().invoke(batch_plan_command, [str(arg) for arg in args], standalone_mode=False)


def lines(result):
    return [line.rstrip() for line in result.stdout.splitlines()]


def refused(*args):
    return str(run(*args).exception)


def test_plan_prints_a_line_for_each_world():
    result = run("--global-batch", 128, "--world", "8,24", "--world", 32, "--max-microbatch", 4)
    assert result.return_value == 0
    assert [" ".join(line.split()) for line in lines(result)[1:]] == [
        "8 4 4 32 0 100.0 % 8 x 16",
        "24 2 3 48 0 88.9 % 8 x 6 + 16 x 5",
        "32 1 4 32 0 100.0 % 32 x 4",
    ]


def test_plan_prints_json():
    result = run("--global-batch", 10, "--world", 4, "--microbatch", 2, "--rank", 3, "--json")
    (one,) = json.loads(result.stdout)["plans"]
    assert one["quotas"] == [{"ranks": 1, "samples": 4}, {"ranks": 3, "samples": 2}]
    assert (one["accumulation"], one["empty"], one["world_independent"]) == (2, 3, True)
    assert one["share"] == {
        "rank": 3,
        "first": 8,
        "samples": 2,
        "microbatches": [{"id": 4, "first": 8, "samples": 2}],
        "empty": 1,
        "weight": 0.2,
    }


def test_every_pass_of_a_rank():
    shown = lines(run("--global-batch", 10, "--world", 4, "--microbatch", 2, "--rank", 3))
    assert shown[-3:] == ["MICROBATCH  FIRST  SAMPLES", "         4      8        2", "         -      -        0"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), "--global-batch and --world are needed"),
        (("--global-batch", 8), "--global-batch and --world are needed"),
        (("--global-batch", 8, "--world", "8,x"), "8,x is not a list of numbers"),
        (("--global-batch", 8, "--world", 9), "world_size is 9, but global_batch has 8 samples"),
        (("--global-batch", 8, "--world", 2, "--rank", 2), "there is no rank 2"),
    ],
)
def test_impossible_plan_is_an_error(args, named):
    assert named in refused(*args)


def test_documented_plans_match_the_command_output():
    """Each block of docs/explanation/exactness.md that begins with a prompt."""
    text = (ROOT / "docs" / "explanation" / "exactness.md").read_text()
    blocks = re.findall(r"^```console\n\$ elastic plan (.*?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for command, printed in blocks:
        result = run(*shlex.split(command))
        assert result.exception is None
        assert lines(result) + result.stderr.splitlines() == printed.rstrip("\n").split("\n"), command


def test_the_documentations_python_runs():
    text = (ROOT / "docs" / "explanation" / "exactness.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "docs/explanation/exactness.md", "exec"), {})
