"""Plain DCP checkpoints in an object store: their steps and files, and their deletion."""

from __future__ import annotations

import math
import re

from tieredckpt.durable.object_store import ObjectInfo, ObjectStore
from tieredckpt.format import object_keys

DCP_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")
DCP_METADATA_NAME = ".metadata"


def list_plain_steps(store: ObjectStore, job: str, *, patience_s: float = math.inf) -> list[int]:
    """Return the steps with a complete plain checkpoint, in order."""
    objects = store.list(object_keys.plain_prefix(job), patience_s=patience_s)
    found = (object_keys.parse_plain_key(info.name, job) for info in objects)
    return sorted({step for step in found if step is not None})


def list_plain_files(store: ObjectStore, job: str, step: int) -> dict[str, ObjectInfo]:
    """Return the files that DCP wrote for a step, by name. Other objects in their folder are ignored."""
    folder = f"{object_keys.plain_prefix(job, step)}/"
    found = {info.name.removeprefix(folder): info for info in store.list(folder)}
    return {name: info for name, info in found.items() if name == DCP_METADATA_NAME or DCP_FILE.fullmatch(name)}


def delete_plain_checkpoint(store: ObjectStore, job: str, step: int) -> bool:
    """Delete a plain checkpoint. False: it does not exist, or is incomplete.

    ``.metadata`` is deleted first, because a step without it does not exist.
    """
    files = list_plain_files(store, job, step)
    metadata = files.pop(DCP_METADATA_NAME, None)
    if metadata is None:
        return False
    store.delete([metadata.name])
    store.delete([info.name for info in files.values()])
    return True
