"""Samples for the loader: tokenised once a node, a block of neighbours at a time, whatever becomes of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.prepared import BatchCache
from integration.finetune.corpus import Corpus
from integration.finetune.encoding import Encoder

_BLOCK = 16
_MULTIPLE = 8
"""Lengths that devices like."""


class Samples:
    """A dataset. A block is prepared when the first of its samples is asked for, and mapped from then on."""

    def __init__(self, corpus: Corpus, encoder: Encoder, cache: BatchCache) -> None:
        self._corpus = corpus
        self._encoder = encoder
        self._cache = cache

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        number, place = divmod(index, _BLOCK)
        block = self._cache.get(number, self.prepare)
        start, end = block["starts"][place : place + 2].tolist()
        return block["ids"][start:end], block["targets"][start:end], block["weights"][start:end]

    def prepare(self, number: int) -> dict[str, torch.Tensor]:
        """Tokenise one block."""
        first = number * _BLOCK
        indices = range(first, min(first + _BLOCK, len(self._corpus)))
        found = [self._encoder(self._corpus[index], self._corpus.where(index)) for index in indices]
        starts = torch.tensor([0, *(len(one.ids) for one in found)]).cumsum(0)
        parts = zip(("ids", "targets", "weights"), zip(*found, strict=True), strict=True)
        return {"starts": starts, **{name: torch.cat([torch.from_numpy(one) for one in all_]) for name, all_ in parts}}


@dataclass(frozen=True)
class Padded:
    """What one forward and backward works on: rows of the same length."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Padded:
        return Padded(*(one.to(device, non_blocking=True) for one in (self.ids, self.targets, self.weights)))

    def pin_memory(self) -> Padded:
        return Padded(self.ids.pin_memory(), self.targets.pin_memory(), self.weights.pin_memory())


def padded(samples: Sequence[Any]) -> Padded:
    """On the right, where nothing before it sees it, with what does not count."""
    longest = max(len(ids) for ids, _, _ in samples)
    width = -(-longest // _MULTIPLE) * _MULTIPLE
    shape = (len(samples), width)
    ids, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    weights = torch.zeros(shape)
    for row, (one, after, counted) in enumerate(samples):
        ids[row, : len(one)] = one
        targets[row, : len(one)] = after
        weights[row, : len(one)] = counted
    return Padded(ids, targets, weights)
