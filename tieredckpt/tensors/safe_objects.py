"""Python objects and ``.metadata`` files, loaded as data and never executed.

An object is an archive of ``torch.save``, which is a pickle, and unpickling calls any function that the pickle names.
``torch.load(weights_only=True)`` calls only functions on a list: tensors, containers, numbers, strings, and other types
of training states (:func:`_allowed_types`). ``torch.serialization.add_safe_globals`` adds a project's own classes, and
``memory.trust_objects`` skips the check.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import logging
import pathlib
import pickle
import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import IO, Any, ClassVar

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
"""Lock of the list of safe types, which is global to the process."""
_checked_names: set[str] = set()
"""Names of entries that were checked at a save."""


def check_safe_object(name: str, data: bytes) -> None:
    """Raise :class:`UntrustedObjectError` unless ``data`` creates only types on the list.

    Then ``torch.load(weights_only=False)``, which DCP's planners use, may load the same bytes: both unpicklers call the
    same functions.
    """
    try:
        _load(data)
    except pickle.UnpicklingError as error:
        raise UntrustedObjectError(
            f"{name} is an object that would run code of its own when it is loaded ({_short(error)}): {_HOW}"
        ) from None
    except Exception as error:  # a damaged archive may raise any exception
        raise CheckpointDamagedError(f"{name}: the object cannot be loaded: {_short(error)}") from error


def _load(data: bytes) -> Any:
    """Load an archive as a check; raise ``pickle.UnpicklingError`` if it is more than data."""
    with _loading, torch.serialization.safe_globals(_allowed_types()):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def warn_unsafe_object(name: str, data: bytes) -> None:
    """Warn once for every entry that is saved and that a restore will reject."""
    if name in _checked_names:
        return
    _checked_names.add(name)
    try:
        _load(data)
    except pickle.UnpicklingError as error:
        log.warning("%s is saved, but a restore will refuse to load it (%s): %s", name, _short(error), _HOW)
    except Exception as error:  # noqa: BLE001 - a class may raise any exception, and then its restore fails too
        log.warning("%s is saved, but cannot be loaded again: %s", name, _short(error))


@functools.cache
def _allowed_types() -> list[Any]:
    """Return the types that are allowed in addition to torch's, with their names in pickles."""
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
    found |= _numpy_types()
    return [(kind, name) for name, kind in found.items()]


