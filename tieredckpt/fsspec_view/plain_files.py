"""PlainFiles: a plain DCP checkpoint in the durable tier, for reads of its files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.dcp.plain_checkpoints import read_dcp_metadata
from tieredckpt.durable.object_store import ObjectNotFoundError, ObjectStore
from tieredckpt.format import object_keys
from tieredckpt.fsspec_view.segmented_file import READ_BUFFER_BYTES, SegmentedFile
from tieredckpt.restore.step_index import ByteRange

DCP_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")
DCP_METADATA_NAME = ".metadata"


class PlainFiles:
    """Files that DCP wrote for one step. Other objects in their folder are ignored."""

    def __init__(self, open_store: Callable[[], ObjectStore], job: str, step: int) -> None:
        self.job = job
        self.step = step
        self._open_store = open_store
        self._folder = f"{object_keys.plain_prefix(job, step)}/"
        found = {info.name.removeprefix(self._folder): info for info in open_store().list(self._folder)}
        if DCP_METADATA_NAME not in found:
            raise ObjectNotFoundError(f"the plain checkpoint of step {step} of {job} was deleted")
        self.sizes = {
            name: info.size_bytes
            for name, info in found.items()
            if name == DCP_METADATA_NAME or DCP_FILE.fullmatch(name)
        }
        self.saved_ns = int(found[DCP_METADATA_NAME].modified_s * 1e9)

    def open(self, name: str) -> io.BufferedIOBase:
        """Open a file. ``.metadata`` is checked to be data first, because DCP unpickles it."""
        if name not in self.sizes:
            raise FileNotFoundError(f"tiered://{self.job}/step-{self.step} has no file {name}")
        store, key = self._open_store(), f"{self._folder}{name}"
        if name == DCP_METADATA_NAME:
            data = store.get(key)
            read_dcp_metadata(io.BytesIO(data), f"{store.url}/{key}")
            return io.BytesIO(data)
        whole = ByteRange(0, self.sizes[name])
        return io.BufferedReader(SegmentedFile([(0, whole)], _PlainFile(store, key), lambda: None), READ_BUFFER_BYTES)

    def delete(self) -> None:
        """Delete the files. Without ``.metadata``, which is deleted first, the step does not exist."""
        store = self._open_store()
        store.delete([f"{self._folder}{DCP_METADATA_NAME}"])
        store.delete([f"{self._folder}{name}" for name in self.sizes if name != DCP_METADATA_NAME])


@dataclass(frozen=True)
class _PlainFile:
    """Bytes of one file. The store remains open for other files."""

    store: ObjectStore
    key: str

    def read_into(self, target: memoryview, part: int, span: ByteRange) -> None:
        (target[:],) = self.store.get_ranges(self.key, [span])

    def close(self) -> None: ...
