"""Plain DCP checkpoints in an object store: their steps and files, and their deletion."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from tieredckpt.durable.object_store import ObjectInfo, ObjectStore
from tieredckpt.format import object_keys

DCP_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")
DCP_METADATA_NAME = ".metadata"


class PlainSteps(NamedTuple):
    """Steps of a job's plain checkpoints, in order."""

    complete: tuple[int, ...] = ()
    incomplete: tuple[int, ...] = ()
    """Steps with data files and no ``.metadata``, which DCP writes last."""


def list_plain_steps(store: ObjectStore, job: str, *, patience_s: float = math.inf) -> PlainSteps:
    """Return the steps of the job's plain checkpoints."""
    objects = store.list(object_keys.plain_prefix(job), patience_s=patience_s)
    files = [parsed for info in objects if (parsed := object_keys.parse_plain_key(info.name, job)) is not None]
    complete = {step for step, name in files if name == DCP_METADATA_NAME}
    begun = {step for step, name in files if DCP_FILE.fullmatch(name)}
    return PlainSteps(tuple(sorted(complete)), tuple(sorted(begun - complete)))


def list_plain_files(store: ObjectStore, job: str, step: int) -> dict[str, ObjectInfo]:
    """Return the files that DCP wrote for a step, by name. Other objects in their folder are ignored."""
    folder = f"{object_keys.plain_prefix(job, step)}/"
    found = {info.name.removeprefix(folder): info for info in store.list(folder)}
    return {name: info for name, info in found.items() if name == DCP_METADATA_NAME or DCP_FILE.fullmatch(name)}


def delete_plain_checkpoint(store: ObjectStore, job: str, step: int) -> bool:
    """Delete a plain checkpoint, even if it is incomplete. False: it does not exist.

    ``.metadata`` is deleted first, because no load takes a step without it.
    """
    files = list_plain_files(store, job, step)
    if not files:
        return False
    metadata = files.pop(DCP_METADATA_NAME, None)
    if metadata is not None:
        store.delete([metadata.name])
    store.delete([info.name for info in files.values()])
    return True
