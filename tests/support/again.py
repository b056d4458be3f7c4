"""``--again 5``: a test that failed beside others is run once more, alone, and only that counts.

How it failed the first time is printed whole and counted, as "again", also when it passes alone. More failed tests than
that are failures at once: then it is not the machine. So is what ends a session's fixtures, which no test stands for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableSequence
from typing import Any

import pytest
from _pytest.reports import TestReport

_AGAIN = "again"
_ENDED = ("passed", "skipped", "xfailed", "xpassed")


class FirstFailures:
    """Takes the reports of all tests, and holds back those of failures until they have been run alone."""

    def __init__(self, config: pytest.Config, most: int) -> None:
        self._config, self._most = config, most
        self._held: dict[str, list[TestReport]] = {}
        self._first: list[TestReport] = []
        """How those failed that are not counted as failures."""
        self._alone: dict[str, str] = {}
        """How each test ended alone."""
        self._running = ""

    def take(self, report: TestReport, *, stands_for_a_test: bool = True) -> None:
        if report.failed and self._most and stands_for_a_test:
            self._held.setdefault(report.nodeid, []).append(report)
            if len(self._held) > self._most:
                self.give_up()
                return
            report.outcome = _AGAIN  # type: ignore[assignment]  # in no category of pytest's own
            self._first.append(report)
        self._log(report)

    def give_up(self) -> None:
        """What is held has failed, and so has whatever fails from now on."""
        self._most, self._running = 0, ""
        for name, reports in self._held.items():
            if self._alone.get(name) != "failed":
                self._have_failed(reports)
        self._held.clear()

    def run_alone(self) -> Iterator[str]:
        """The names of those to be run alone, each until the next one is asked for."""
        self._most = 0
        for name in [*self._held]:
            self._forget_ends(name)
            self._running, self._alone[name] = name, "did not end"
            yield name
            self._running, reports = "", self._held.pop(name)
            if self._alone[name] not in {"passed", "failed"}:
                self._have_failed(reports)

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        name = report.nodeid
        if name == self._running and self._alone[name] != "failed" and (report.when == "call" or not report.passed):
            self._alone[name] = report.outcome

    def pytest_report_teststatus(self, report: TestReport) -> tuple[str, str, str] | None:
        if report.outcome != _AGAIN:
            return None
        is_counted = self._held[report.nodeid][0] is report
        return (_AGAIN if is_counted else "", "A", "AGAIN")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._first:
            return
        terminalreporter.write_sep("=", "FAILED BESIDE OTHERS")
        if self._config.option.tbstyle != "no":
            for report in self._first:
                terminalreporter.write_sep("_", f"{report.head_line or report.nodeid} ({report.when})", yellow=True)
                terminalreporter._outrep_summary(report)
        terminalreporter.write_sep("=", "run again, alone")
        for name, how in self._alone.items():
            terminalreporter.write_line(f"AGAIN {name}: {how} alone")

    def _have_failed(self, reports: list[TestReport]) -> None:
        self._drop(_AGAIN, lambda one: one in reports)
        self._first = [one for one in self._first if one not in reports]
        for report in reports:
            report.outcome = "failed"
            self._log(report)

    def _forget_ends(self, name: str) -> None:
        """What was counted of a test before it failed where it was taken down."""
        for category in _ENDED:
            self._drop(category, lambda one: getattr(one, "nodeid", "") == name)

    def _drop(self, category: str, which: Any) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        counted: MutableSequence[Any] = reporter.stats.get(category, []) if reporter is not None else []
        counted[:] = [one for one in counted if not which(one)]
        if not counted and reporter is not None:
            with contextlib.suppress(KeyError):
                del reporter.stats[category]

    def _log(self, report: TestReport) -> None:
        self._config.hook.pytest_runtest_logreport(report=report)
