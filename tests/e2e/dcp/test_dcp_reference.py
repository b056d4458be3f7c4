"""The same state through DCP's own files and through this package, with equal results.

If DCP's files refuse a tensor or end the process, this package raises an error that names the tensor.
"""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.agents import module_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.errors import UsageError

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


node = module_agent("alike")


class OpaqueTensor(torch.Tensor):
    """A wrapper whose content is hidden, because it has no ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride(), device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(OpaqueTensor, lambda one: one.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, OpaqueTensor, func(*args, **kwargs))


@pytest.fixture(autouse=True)
def allowed():
    """Allow the test's tensor classes, as a user must before ``dcp.load`` reads files."""
    with torch.serialization.safe_globals([TwoTensor, OpaqueTensor]):
        yield


class PlainFiles:
    """The reference: DCP's own files."""

    def __init__(self, path):
        self.path = path

    def writer(self, step=1):
        return dcp.FileSystemWriter(self.path)

    def reader(self, **options):
        return dcp.FileSystemReader(self.path)


class TieredStorage:
    def __init__(self, job):
        self.job = job

    def writer(self, step=1):
        return TieredWriter(self.job, step)

    def reader(self, **options):
        return TieredReader(self.job, **options)


_jobs = itertools.count()


@pytest.fixture
def ours():
    return TieredStorage(f"alike-{next(_jobs)}")


@pytest.fixture(params=["files", "ours"])
def storage(request, tmp_path):
    return PlainFiles(tmp_path / "files") if request.param == "files" else TieredStorage(f"alike-{next(_jobs)}")


def quantised(rows=4):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(rows, 4), 0.1, 0, torch.qint8)


def complex_numbers(*shape):
    return torch.randn(*shape, dtype=torch.complex64)


def inner_tensors(value):
    """Return a tensor as comparable tensors."""
    if isinstance(value, TwoTensor):
        return [inner_tensors(value.a), inner_tensors(value.b)]
    if isinstance(value, OpaqueTensor):
        return inner_tensors(value.inner)
    if value.is_quantized:
        return [value.int_repr(), torch.tensor(value.q_scale()), torch.tensor(value.q_zero_point())]
    return value.detach()


def dcp_save(state, storage, step=1, **kwargs):
    dcp.save(state, storage_writer=storage.writer(step), no_dist=True, **kwargs)


def dcp_async_save(state, storage, step=1):
    dcp.async_save(state, storage_writer=storage.writer(step)).result()


def dcp_load(state, storage, **options):
    dcp.load(state, storage_reader=storage.reader(**options), no_dist=True)


SAVED = {
    "flattened": lambda: TwoTensor(torch.randn(3, 4), torch.randn(3, 4)),
    "flattened, nested": lambda: TwoTensor(*(TwoTensor(torch.randn(3), torch.randn(3)) for _ in range(2))),
    "bare": lambda: OpaqueTensor(torch.randn(3, 4)),
    "quantised": quantised,
    "conjugate": lambda: complex_numbers(3).conj(),
    "negative": lambda: complex_numbers(3).conj().imag,
    "a transposed conjugate": lambda: complex_numbers(3, 4).mH,
}


@pytest.mark.parametrize("kind", SAVED)
def test_saved_tensor_round_trips(storage, kind):
    state = {"t": SAVED[kind](), "beside": torch.randn(5)}
    dcp_save(state, storage)
    target = {"t": SAVED[kind](), "beside": torch.zeros(5)}
    dcp_load(target, storage)
    assert type(target["t"]) is type(state["t"])
    assert_same_bits(inner_tensors(state["t"]), inner_tensors(target["t"]))
    assert_same_bits(state["beside"], target["beside"])


def made_in_inference():
    with torch.inference_mode():
        return torch.zeros(3)


