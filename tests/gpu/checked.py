"""Tests as findings: run pytest in this process and record each test as a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.devices import where
from tests.gpu.findings import record
from tests.gpu.report import Check, Figure

ROOT = Path(__file__).resolve().parents[2]


class Recorded:
    """A pytest plugin that records every test, and why a test was not run."""

    def __init__(self, out: Path, leave_out: Callable[[pytest.Item], str]) -> None:
        self._out = out
        self._leave_out = leave_out
        """Returns why a test is not run here; empty: it is run."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = []
        for item in items:
            if why := self._leave_out(item):
                record(self._out, Check(item.nodeid, "not run", why=why))
            else:
                kept.append(item)
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                number, unit = value if isinstance(value, tuple) else (value, "ms")
                record(self._out, Figure(name, float(number), unit, where()))
        if report.when == "call" or report.outcome != "passed":
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
            outcome = "not run" if report.skipped else report.outcome
            record(self._out, Check(report.nodeid, outcome, round(report.duration, 3), why.strip()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            record(self._out, Check(report.nodeid, "failed", why=str(report.longrepr)))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            record(self._out, Check(item.nodeid, "not run", why="its marker leaves it out"))


def run_tests(
    out: Path,
    tests: Sequence[str],
    *,
    timeout_s: float,
    leave_out: Callable[[pytest.Item], str] = lambda _item: "",
    arguments: Sequence[str] = (),
) -> None:
    """Run ``tests`` (files of this repository, or paths); each test may take ``timeout_s`` seconds."""
    settings: list[Any] = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-v"]
    settings += ["-m", "not system and not nightly", "--timeout", str(timeout_s), *arguments]
    status = pytest.main([*settings, *(str(ROOT / name) for name in tests)], plugins=[Recorded(out, leave_out)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        record(out, Check(f"pytest runs {len(tests)} files", "failed", why=f"pytest ended with {status!r}"))
