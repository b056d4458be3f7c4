"""The function that a job applies to its inputs, and the output lines of inputs that succeed or fail."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from elastic.batch_inference.chunk_plan import InputLine
from elastic.batch_inference.work_directory import FAILED_LINE, OK_LINE
from elastic.errors import PolicyError

MAP_TASK_ENTRY_POINTS = "elastic.map_tasks"
MapFunction = Callable[[Any], Any]
"""A function of one input, or of a list of inputs if the batch size is above 1."""


def load_function(name: str, options: Mapping[str, Any]) -> MapFunction:
    """Return the function ``module:name``, ``file.py:name`` or the built-in task ``name``.

    A class is constructed with the options as keyword arguments. A function receives them with each input. Raises
    :class:`PolicyError` if the function is not found. Errors of its module or constructor reach the caller.
    """
    found = _find(name)
    if not callable(found):
        raise PolicyError(f"Cannot map {name!r}: it is a {type(found).__name__}, not a function or a class.")
    if not isinstance(found, type):
        return functools.partial(found, **options) if options else found
    function = found(**options)
    if not callable(function):
        raise PolicyError(f"Cannot map {name!r}: the class has no __call__ method.")
    return function


def resolve_options(task: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options that all nodes of a job use, or ``None`` if the task does not resolve them.

    A task with ``resolve_options`` fixes values that may differ when the next node starts.
    """
    resolve = getattr(_find(task), "resolve_options", None)
    return None if resolve is None else resolve(options)


def task_names() -> list[str]:
    """Return the names of the built-in tasks."""
    return sorted(entry_points(group=MAP_TASK_ENTRY_POINTS).names)


def _find(name: str) -> Any:
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        tasks = entry_points(group=MAP_TASK_ENTRY_POINTS, name=name)
        if not tasks:
            known = f" The built-in tasks are {', '.join(task_names())}." if task_names() else ""
            raise PolicyError(f"Cannot map {name!r}: write module:name or file.py:name.{known}")
        return next(iter(tasks)).load()
    module = _module_of_file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PolicyError(f"Cannot map {name!r}: {module_name} has no {attribute}.")
        found = getattr(found, part)
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise PolicyError(
            f"Cannot map a function of {name!r}: no such module is installed. For a file write file.py:name."
        ) from error


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise PolicyError(f"Cannot map a function of {str(path)!r}: there is no such file.")
    path = path.resolve()
    sys.path.insert(0, str(path.parent))  # as for a script: the file may import its neighbors
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"Cannot map a function of {str(path)!r}: it is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class MapTask:
    """A function with its retries: one stored line for each input, in order."""

    def __init__(self, function: MapFunction, *, takes_lists: bool, retries: int) -> None:
        self.function, self.takes_lists, self.retries = function, takes_lists, retries

    def lines_for(self, inputs: Sequence[InputLine]) -> list[bytes]:
        """Return the stored lines of a batch.

        If a batch fails, each of its inputs is processed alone. An input that fails ``retries`` + 1 times becomes a
        line with its error.
        """
        if self.takes_lists and len(inputs) > 1:
            try:
                return self._try([json.loads(line.text) for line in inputs])
            except Exception as error:  # noqa: BLE001 - the inputs report their own errors below
                print(
                    f"a batch of {len(inputs)} inputs from line {inputs[0].number} failed, and each input is processed "
                    f"alone: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )
        return [self._line_for(line) for line in inputs]

    def _line_for(self, line: InputLine) -> bytes:
        try:
            json.loads(line.text)
        except ValueError as error:
            return failed_line(line, type(error).__name__, f"the input is not JSON: {error}", attempts=0)
        for _ in range(self.retries + 1):
            try:
                return self._try([json.loads(line.text)])[0]  # the function may have changed the last copy
            except Exception as error:  # noqa: BLE001 - any error of the user's function
                kind, text = type(error).__name__, str(error)
        return failed_line(line, kind, text, attempts=self.retries + 1)

    def _try(self, values: list[Any]) -> list[bytes]:
        if not self.takes_lists:
            return [stored_line(self.function(value)) for value in values]
        results = self.function(values)
        if not isinstance(results, (list, tuple)) or len(results) != len(values):
            count = f"{len(results)} results" if isinstance(results, (list, tuple)) else type(results).__name__
            raise TypeError(f"the function must return a list of {len(values)} results and returned {count}")
        return [stored_line(result) for result in results]


def stored_line(output: Any) -> bytes:
    """Return the stored line of an output. Raises an error if it is not JSON."""
    return OK_LINE + json.dumps(output, ensure_ascii=False, allow_nan=False).encode()


def failed_line(line: InputLine, kind: str, message: str, *, attempts: int) -> bytes:
    """Return the stored line of an input that failed, with the input and its line number."""
    try:
        value = json.loads(line.text)
        json.dumps(value, allow_nan=False)
    except ValueError:
        value = line.text.decode(errors="replace")
    record = {"error": {"type": kind, "message": message, "attempts": attempts}, "line": line.number, "input": value}
    return FAILED_LINE + json.dumps(record).encode()
