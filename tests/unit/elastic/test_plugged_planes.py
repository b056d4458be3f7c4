"""Platforms bring a control plane of their own, and are asked in an order that does not depend on how they came."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import pytest

from elastic.control.plugged import GROUP, plugged_plane
from elastic.control.testing import MemoryPlane
from elastic.errors import PolicyError

_SEATS = MemoryPlane(2).seats


def nobodys(environ):
    return None


def first(environ):
    return _SEATS[0] if environ.get("PLATFORM") == "first" else None


def second(environ):
    return _SEATS[1]


def entry(name, function):
    return EntryPoint(name, f"{__name__}:{function}", GROUP)


def test_the_first_by_name_that_knows_this_process_is_taken():
    found = [entry("c", "second"), entry("a", "nobodys"), entry("b", "first")]
    assert plugged_plane({"PLATFORM": "first"}, found) is _SEATS[0]
    assert plugged_plane({}, found) is _SEATS[1]
    assert plugged_plane({}, found[1:]) is None


@pytest.mark.parametrize("value", ["no_such_package_anywhere:plane", f"{__name__}:no_such_plane"])
def test_one_that_cannot_be_loaded_may_be_the_right_one(value):
    with pytest.raises(PolicyError, match="a plane called broken"):
        plugged_plane({}, [EntryPoint("broken", value, GROUP)])


def test_those_that_are_installed_leave_other_processes_alone():
    assert entry_points(group=GROUP)
    assert plugged_plane({}) is None
