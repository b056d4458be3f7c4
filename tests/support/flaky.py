"""``--retry-failed 5``: retry up to five failed tests once, each alone, after all other tests.

A test that passes its retry is flaky and does not fail the run. Its first failure is printed in full and appended to
``build/flaky.jsonl``, which ``make nightly`` shows. A test that fails twice fails the run. With more than five
failed tests all of them fail the run without a retry. Errors in the teardown of session fixtures are never retried.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.nightly.record import FlakyTest
from tests.support.revision import revision

RECORD = Path("build/flaky.jsonl")
"""Path below the root directory of the tests."""
_RETRIED, _FLAKY = "retried", "flaky"


class RetryFailed:
    """Collector of all test reports; it withholds the reports of failed tests until their retries end."""

    def __init__(self, config: pytest.Config, limit: int) -> None:
        self._config, self._limit = config, limit
        self._running: dict[str, list[pytest.TestReport]] = {}
        self._failed: dict[str, list[pytest.TestReport]] = {}
        """First reports of the tests whose retry has not ended."""
        self._first: dict[str, list[pytest.TestReport]] = {}
        """First reports of the tests whose retry has ended."""
        self._flaky: set[str] = set()
        self._is_retrying = False

    def add(self, report: pytest.TestReport, *, is_last: bool = False) -> None:
        """Add the report of a test. Its teardown is its last report, unless its worker died before."""
        if not self._limit:
            self.log(report)
            return
        reports = self._running.setdefault(report.nodeid, [])
        reports.append(report)
        if is_last or report.when == "teardown":
            del self._running[report.nodeid]
            if self._is_retrying:
                self._judge(report.nodeid, reports)
            elif any(one.failed for one in reports):
                self._hold(report.nodeid, reports)
            else:
                self._log_all(reports)

    def log(self, report: pytest.TestReport) -> None:
        """Pass the report on to pytest, without a retry."""
        self._config.hook.pytest_runtest_logreport(report=report)

    def retries(self) -> list[str]:
        """Return the node ids of the tests to retry. From now on reports are those of retries."""
        self._is_retrying = True
        return [*self._failed]

    def give_up(self) -> None:
        """Log all withheld reports unchanged, and those of later tests at once."""
        self._limit = 0
        for reports in {**self._running, **self._failed}.values():
            self._log_all(reports)
        self._running.clear()
        self._failed.clear()

    def _hold(self, name: str, reports: list[pytest.TestReport]) -> None:
        self._failed[name] = reports
        if len(self._failed) > self._limit:
            self.give_up()
            return
        for report in reports:
            if report.failed:
                self.log(_with_outcome(report, _RETRIED))

    def _judge(self, name: str, reports: list[pytest.TestReport]) -> None:
        first = self._failed.pop(name)
        if any(report.failed for report in reports):
            self._first[name] = first
            self._log_all(reports)
        elif any(report.when == "call" and report.passed for report in reports):
            self._first[name] = first
            self._flaky.add(name)
            self._record(name, first)
            self._log_all([_with_outcome(one, _FLAKY) if one.when == "call" else one for one in reports])
        else:  # a retry that is skipped proves nothing
            self._log_all(first)

    def _record(self, name: str, first: Sequence[pytest.TestReport]) -> None:
        path = self._config.rootpath / RECORD
        path.parent.mkdir(parents=True, exist_ok=True)
        seconds = round(sum(report.duration for report in first), 2)
        date = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        error = next(_first_line(report) for report in first if report.failed)
        entry = FlakyTest(name, date, revision(self._config.rootpath), seconds, error)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def _log_all(self, reports: Sequence[pytest.TestReport]) -> None:
        for report in reports:
            self.log(report)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.outcome == _RETRIED:  # type: ignore[comparison-overlap]
            return ("", "R", "RETRY")
        if report.outcome == _FLAKY:  # type: ignore[comparison-overlap]
            return (_FLAKY, "f", "FLAKY")
        return None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._first:
            return
        terminalreporter.write_sep("=", "FIRST FAILURES OF RETRIED TESTS")
        for report in [one for reports in self._first.values() for one in reports if one.failed]:
            terminalreporter.write_sep("_", f"{report.head_line or report.nodeid} ({report.when})", yellow=True)
            terminalreporter._outrep_summary(report)
        terminalreporter.write_sep("=", "retries")
        for name in self._first:
            terminalreporter.write_line(f"{'flaky' if name in self._flaky else 'failed twice'}: {name}")


def _with_outcome(report: pytest.TestReport, outcome: str) -> pytest.TestReport:
    """Return a copy that pytest counts neither as passed nor as failed."""
    copied = copy.copy(report)
    copied.outcome = outcome  # type: ignore[assignment]  # a category that pytest does not know
    return copied


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).split("\n", 1)[0][:200]
