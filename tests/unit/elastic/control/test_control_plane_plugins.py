"""Control plane plugins of platforms: one is selected by name, in any discovery order."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import pytest

from elastic.control.control_plane import CONTROL_PLANE_ENTRY_POINTS, platform_control_plane
from elastic.errors import PolicyError
from elastic.testing import InMemoryCoordinator

_SEATS = InMemoryCoordinator(2).planes


def nobodys(environ):
    return None


def first(environ):
    return _SEATS[0] if environ.get("PLATFORM") == "first" else None


def second(environ):
    return _SEATS[1]


def entry(name, function):
    return EntryPoint(name, f"{__name__}:{function}", CONTROL_PLANE_ENTRY_POINTS)


def test_first_matching_plugin_by_name_is_used():
    found = [entry("c", "second"), entry("a", "nobodys"), entry("b", "first")]
    assert platform_control_plane({"PLATFORM": "first"}, found) is _SEATS[0]
    assert platform_control_plane({}, found) is _SEATS[1]
    assert platform_control_plane({}, found[1:]) is None


@pytest.mark.parametrize("value", ["no_such_package_anywhere:plane", f"{__name__}:no_such_plane"])
def test_plugin_that_cannot_be_loaded_is_an_error(value):
    with pytest.raises(PolicyError, match="a plane called broken"):
        platform_control_plane({}, [EntryPoint("broken", value, CONTROL_PLANE_ENTRY_POINTS)])


def test_those_that_are_installed_leave_other_processes_alone():
    assert entry_points(group=CONTROL_PLANE_ENTRY_POINTS)
    assert platform_control_plane({}) is None
