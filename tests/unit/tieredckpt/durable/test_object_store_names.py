from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.durable.object_store import (
    check_object_name,
    check_object_prefix,
    is_valid_object_name,
    join_object_name,
    listable_folder,
)
from tieredckpt.errors import UsageError


@given(st.text(max_size=60))
def test_a_name_stays_below_its_root(name: str):
    if is_valid_object_name(name):
        path = PurePosixPath("/root") / name
        assert str(path) == f"/root/{name}"
        assert ".." not in path.parts


@pytest.mark.parametrize("name", ["a", "a/b.c", "...", "a..b", ".hidden", "ü", "x" * 1024])
def test_good(name: str):
    assert check_object_name(name) == name
    assert check_object_prefix(name + "/") == name + "/"


@pytest.mark.parametrize("name", ["", "/", "a//b", "..", "a/..", "\ud800", "é" * 513])
def test_bad(name: str):
    with pytest.raises(UsageError):
        check_object_name(name)


@pytest.mark.parametrize("prefix", ["/", "//", "a//", "../", "/a"])
def test_bad_prefixes(prefix: str):
    with pytest.raises(UsageError):
        check_object_prefix(prefix)


def test_folders_and_roots():
    assert [listable_folder(prefix) for prefix in ("", "a", "a/", "a/b", "a/b/")] == ["", "", "a", "a", "a/b"]
    assert (join_object_name("", "a"), join_object_name("r/s", "a"), join_object_name("r", "")) == ("a", "r/s/a", "r/")