TARGETS = {
    "conjugate": (lambda: complex_numbers(3, 4), lambda: torch.zeros(3, 4, dtype=torch.complex64).conj()),
    "negative": (lambda: torch.randn(3), lambda: torch.zeros(3, dtype=torch.complex64).conj().imag),
    "negative and in order": (lambda: torch.randn(6), lambda: torch._neg_view(torch.zeros(6))),
    "a wrapper of two": (lambda: torch.randn(3), lambda: TwoTensor(torch.zeros(3), torch.zeros(3))),
    "a bare wrapper": (lambda: torch.randn(3), lambda: OpaqueTensor(torch.zeros(3))),
    "strided": (lambda: torch.randn(3, 4), lambda: torch.zeros(4, 3).t()),
    "a view of a larger one": (lambda: torch.randn(3), lambda: torch.zeros(9)[3:6]),
    "made in inference": (lambda: torch.randn(3), made_in_inference),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets_of_any_kind_receive_the_values(storage, kind):
    saved, blank = (make() for make in TARGETS[kind])
    dcp_save({"t": saved}, storage)
    with torch.inference_mode(blank.is_inference()):
        dcp_load({"t": blank}, storage)
    for found in inner_tensors(blank) if isinstance(blank, TwoTensor) else [inner_tensors(blank)]:
        assert_same_bits(saved, found.resolve_neg())


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_autograd_detects_a_loaded_tensor(storage, kind):
    weight = torch.randn(3, requires_grad=kind == "parameter")
    dcp_save({"w": weight}, storage)
    factor = torch.randn(3, requires_grad=True)
    loss = (weight * factor).sum()
    before = weight._version
    dcp_load({"w": weight}, storage)
    assert weight._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def freed(left=0):
    tensor = torch.randn(1024)
    tensor.untyped_storage().resize_(left)
    return tensor


def freed_transposed():
    tensor = torch.randn(32, 32).t()
    tensor.untyped_storage().resize_(64)
    return tensor


def freed_view():
    base = torch.randn(1024)
    view = base[1000:]
    base.untyped_storage().resize_(4 * 1010)
    return view


REFUSED = {
    "fake": lambda: FakeTensorMode().from_tensor(torch.randn(3)),
    "zero": lambda: torch._efficientzerotensor((3,)),
    "freed": freed,
    "freed in part": lambda: freed(8),
    "freed, transposed": freed_transposed,
    "in a distant view": freed_view,
}


@pytest.mark.parametrize("how", ["save", "async_save", "load", "second save"])
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_memory_are_refused_by_name(ours, kind, how):
    """DCP's files refuse the first two, and end the process for the others."""
    good = {"inner": {"name": torch.randn(REFUSED[kind]().shape), "other": torch.randn(4)}}
    state = {"inner": {"name": REFUSED[kind](), "other": torch.randn(4)}}
    if how in ("load", "second save"):
        dcp_save(good, ours)
    do = {"load": lambda: dcp_load(state, ours), "async_save": lambda: dcp_async_save(state, ours, 2)}
    with pytest.raises((CheckpointException, UsageError)) as failure:
        do.get(how, lambda: dcp_save(state, ours, 2))()
    error = failure.value if isinstance(failure.value, UsageError) else failure.value.failures[0][0]
    assert isinstance(error, UsageError), repr(error)
    assert "inner.name" in str(error)
    if how == "second save":
        target = zeros_like_state(good)
        dcp_load(target, ours)
        assert_same_bits(good, target)


def test_quantized_view_stores_only_its_elements(ours):
    writer = ours.writer(1)
    dcp.save({"q": quantised(1 << 16)[:2]}, storage_writer=writer, no_dist=True)
    assert writer.record.size_bytes < 1 << 16


SPARSE = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "quantised": quantised,
    "flattened": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
    "bare": lambda: OpaqueTensor(torch.ones(3)),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_async_save_accepts_the_same_states_as_save(ours, kind):
    for step in range(2):
        state = {"t": SPARSE[kind](), "w": torch.randn(3)}
        dcp_save(state, ours, 2 * step)
        expected = state["w"].clone()
        future = dcp.async_save(state, storage_writer=ours.writer(2 * step + 1))
        state["w"].fill_(-1)
        future.result()
        target = {"w": torch.zeros(3)}
        dcp_load(target, ours, step=2 * step + 1)
        assert_same_bits(expected, target["w"])
    metadata = ours.reader().read_metadata().state_dict_metadata
    assert tuple(metadata["t"].size) == tuple(state["t"].shape)


def test_save_returns_its_location(storage):
    state = {"w": torch.randn(3)}
    saved = dcp.save(state, storage_writer=storage.writer(), no_dist=True)
    read = storage.reader().read_metadata()
    for metadata in (saved, read):
        assert metadata.storage_meta is not None
        assert "alike" in str(metadata.storage_meta.checkpoint_id) or "files" in str(
            metadata.storage_meta.checkpoint_id
        )
        assert metadata.storage_meta.save_id
    assert saved.storage_meta.save_id == read.storage_meta.save_id
    assert read.storage_meta.load_id


def strided_shards(path):
    """A 2 x 2 mesh, sharded twice along one dimension, as in FSDP2 over tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for rows in (8, 16):
        full = torch.arange(float(rows * 3)).view(rows, 3)
        # tp shards first, then dp shards the rest; the mesh has the opposite order
        local = distribute_tensor(full, mesh["tp"], [Shard(0)]).to_local()
        part = local.chunk(2)[mesh.get_local_rank("dp")].contiguous()
        state = {
            "t": DTensor.from_local(
                part, mesh, [_StridedShard(0, split_factor=2), Shard(0)], shape=full.shape, stride=full.stride()
            )
        }
        for one in (PlainFiles(f"{path}/{rows}"), TieredStorage("strided")):
            dcp.save(state, storage_writer=one.writer(rows))
            blank = {"t": torch.zeros_like(state["t"])}
            dcp.load(blank, storage_reader=one.reader())
            whole = {"t": torch.zeros(rows, 3)}
            dcp.load(whole, storage_reader=one.reader())
            found.append(torch.equal(blank["t"].to_local(), part) and torch.equal(whole["t"], full))
            dist.barrier()
    return found


def test_strided_shards(ranks, tmp_path):
    assert ranks.run(4, strided_shards, str(tmp_path)) == [[True] * 4] * 4


@pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="this torch does not support tensors with declared slices"
)
@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_tensors_with_declared_slices_round_trip(storage, how):
    """A plain tensor with two slices of a larger one, and padding between them."""
    if how == "async_save" and isinstance(storage, PlainFiles):
        pytest.skip("torch does not stage the slices of a tensor for its own files")

    def sliced(values, at):
        values.global_shape = (8, 2)
        values.global_offsets = at
        values.local_offsets = ((0, 0), (3, 0))
        values.local_sizes = ((2, 2), (1, 2))
        return values

    for step, at in enumerate([((1, 0), (6, 0)), ((0, 0), (7, 0)), ((0, 0), (7, 0))]):
        state = {"t": sliced(torch.randn(4, 2), at), "beside": torch.ones(2) * step}
        before = state["t"].clone()
        if how == "save":
            dcp_save(state, storage, step)
        else:
            dcp_async_save(state, storage, step)
        target = {"t": sliced(torch.zeros(4, 2), at), "beside": torch.zeros(2)}
        dcp_load(target, storage)
        assert torch.equal(target["t"][:2], before[:2])
        assert torch.equal(target["t"][3:], before[3:])
        assert target["beside"][0] == step
