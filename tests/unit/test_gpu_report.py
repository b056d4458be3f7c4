"""The report of the first hour on a GPU: what it says of what was run, and of what was not."""

from __future__ import annotations

from tests.gpu.__main__ import NOT_WRITTEN, examined
from tests.gpu.report import Check, Figure, Report, page


def test_what_was_not_run_is_told_and_fails_nothing():
    report = Report([], {"torch": "2"}, [Check("a", "passed", 1.0), Check("<b>", "not run", why="no accelerator")], [])
    assert report.passed
    assert report.title == "no accelerator: on fakes, which prove order and no speed: 1 passed, 0 failed, 1 not run"
    assert "&lt;b&gt;" in page(report)
    assert "no accelerator" in page(report)


def test_one_failure_is_a_failure_on_a_device():
    report = Report(["cuda:0"], {}, [Check("a", "failed", why="bits")], [Figure("to cuda:0", 24.97, "GB/s")])
    assert not report.passed
    assert report.title == "cuda:0: 0 passed, 1 failed, 0 not run"
    assert "25 GB/s" in page(report)


def test_a_test_that_fails_or_is_skipped_or_left_out_or_does_not_load_is_in_the_report(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.mark.skip(reason='no device')\n"
        "def test_skipped(): pass\n"
        "@pytest.mark.system\n"
        "def test_left_out(): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    report = examined(["--continue-on-collection-errors", str(tmp_path)])
    found = {check.name.rpartition("::")[2].rpartition("/")[2]: check for check in report.checks}
    assert found["test_good"].outcome == "passed"
    assert found["test_bad"].outcome == "failed"
    assert (found["test_skipped"].outcome, found["test_skipped"].why) == ("not run", "Skipped: no device")
    assert found["test_left_out"].outcome == "not run"
    assert found["test_broken.py"].outcome == "failed"
    assert {check.name for check in report.checks if check.outcome == "not run"} >= set(NOT_WRITTEN)
    assert not report.passed
