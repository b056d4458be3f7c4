"""The tasks that a resumed night repeats, and the page that it writes."""

import subprocess
import sys

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.nightly.__main__ import contracts, end
from tests.nightly.record import FlakyTest, Outcome, Record, Result, Task, judged, lasted, page, remaining, resumed

TASKS = [Task(name, ("true",)) for name in ("tests: a", "tests: b", "demo: c", "DCP contract: d")]
RESULTS = st.dictionaries(
    st.sampled_from([task.name for task in TASKS]), st.builds(Result, st.sampled_from(Outcome), st.floats(0, 1e5))
)


@given(RESULTS)
def test_same_revision_reruns_only_tasks_that_did_not_pass(results):
    """Tasks that failed or had no interpreter run again; their old results count until then."""
    record = resumed(Record("abc", "then", results), "abc", "now")
    assert record == Record("abc", "then", results)
    done = {name for name, one in results.items() if one.outcome is Outcome.PASSED}
    assert [task.name for task in remaining(TASKS, record)] == [task.name for task in TASKS if task.name not in done]


@given(RESULTS)
def test_another_revision_starts_with_all_tasks(results):
    record = resumed(Record("abc", "then", results), "abd", "now")
    assert record == Record("abd", "now")
    assert remaining(TASKS, record) == TASKS
    assert resumed(None, "abd", "now") == record


def test_task_result_is_judged_by_its_output():
    task = Task("tests: a", ("true",), timeout_s=5, unavailable="no interpreter")
    printed = "collected\n===== 3 passed, 1 skipped in 2.50s =====\n20000 schedules, 0 broke a rule, 150 schedules/s\n"
    passed = judged(task, 0, printed, 2.5)
    assert passed.outcome is Outcome.PASSED
    assert passed.figures == ("3 passed, 1 skipped in 2.50s", "20000 schedules, 0 broke a rule, 150 schedules/s")
    failed = judged(task, 1, "words\n==== 1 failed, 2 passed in 1s ====", 1)
    assert (failed.outcome, failed.figures) == (Outcome.FAILED, ("1 failed, 2 passed in 1s",))
    assert failed.tail.startswith("words\n")
    assert judged(task, None, "words", 5).tail == "words\nkilled after 5 s"
    assert judged(task, 1, "no interpreter for 3.14", 1).outcome is Outcome.UNAVAILABLE
    assert judged(TASKS[0], 1, "no interpreter for 3.14", 1).outcome is Outcome.FAILED


def test_contract_without_interpreter_or_torch_is_unavailable():
    (task,) = (one for one in contracts() if one.name == "DCP contract: py310, torch 2.7")
    assert task.command[1:] == ("-e", "dcp-py310-torch27")
    for printed in (
        "dcp-py310-torch27: skipped because could not find python interpreter with spec(s): py310\n",
        "ERROR: No matching distribution found for torch==2.7.1\n",
    ):
        assert judged(task, 255, printed, 1).outcome is Outcome.UNAVAILABLE
    skipped = "SKIPPED [1] tests/e2e/dcp/test_state_dicts.py:9: needs two GPUs\n=== {} ===\n"
    assert judged(task, 1, skipped.format("1 failed, 1 skipped in 9s"), 9).outcome is Outcome.FAILED
    assert judged(task, 0, skipped.format("1 passed, 1 skipped in 9s"), 9).outcome is Outcome.PASSED
    assert judged(task, 1, "ERROR: No matching distribution found for torchdata==9\n", 9).outcome is Outcome.FAILED


def test_page_lists_every_task_and_the_failures():
    record = Record("abc", "yesterday")
    record = record.having("tests: b", Result(Outcome.FAILED, 61.0, ("1 failed in 61s",), "assert 1 == 2"))
    record = record.having("demo: c", Result(Outcome.PASSED, 3725.0, ("a | b",)))
    text = page(TASKS, record, "today")
    assert text.startswith("# Nightly run of abc\n\nBegan yesterday, written today; 1 h 03 min of work.\n")
    assert "1 passed, 1 failed, 0 not available here, 2 not run yet." in text
    assert "## Failed: tests: b\n\n```\nassert 1 == 2\n```\n" in text
    for row in ("| tests: a | not run yet | | |", "| tests: b | failed | 1 min 01 s | 1 failed in 61s |",
                "| demo: c | passed | 1 h 02 min | a \\| b |"):  # fmt: skip
        assert row in text.splitlines()


def test_page_groups_flaky_tests_by_name_with_their_last_failure():
    first = FlakyTest("tests/a.py::test_a", "2026-01-01 10:00 UTC", "abc", 3.0, "assert 1 | 2")
    flaky = [first, msgspec.structs.replace(first, test="tests/b.py::test_b")]
    flaky += [msgspec.structs.replace(flaky[1], date="2026-01-02 10:00 UTC", revision="abd", seconds=4.26)]
    rows = page(TASKS, Record("abc", "then"), "now", flaky).splitlines()
    start = rows.index("## Flaky tests")
    assert rows[start + 4 : start + 7] == [
        "| `tests/b.py::test_b` | 2 | 2026-01-02 10:00 UTC | abd | 4.3 s | assert 1 \\| 2 |",
        "| `tests/a.py::test_a` | 1 | 2026-01-01 10:00 UTC | abc | 3.0 s | assert 1 \\| 2 |",
        "",
    ]
    assert "Flaky" not in page(TASKS, Record("abc", "then"), "now")


def test_durations_have_two_units():
    said = {0.4: "0 s", 59: "59 s", 60: "1 min 00 s", 3599.6: "1 h 00 min", 7260: "2 h 01 min"}
    assert {seconds: lasted(seconds) for seconds in said} == said


TIDIES = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("started", flush=True)
    signal.pause()
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1]).touch()
"""


def test_stopped_task_can_clean_up(tmp_path):
    tidied = tmp_path / "tidied"
    command = [sys.executable, "-c", TIDIES, str(tidied)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        end(process)
    assert tidied.exists()


def test_frameworks_that_the_push_skips_have_environments_of_their_own():
    commands = [task.command[1:] for task in contracts()]
    assert {("-e", name) for name in ("deepspeed", "ray", "torchtitan")} <= set(commands)
