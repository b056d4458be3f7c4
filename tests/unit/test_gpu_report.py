"""The report of the first hour on a GPU: what it says of what was run, and of what was not."""

from __future__ import annotations

from tests.gpu.__main__ import CHECKED, ON_NCCL, ROOT, _figures_of, examined
from tests.gpu.report import Check, Figure, Report, page, shown
from tieredckpt.device import accelerator


def test_what_was_not_run_is_told_and_fails_nothing():
    report = Report([], {"torch": "2"}, [Check("a", "passed", 1.0), Check("<b>", "not run", why="no accelerator")], [])
    assert report.passed
    assert report.title == "no accelerator: on fakes, which prove order and no speed: 1 passed, 0 failed, 1 not run"
    assert "&lt;b&gt;" in page(report)
    assert "no accelerator" in page(report)


def test_one_failure_is_a_failure_on_a_device():
    figure = Figure("to cuda:0", 24.97, "GB/s", "cuda:0")
    report = Report(["cuda:0"], {}, [Check("a", "failed", why="bits")], [figure])
    assert not report.passed
    assert report.title == "cuda:0: 0 passed, 1 failed, 0 not run"
    assert "<td>25 GB/s</td><td>cuda:0</td>" in page(report)


def test_every_figure_says_its_device_and_backend():
    rows = [
        {"name": "elastic run", "samples": [3.0, 1.0, 2.0], "unit": "s"},
        {"name": "memory", "samples": [1], "unit": "B"},
        {"name": "torchft", "samples": [], "unit": "s"},
    ]
    group = {"subject": "P9", "title": "DDP, a rank is killed", "state": "", "rows": rows}
    (one,) = _figures_of(group, [])
    assert (one.name, one.value, one.unit) == ("P9 DDP, a rank is killed: elastic run", 2000.0, "ms")
    assert one.where == "CPU, no accelerator; gloo"
    (one,) = _figures_of({**group, "subject": "P1", "title": "", "state": "A"}, ["cuda:0"])
    assert (one.name, one.where) == ("P1 state A: elastic run", "cuda:0; no collectives")


def test_figures_are_read_at_a_glance_and_what_failed_comes_first():
    assert [shown(value) for value in (0.4677, 25.5, 601.77, 8874.2)] == ["0.468", "25.5", "602", "8,874"]
    checks = [Check("good", "passed"), Check("left out", "not run"), Check("bad", "failed", why="a\nb")]
    said = page(Report([], {}, checks, []))
    assert said.index("bad") < said.index("left out") < said.index(">good<")


def test_what_is_run_is_there():
    assert [name for name in CHECKED if not (ROOT / name).is_file()] == []


def test_a_test_that_fails_or_is_skipped_or_left_out_or_does_not_load_is_in_the_report(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('a way', 3.5)\n"
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
    assert [(one.name, one.value) for one in report.figures if one.unit == "ms"] == [("a way", 3.5)]
    assert all(one.where for one in report.figures)
    left = set() if accelerator().count() else set(ON_NCCL)
    assert {check.name for check in report.checks if check.outcome == "not run"} >= left
    assert not report.passed
