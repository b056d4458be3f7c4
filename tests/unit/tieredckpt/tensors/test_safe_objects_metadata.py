"""Reading ``.metadata`` takes time proportional to the file's size, for any contents."""

import io
import pickle
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tieredckpt.tensors.safe_objects import load_dcp_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def wide_key():
    """A key of 90^5 elements that its pickle names once each."""
    key = ("x",) * 90
    for _ in range(4):
        key = (key,) * 90
    return key


def keyed(key):
    """A dict with ``key``, which is never hashed here."""
    return b"\x80\x04}" + pickle.dumps(key, protocol=4)[11:-1] + b"K\x01s."


def indexed(key):
    body = pickle.dumps({"fqn": key, "offset": None, "index": None}, protocol=4)[11:-1]
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81" + body + b"b"
    return b"\x80\x04}" + index + b"K\x01s."


LOOKUPS = {
    "a layout": b"ctorch.serialization\n_get_layout\n",
    "a memory format": b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
}
BOMBS = {
    "a key": keyed,
    "an index": indexed,
    **{
        name: lambda key, call=call: b"\x80\x04" + call + pickle.dumps(key, protocol=4)[11:-1] + b"\x85R."
        for name, call in LOOKUPS.items()
    },
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_metadata_that_would_take_minutes_to_hash_is_refused(bomb):
    data = BOMBS[bomb](wide_key())
    assert len(data) < 2000
    began = time.process_time()
    with pytest.raises(pickle.UnpicklingError):
        load_dcp_metadata(io.BytesIO(data))
    assert time.process_time() - began < 1


def test_metadata_that_reads_one_long_size_again_and_again_is_refused():
    size = pickle.dumps((1,) * 20000, protocol=4)[11:-1]
    data = b"\x80\x04](" + size + b"ctorch\nSize\n\x94" + b"h\x01h\x00\x85R" * 20000 + b"e."
    began = time.process_time()
    with pytest.raises(pickle.UnpicklingError, match="more work"):
        load_dcp_metadata(io.BytesIO(data))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "harm", [{"state_dict_metadata": [1]}, {"state_dict_metadata": {1: 2}}, {"storage_data": 7}, {"planner_data": 7}]
)
def test_metadata_of_the_wrong_shape_is_refused(harm):
    data = pickle.dumps(Metadata(**{"state_dict_metadata": {}, "planner_data": None, "storage_data": {}, **harm}))
    with pytest.raises(pickle.UnpicklingError):
        load_dcp_metadata(io.BytesIO(data))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol_is_read(tmp_path, protocol):
    state = {"a": {"b": torch.ones(3, 4), "c": [1, "x"]}, "h": torch.ones(1).bool(), "scalar": torch.tensor(1.0)}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    found.storage_data[MetadataIndex("elsewhere", torch.Size([1 << 40, 2]), 3)] = next(
        iter(found.storage_data.values())
    )
    assert load_dcp_metadata(io.BytesIO(pickle.dumps(found, protocol=protocol))) == found
