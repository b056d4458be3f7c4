"""Any sharding of any world loads into any other bit for bit, and reads only the needed bytes.

Most cases run in one process with the real store, layouts, reader and votes, and boxes cut as torch cuts them. A few
cases run between real ranks.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from peerstore.shard_records import ShardKey
from tests.support.bits import tensor_bytes
from tests.support.example_counts import examples
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.format.manifest import StateTable, TableTensor
from tieredckpt.format.shard_layout import TensorEntry, build_layout
from tieredckpt.format.slice_boxes import Box, full_box
from tieredckpt.session.incarnation import Incarnation, SaveDecision
from tieredckpt.session.session import open_session
from tieredckpt.settings import load_settings
from tieredckpt.tensors.plain_tensors import dtype_name
from tieredckpt.tensors.slot_copy import Copier, SlotWrite
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "resharded"
DTYPES = [
    *(torch.bool, torch.int8, torch.int64, torch.uint16, torch.bfloat16, torch.float16, torch.float32),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


def counted(dtype, shape):
    """Return a tensor whose bytes differ by position."""
    count = dtype.itemsize * torch.Size(shape).numel()
    data = (torch.arange(count, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)
    return (data & 1 if dtype is torch.bool else data).view(dtype).view(shape)


def cut(box, axis, count, index):
    """Return the piece of ``box`` that ``Shard(axis)`` assigns to member ``index`` of ``count``."""
    full = -(-box.sizes[axis] // count)
    start = min(full * index, box.sizes[axis])
    size = min(full, box.sizes[axis] - start)
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis], sizes[axis] = box.offsets[axis] + start, size
    return Box(tuple(offsets), tuple(sizes))


def shards(shape, mesh, placements):
    """Return every rank's box; ``None`` in ``placements`` is a replicated dimension of the mesh."""
    boxes = []
    for place in itertools.product(*(range(size) for size in mesh)):
        box = full_box(shape)
        for count, index, axis in zip(mesh, place, placements, strict=True):
            if axis is not None:
                box = cut(box, axis, count, index)
        boxes.append(box)
    return boxes


meshes = st.one_of(
    st.integers(1, 8).map(lambda n: (n,)),
    st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]),
)


@st.composite
def shardings(draw, rank):
    """Draw a mesh of up to 8 ranks and a placement for each dimension: FSDP, TP, HSDP or a mix."""
    mesh = draw(meshes)
    return mesh, tuple(draw(st.none() | st.integers(0, rank - 1)) if rank else None for _ in mesh)


@st.composite
def reshardings(draw):
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    return shape, draw(shardings(len(shape))), draw(shardings(len(shape)))


class CountingCopier(Copier):
    """A copier that counts the bytes read from shards."""

    def __init__(self):
        super().__init__(1)
        self.read_bytes = 0

    def copy_from_file(self, fd, moves):
        self.read_bytes += sum(move.size_bytes for move in moves)
        super().copy_from_file(fd, moves)


def part_of(tensor, box):
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def save_as(session, step, tensors, boxes_of, owners):
    """Save one shard per rank; for equal boxes, only the owner writes."""
    parts = len(next(iter(boxes_of.values())))
    table = StateTable(tuple(TableTensor(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()), ())
    decision = SaveDecision(
        JOB, step, Incarnation(step + 1, f"i{step}"), parts, attempt=0, base=None, newest_complete=None
    )
    session.adopt(decision, session.incarnation.capture())
    for part in range(parts):
        mine = []
        for name, tensor in tensors.items():
            box = boxes_of[name][part]
            holders = [other for other in range(parts) if boxes_of[name][other] == box]
            if holders[owners[name] % len(holders)] == part:
                mine.append(
                    TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), box, tensor.dtype.itemsize, True)
                )
        layout = build_layout(mine, [], None)
        key = ShardKey(JOB, step, step + 1, f"i{step}", 0, part)
        staged = session.slots.lease(key, parts, layout, 0, wait_s=5)
        header = layout.header_bytes
        pieces = [SlotWrite(part_of(tensors[e.fqn], e.box).contiguous(), header + e.start) for e in layout.tensors]
        staged.memory.copy_in(pieces, session.copier)
        session.seal(staged, key, [], durable=False, table=table)


class BoxPlanner(dcp.DefaultLoadPlanner):
    """A planner that requests one box of each tensor, as the default does for a DTensor's local part."""

    def __init__(self, boxes):
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self):
        items = []
        for name, box in self.boxes.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item):
        offsets = tuple(read_item.dest_offsets)
        return part_of(self.state_dict[read_item.dest_index.fqn], Box(offsets, tuple(read_item.lengths)))

    def commit_tensor(self, read_item, tensor):
        pass


@settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(reshardings(), st.sampled_from(DTYPES)), min_size=1, max_size=2),
    st.integers(0, 7),
    st.integers(1, 8),
)
def test_any_sharding_loads_into_any_other(tensors, owner, world):
    """One state may have tensors of different meshes, brought to the same number of ranks."""
    shape_of = {f"t{i}": (shape, dtype) for i, ((shape, _, _), dtype) in enumerate(tensors)}
    saved, wanted = {}, {}
    for i, ((shape, (mesh, placements), (other, places)), _) in enumerate(tensors):
        boxes = shards(shape, mesh, placements)
        saved[f"t{i}"] = [boxes[rank % len(boxes)] for rank in range(world)]
        saved[f"t{i}"] += [box for box in boxes if box not in saved[f"t{i}"]]
        wanted[f"t{i}"] = shards(shape, other, places)
    ranks = max(map(len, saved.values()))
    saved = {name: boxes + [boxes[0]] * (ranks - len(boxes)) for name, boxes in saved.items()}
    values = {name: counted(dtype, shape) for name, (shape, dtype) in shape_of.items()}
    with memory_node():
        session = open_session(JOB, load_settings({}))
        session.copier.close()
        session.copier = CountingCopier()
        save_as(session, 3, values, saved, dict.fromkeys(values, owner))
        for rank in range(max(map(len, wanted.values()))):
            boxes = {name: found[rank % len(found)] for name, found in wanted.items()}
            target = {name: zeros(values[name], box) for name, box in boxes.items()}
            reader = TieredReader(JOB)
            session.copier.read_bytes = 0
            dcp.load(target, storage_reader=reader, planner=BoxPlanner(boxes), no_dist=True)
            needed = sum(part.nbytes for part in target.values())
            for name, box in boxes.items():
                assert tensor_bytes(target[name]) == tensor_bytes(part_of(values[name], box)), (name, box)
            # fewer bytes, because pieces of a column are read through a mapping
            assert session.copier.read_bytes <= needed == sum(reader.report.bytes_by_tier.values())


def zeros(tensor, box):
    return torch.zeros(part_of(tensor, box).nbytes, dtype=torch.uint8).view(tensor.dtype).view(box.sizes)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), st.data())
def test_slices_match_those_of_torch(shape, data):
    axis, count = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 8))
    tensor = counted(torch.int64, shape)
    pieces = list(torch.chunk(tensor, count, dim=axis))
    for index, box in enumerate(shards(shape, (count,), (axis,))):
        expected = pieces[index] if index < len(pieces) else tensor.narrow(axis, 0, 0)
        assert tensor_bytes(part_of(tensor, box)) == tensor_bytes(expected.contiguous())


# -- between real ranks -------------------------------------------------------------------------------------------

SHAPES = {"rows": (13, 5), "columns": (3, 17), "grid": (9, 10), "line": (7,), "wide": (512, 512), "one": (1,)}
KINDS = {
    "rows": lambda world: ((world,), [Shard(0)]),
    "columns": lambda world: ((world,), [Shard(-1)]),
    "copies": lambda world: ((world,), [Replicate()]),
    "hsdp": lambda world: ((max(1, world // 2), min(2, world)), [Replicate(), Shard(0)]),
    "grid": lambda world: ((max(1, world // 2), min(2, world)), [Shard(0), Shard(-1)]),
}


def distributed(kind, blank):
    """Distribute every shape, with some types, over the full mesh of this world."""
    mesh_shape, placements = KINDS[kind](dist.get_world_size())
    mesh = init_device_mesh("cpu", mesh_shape)
    state = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        full = counted((torch.float32, torch.bfloat16, torch.int64)[number % 3], shape)
        state[name] = distribute_tensor(torch.zeros_like(full) if blank else full, mesh, placements, src_data_rank=None)
    return state


def save_on_ranks(kind):
    dcp.save(distributed(kind, blank=False), storage_writer=TieredWriter(f"tiered://{JOB}", 1))


def load_on_ranks(kind):
    state, expected = distributed(kind, blank=True), distributed(kind, blank=False)
    reader = TieredReader(f"tiered://{JOB}")
    dcp.load(state, storage_reader=reader)
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        assert tensor_bytes(tensor) == tensor_bytes(expected[name]), name
    needed = sum(tensor.to_local().nbytes for tensor in state.values())
    return sum(reader.report.bytes_by_tier.values()), needed


@pytest.mark.parametrize(
    ("before", "saved", "after", "loaded"),
    [
        (1, "copies", 4, "rows"),
        (3, "columns", 2, "rows"),
        (4, "grid", 2, "columns"),
        (4, "grid", 4, "hsdp"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                (2, "rows", 3, "columns"),
                (4, "hsdp", 3, "rows"),
                (2, "columns", 4, "grid"),
                (8, "rows", 3, "columns"),
            )
        ),
    ],
)
def test_real_ranks_load_another_sharding(agent_dir, ranks, before, saved, after, loaded):
    ranks.run(before, save_on_ranks, saved)
    for moved, needed in ranks.run(after, load_on_ranks, loaded):
        assert moved == needed
