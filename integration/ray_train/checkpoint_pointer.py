"""The file that Ray stores as a checkpoint: job, step and durable tier of the saved state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from pyarrow.fs import FileType
from ray.train import Checkpoint

from peerstore.message_codec import from_json
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError, UsageError

POINTER_NAME = "tieredckpt.json"
_FORMAT = 1


class CheckpointPointer(msgspec.Struct, frozen=True):
    """Contents of the file in one of Ray's checkpoints."""

    job: str
    step: int
    durable_url: str = ""
    """Durable tier of the job, or nothing."""
    kept: dict[str, str] = {}
    """Paths of Ray's older checkpoints whose steps are retained, by step."""
    format: int = _FORMAT


@contextmanager
def pointer_directory(pointer: CheckpointPointer) -> Iterator[Checkpoint]:
    """Yield a local checkpoint with the pointer only, for Ray to copy into its storage."""
    with tempfile.TemporaryDirectory(prefix="tieredckpt-ray-") as directory:
        (Path(directory) / POINTER_NAME).write_bytes(msgspec.json.encode(pointer))
        yield Checkpoint.from_directory(directory)


def read_pointer(checkpoint: Checkpoint) -> CheckpointPointer:
    """Return the pointer in ``checkpoint``.

    - :class:`CheckpointNotFoundError`: Ray has deleted the checkpoint.
    - :class:`UsageError`: other code wrote the checkpoint.
    - :class:`CheckpointDamagedError`: the file is not a pointer.
    - :class:`TierUnavailableError`: the storage fails.
    """
    path = f"{checkpoint.path}/{POINTER_NAME}"
    try:
        if is_deleted(checkpoint):
            raise CheckpointNotFoundError(f"Ray's storage has no checkpoint {checkpoint.path}: Ray has deleted it")
        with checkpoint.filesystem.open_input_stream(path) as stream:
            content = stream.read()
    except FileNotFoundError as error:
        raise UsageError(
            f"{checkpoint.path} has no {POINTER_NAME}, so integration.ray_train.report did not write it. Load it with "
            "the code that saved it"
        ) from error
    except OSError as error:
        raise TierUnavailableError(f"Ray's storage cannot read {path}: {error}") from error
    try:
        pointer = from_json(content, CheckpointPointer)
    except msgspec.DecodeError as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error}") from error
    if pointer.format != _FORMAT:
        raise UsageError(f"{path} has format {pointer.format}, and this release reads format {_FORMAT}: upgrade it")
    return pointer


def is_deleted(checkpoint: Checkpoint) -> bool:
    """Return whether the storage answers that it has no such checkpoint."""
    return bool(checkpoint.filesystem.get_file_info(checkpoint.path).type == FileType.NotFound)