def _numpy_types() -> dict[str, Any]:
    """Return numpy's arrays, scalars and types, with the names of numpy 1 and 2."""
    try:
        import numpy as np
    except ImportError:
        return {}
    rebuild, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
    found: dict[str, Any] = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found |= {f"{module}._reconstruct": rebuild, f"{module}.scalar": scalar}
    for kind in {type(np.dtype(code)) for code in np.typecodes["All"]}:  # the classes of dtype objects
        found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "EMPTY_DICT", "EMPTY_LIST"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL"),
    *("STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
)
_HANDLERS: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)
_SIMPLE = (str, int, float, bool, bytes, type(None))
_WORK_PER_BYTE, _WORK = 4, 1000


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler of the classes in DCP's ``.metadata``, with work proportional to the file's size.

    The unpickler in C hashes any key of a pickle. A nested tuple of one kilobyte can take minutes to hash.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, name)[0]: _HANDLERS[getattr(pickle, name)[0]] for name in _OPCODES
    }
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._budget = _WORK + _WORK_PER_BYTE * len(data)

    def _spend(self, work: int) -> None:
        self._budget -= work
        if self._budget < 0:
            raise pickle.UnpicklingError("it makes more work than its size allows")

    def _check_items(self, target: object, keys: Sequence[object]) -> None:
        if type(target) not in (dict, collections.OrderedDict):
            raise pickle.UnpicklingError(f"it sets an item of a {type(target).__name__}")
        for key in keys:
            if type(key) is MetadataIndex:
                fields = vars(key)
                offset = fields.get("offset")
                valid = type(fields.get("fqn")) is str and type(fields.get("index")) in (int, type(None))
                if not valid or type(offset) not in (torch.Size, type(None)):
                    raise pickle.UnpicklingError("it holds a damaged index")
                self._spend(len(offset or ()))
            elif type(key) not in _SIMPLE:
                raise pickle.UnpicklingError(f"a {type(key).__name__} is not a key of metadata")

    def _check_call(self) -> None:
        called, arguments = self.stack[-2:]
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls something with no arguments")
        if called is torch.Size:
            arguments = arguments[0] if len(arguments) == 1 and type(arguments[0]) is tuple else ()
        self._spend(len(arguments))
        if not all(type(one) in (*_SIMPLE, enum.EnumMeta) for one in arguments):
            raise pickle.UnpicklingError("it calls something with more than names and numbers")

    def _load_reduce(self) -> None:
        self._check_call()
        _HANDLERS[pickle.REDUCE[0]](self)

    def _load_newobj(self) -> None:
        self._check_call()
        _HANDLERS[pickle.NEWOBJ[0]](self)

    def _load_build(self) -> None:
        target, state = self.stack[-2:]
        if type(target) not in _metadata_classes() or type(state) not in (dict, tuple):
            raise pickle.UnpicklingError(f"it gives a {type(target).__name__} a state")
        if type(state) is tuple and type(target) is not TensorProperties:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(target).__name__}")
        self._spend(len(state))
        _HANDLERS[pickle.BUILD[0]](self)

    def _load_setitem(self) -> None:
        self._check_items(self.stack[-3], self.stack[-2:-1])
        _HANDLERS[pickle.SETITEM[0]](self)

    def _load_setitems(self) -> None:
        self._check_items(self.metastack[-1][-1], self.stack[::2])
        _HANDLERS[pickle.SETITEMS[0]](self)

    dispatch.update(
        {
            pickle.REDUCE[0]: _load_reduce,
            pickle.NEWOBJ[0]: _load_newobj,
            pickle.BUILD[0]: _load_build,
            pickle.SETITEM[0]: _load_setitem,
            pickle.SETITEMS[0]: _load_setitems,
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        found = _metadata_globals().get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs")
        return found


def load_dcp_metadata(file: IO[bytes]) -> Metadata:
    """Load a ``.metadata`` file as data; raise ``pickle.UnpicklingError`` for other contents."""
    found = _MetadataUnpickler(file.read()).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    _check_metadata(found)
    return found


def _check_metadata(found: Metadata) -> None:
    """Raise ``pickle.UnpicklingError`` if a field has a type that DCP does not write."""
    for name, value in vars(found).items():
        if name in ("state_dict_metadata", "storage_data", "planner_data") and not isinstance(value, dict | None):
            raise pickle.UnpicklingError(f"its {name} is a {type(value).__name__}")
    seen: set[int] = set()
    for name, value in found.state_dict_metadata.items():
        valid = type(name) is str and type(value) in (TensorStorageMetadata, BytesStorageMetadata)
        if valid and type(value) is TensorStorageMetadata and id(value.chunks) not in seen:
            seen.add(id(value.chunks))
            valid = type(value.size) is torch.Size and type(value.properties) is TensorProperties
            valid = valid and type(value.chunks) is list
            valid = valid and all(type(chunk) is ChunkStorageMetadata for chunk in value.chunks)
            valid = valid and all(type(c.offsets) is type(c.sizes) is torch.Size for c in value.chunks)
        if not valid:
            raise pickle.UnpicklingError(f"it describes {name!r:.80} by a {type(value).__name__}")
    for index, place in (found.storage_data or {}).items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            raise pickle.UnpicklingError(f"it stores a {type(index).__name__} in a {type(place).__name__}")


def _metadata_classes() -> tuple[type, ...]:
    """Return the classes whose instances get their fields from a pickle."""
    return (
        *(Metadata, MetadataIndex, StorageMeta, BytesStorageMetadata, TensorStorageMetadata, TensorProperties),
        *(ChunkStorageMetadata, _StorageInfo),
    )


@functools.cache
def _metadata_globals() -> dict[tuple[str, str], Any]:
    kinds: tuple[Any, ...] = (*_metadata_classes(), _MEM_FORMAT_ENCODING, collections.OrderedDict)
    found: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in kinds}
    found[("torch", "Size")] = torch.Size
    found[("torch.serialization", "_get_layout")] = torch.serialization._get_layout
    for path in (pathlib.PurePosixPath, pathlib.PosixPath):
        found |= {(module, path.__name__): path for module in ("pathlib", "pathlib._local")}
    for module in ("builtins", "__builtin__"):
        found[(module, "getattr")] = _enum_member
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return found | {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in dtypes}


def _enum_member(kind: Any, name: Any) -> Any:
    """Return an enum member, which Python 3.11 and later pickle as ``getattr(kind, name)``."""
    if kind is not _MEM_FORMAT_ENCODING or type(name) is not str or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("it asks for an attribute of something")
    return _MEM_FORMAT_ENCODING[name]


def _short(error: BaseException) -> str:
    """Return only the rejected name from torch's message."""
    named = _NAMED.search(str(error))
    if named:
        return f"it names {named[1]}"
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0][:200]
