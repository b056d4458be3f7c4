"""Plugin that fails a test which leaks. Hooks of a conftest do not see session fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import leaks

_lasting = leaks.NOTHING
"""Footprint of module and session fixtures, which clean up themselves."""

_there: leaks.Footprint | None = None
"""Footprint after the previous test."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[Any]:
    global _lasting  # noqa: PLW0603 - hooks share nothing else
    if fixturedef.scope == "function":
        return (yield)
    before = leaks.current_footprint()
    try:
        return (yield)
    finally:
        _lasting = leaks.union(_lasting, leaks.added(before, leaks.current_footprint()))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail if the test leaves a thread, child process, agent or arena."""
    global _there
    before = _there or leaks.current_footprint()
    yield
    _there, left = leaks.wait_for_cleanup(before, _lasting)
    assert not left, f"left behind: {'; '.join(left)}"
