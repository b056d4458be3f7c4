"""RestorePlanner: DCP's load plan of a whole state, made directly where an entry is one tensor of one piece."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem


class RestorePlanner(DefaultLoadPlanner):
    """Plans the same read items as DCP's planner, without its search for the pieces that overlap."""

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None or self.state_dict.keys() != self.metadata.state_dict_metadata.keys():
            return super().create_local_plan()
        items: list[ReadItem] = []
        for fqn, value in self.state_dict.items():
            item = _whole_tensor(fqn, value, self.metadata)
            if item is not None:
                items.append(item)
            else:
                items += create_default_local_load_plan({fqn: value}, self.metadata, strict=True).items
        return LoadPlan(items)


def _whole_tensor(fqn: str, value: Any, metadata: Metadata) -> ReadItem | None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or hasattr(value, "__create_chunk_list__"):
        return None
    saved = metadata.state_dict_metadata[fqn]
    if not isinstance(saved, TensorStorageMetadata) or saved.size != value.shape or not value.numel():
        return None
    if len(saved.chunks) != 1 or saved.chunks[0].sizes != saved.size:
        return None
    start = saved.chunks[0].offsets
    index = MetadataIndex(fqn, start, 0)
    return ReadItem(LoadItemType.TENSOR, index, start, index, start, saved.size)
