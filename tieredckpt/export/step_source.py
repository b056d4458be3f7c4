"""Verified reads of the tensors and objects of one stored step, one at a time."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch

from peerstore.client.store_api import Store
from tieredckpt.agent.agent_api import StepDescription
from tieredckpt.durable.object_store import ObjectNotFoundError, ObjectStore
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError
from tieredckpt.format.shard_layout import TensorEntry
from tieredckpt.format.slice_boxes import Box, full_box, relative_box
from tieredckpt.restore.step_index import ByteRange, StepIndex, TensorPiece
from tieredckpt.restore.tier_reader import TierReader
from tieredckpt.restore.verified_reads import PinnedShards
from tieredckpt.session.peer_reader import PeerReader
from tieredckpt.tensors.plain_tensors import dtype_from_name

log = logging.getLogger(__name__)


class StepSource:
    """Tensors and objects of one step.

    If a copy is damaged or gone, the next one is read: from this node, from other nodes, from the durable tier.
    """

    def __init__(
        self,
        of: StepDescription | StepIndex,
        memory: Store | None,
        durable: Callable[[], ObjectStore],
        peers: PeerReader | None = None,
    ) -> None:
        self.step = of if isinstance(of, StepIndex) else StepIndex(of)
        self._pinned = PinnedShards(memory, self.step.group) if memory is not None else None
        self._shards = TierReader(self.step, self._pinned, peers, durable)

    @property
    def bytes_by_tier(self) -> Mapping[str, int]:
        return self._shards.bytes_by_tier

    def entry(self, name: str) -> TensorEntry:
        """Return an entry of the tensor for its type and shape; its box covers one piece."""
        return self.step.tensors[name][0].entry

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor, assembled from its pieces."""
        box = full_box(self.entry(name).shape)
        pieces = self.step.pieces(name, box)
        if len(pieces) == 1 and pieces[0].item >= 0:
            return self._archived(pieces[0])
        return self.part(name, box)

    def part(self, name: str, box: Box) -> torch.Tensor:
        """Return the region ``box`` of a tensor, assembled from its pieces."""
        entry = self.entry(name)
        # Copied as integers: torch only stores some element types, and no element may be converted.
        out = torch.empty(box.sizes, dtype=_carrier(entry.itemsize))
        for piece in self.step.pieces(name, box):
            target = _cut(out, relative_box(piece.box, box))
            if piece.item >= 0:
                saved = self._archived(piece)
                target.copy_(_cut(saved.to_dense(), relative_box(piece.box, piece.entry.box)).view(out.dtype))
            elif target.is_contiguous() and piece.box == piece.entry.box:
                self.read_into(tensor_raw_bytes(target), piece.part, self.step.tensor_range(piece))
            else:
                target.copy_(self._strided(piece))
        return out.view(dtype_from_name(entry.dtype))

    def object_bytes(self, name: str) -> bytes:
        """Return the bytes of an object as the planner wrote them.

        Of several ranks' objects, the first is used.
        """
        part = self.step.object_part(name, 0)
        return self._item(part, self.step.objects[name][part])

    def read_into(self, target: memoryview, part: int, span: ByteRange) -> None:
        """Read exactly the bytes of ``span`` of a shard into ``target``, or raise."""
        done = 0
        try:
            for data in self._shards.windows(part, span):
                target[done : done + len(data)] = data
                done += len(data)
        except ObjectNotFoundError as error:
            raise CheckpointDamagedError(f"{self.step.shards[part].key}: {error}") from error

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.release()

    def _strided(self, piece: TensorPiece) -> torch.Tensor:
        """Return a piece that is not contiguous in its shard: read its range and view it with strides."""
        entry = piece.entry
        span = self.step.tensor_range(piece)
        buffer = torch.empty(span.stop - span.start, dtype=torch.uint8)
        self.read_into(tensor_raw_bytes(buffer), piece.part, span)
        strides = [math.prod(entry.box.sizes[axis + 1 :]) for axis in range(len(entry.box.sizes))]
        return torch.as_strided(buffer.view(_carrier(entry.itemsize)), piece.box.sizes, strides)

    def _archived(self, piece: TensorPiece) -> torch.Tensor:
        saved = torch.load(io.BytesIO(self._item(piece.part, piece.item)), map_location="cpu", weights_only=True)
        if not isinstance(saved, torch.Tensor):
            raise CheckpointDamagedError(f"{piece.entry.fqn}: the archive holds a {type(saved).__name__}")
        return saved

    def _item(self, part: int, number: int) -> bytes:
        span = self.step.item_range(part, number)
        out = bytearray(span.stop - span.start)
        self.read_into(memoryview(out), part, span)
        return bytes(out)


def _carrier(itemsize: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[itemsize]


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor


def tensor_raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


@contextlib.contextmanager
def without_torch_warnings() -> Iterator[None]:
    """Suppress torch's warnings about deliberate uses while the block runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def selected_names(
    step: StepIndex, *, prefix: str, select: tuple[str, ...], exclude: tuple[str, ...]
) -> dict[str, str]:
    """Return the tensors and objects to export: stored name to exported name."""
    from fnmatch import fnmatchcase

    names = {
        name: name.removeprefix(prefix) or name
        for name in sorted([*step.tensors, *step.objects])
        if name.startswith(prefix)
        and (not select or any(fnmatchcase(name, pattern) for pattern in select))
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    if not names:
        raise CheckpointNotFoundError(
            f"no name in step {step.group.version} begins with {prefix!r} and is selected; `tieredckpt inspect` lists "
            "them"
        )
    return names
