"""Python objects and ``.metadata`` files, loaded as data and never executed.

An object is an archive of ``torch.save``, which is a pickle, and unpickling calls whatever the pickle names. Here it is
read by ``torch.load(weights_only=True)``, which calls only what is on a list: tensors, containers, numbers, strings,
and what else training states hold (:func:`_listed`). ``torch.serialization.add_safe_globals`` adds a project's own
classes; ``memory.trust_objects`` skips all of this.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import functools
import io
import logging
import pathlib
import pickle
import re
import threading
import types
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tieredckpt.errors import CheckpointDamagedError, UntrustedObjectError

log = logging.getLogger(__name__)

_HOW = (
    "allow its class with torch.serialization.add_safe_globals, or trust whoever can write to the store with "
    "memory.trust_objects (TIEREDCKPT_MEMORY_TRUST_OBJECTS=true)"
)
_NAMED = re.compile(r"(?:GLOBAL|class) ([\w.]+)")
_loading = threading.Lock()
"""The list of what may be called belongs to the process."""
_seen: set[str] = set()
"""Entries that have been looked at before they were saved."""


def check_safe_object(name: str, data: bytes) -> None:
    """Raise :class:`UntrustedObjectError` unless loading ``data`` only makes what is on the list.

    The same bytes may then be loaded by ``torch.load(weights_only=False)``, as DCP's planners do: what calls nothing
    else for one unpickler calls nothing else for the other.
    """
    try:
        _load(data)
    except pickle.UnpicklingError as error:
        raise UntrustedObjectError(
            f"{name} is an object that would run code of its own when it is loaded ({_short(error)}): {_HOW}"
        ) from None
    except Exception as error:  # an archive that is damaged raises whatever it meets first
        raise CheckpointDamagedError(f"{name}: the object cannot be loaded: {_short(error)}") from error


def _load(data: bytes) -> Any:
    """``pickle.UnpicklingError`` where it is more than data. What it makes is not kept: torch takes some data amiss."""
    with _loading, torch.serialization.safe_globals(_listed()):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def warn_unsafe_object(name: str, data: bytes) -> None:
    """Once for every entry: say that it is saved and a restore will refuse it."""
    if name in _seen:
        return
    _seen.add(name)
    try:
        _load(data)
    except pickle.UnpicklingError as error:
        log.warning("%s is saved, but a restore will refuse to load it (%s): %s", name, _short(error), _HOW)
    except Exception as error:  # noqa: BLE001 - a class whose making fails, say: then its restore fails as well
        log.warning("%s is saved, but cannot be loaded again: %s", name, _short(error))


@functools.cache
def _listed() -> list[Any]:
    """What may be called besides what torch allows, under the names that pickles have for it."""
    found: dict[str, Any] = {
        f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in (
            *(argparse.Namespace, types.SimpleNamespace),
            *(dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone),
            *(decimal.Decimal, fractions.Fraction),
            *(frozenset, int, float, bool, str, list, dict),
        )
    }
    for path in (pathlib.PurePosixPath, pathlib.PosixPath):
        found |= {f"{module}.{path.__name__}": path for module in ("pathlib", "pathlib._local")}
    found |= _of_numpy()
    return [(kind, name) for name, kind in found.items()]


def _of_numpy() -> dict[str, Any]:
    """Arrays, scalars and their types. Both releases' names, since one may load what the other has saved."""
    try:
        import numpy as np
    except ImportError:
        return {}
    rebuild, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
    found: dict[str, Any] = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found |= {f"{module}._reconstruct": rebuild, f"{module}.scalar": scalar}
    for kind in {type(np.dtype(code)) for code in np.typecodes["All"]}:  # what a made dtype is an instance of
        found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


# -- metadata of DCP's own file format --------------------------------------------------------------------------------


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes that DCP's ``.metadata`` consists of; any other name ends it."""

    def find_class(self, module: str, name: str) -> Any:
        found = _of_metadata().get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs")
        return found


def load_dcp_metadata(file: IO[bytes]) -> Metadata:
    """A ``.metadata`` file as data; ``pickle.UnpicklingError`` for one that holds anything else."""
    found = _MetadataUnpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    return found


@functools.cache
def _of_metadata() -> dict[tuple[str, str], Any]:
    kinds: tuple[Any, ...] = (
        *(Metadata, MetadataIndex, StorageMeta, BytesStorageMetadata, TensorStorageMetadata, TensorProperties),
        *(ChunkStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo, collections.OrderedDict),
    )
    found: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in kinds}
    found[("torch", "Size")] = torch.Size
    found[("torch.serialization", "_get_layout")] = torch.serialization._get_layout
    for path in (pathlib.PurePosixPath, pathlib.PosixPath):
        found |= {(module, path.__name__): path for module in ("pathlib", "pathlib._local")}
    for module in ("builtins", "__builtin__"):
        found[(module, "getattr")] = _member
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return found | {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in dtypes}


def _member(kind: Any, name: Any) -> Any:
    """Python 3.11 and later pickle a member of an enum as ``getattr(kind, name)``; of nothing else is it needed."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("it asks for an attribute of something")
    return _MEM_FORMAT_ENCODING[name]


def _short(error: BaseException) -> str:
    """Of torch's advice only what it refused."""
    named = _NAMED.search(str(error))
    if named:
        return f"it names {named[1]}"
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0][:200]
