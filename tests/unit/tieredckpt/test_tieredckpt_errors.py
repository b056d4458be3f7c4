"""Errors: one class tree by the caller's remedy, the same on both sides of a socket."""

import copy
import pickle
import re

import pytest

import peerstore.errors
import tieredckpt.errors
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    SaveFailedError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
    errors_by_name,
)


def tree(module, root):
    """Return every class of the tree in the module's docstring, with its parent."""
    drawn, path = {}, []
    for line in module.__doc__.splitlines():
        match = re.match(r"    ([│ ]*(?:[├└]── )?)([A-Za-z]+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            drawn[match[2]] = path[-2] if len(path) > 1 else None
    return drawn


@pytest.mark.parametrize(
    ("module", "root"),
    [(tieredckpt.errors, TieredCheckpointError), (peerstore.errors, peerstore.errors.PeerStoreError)],
    ids=["tieredckpt", "peerstore"],
)
def test_the_tree_in_the_docstring_is_the_tree(module, root):
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, root) and value.__module__ == module.__name__
    }
    drawn = tree(module, root)
    assert drawn.keys() == classes.keys()
    for name, parent in drawn.items():
        bases = [base for base in classes[name].__bases__ if issubclass(base, root)]
        assert parent is None or bases == [classes[parent]]
    assert all(kind.__doc__ for kind in classes.values())


@pytest.mark.parametrize("kind", errors_by_name().values(), ids=lambda kind: kind.__name__)
def test_errors_pickle_and_copy(kind):
    error = kind("what, which one, what to do")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)


def test_errors_by_name_cover_the_class_tree():
    found = errors_by_name()
    assert found["TieredCheckpointError"] is TieredCheckpointError
    assert {n for n, v in vars(tieredckpt.errors).items() if isinstance(v, type) and v.__name__ == n} <= found.keys()


def test_absent_unknown_and_damaged_errors_are_disjoint():
    answers = [CheckpointNotFoundError, TierUnavailableError, CheckpointDamagedError, SaveFailedError, UsageError]
    for one in answers:
        assert [other for other in answers if issubclass(other, one)] == [one]
    assert issubclass(StoreBusyError, TierUnavailableError)
    for kind in errors_by_name().values():
        assert not issubclass(kind, OSError | ValueError | KeyError | peerstore.errors.PeerStoreError)
