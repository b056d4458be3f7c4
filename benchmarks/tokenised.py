"""Batches with realistic cost: generated text, tokenized into byte pairs in Python and packed."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter

import torch
from torch.utils.data import DataLoader, Dataset

EOS = 0
_SYLLABLES = ("ka", "ri", "to", "men", "sol", "ve", "an", "dir", "ul", "pes", "go", "tha", "in", "er", "sta", "qu")
_WORDS = 5_000
_MERGES = 600


def _words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 5))) for _ in range(count)]


@functools.cache
def vocabulary() -> list[str]:
    return _words(random.Random(1), _WORDS)


@functools.cache
def merges() -> dict[tuple[int, int], int]:
    """Return the most frequent byte pairs in merge order, learned from part of the vocabulary."""
    pieces = [list(word.encode()) for word in vocabulary()[:400]]
    learnt: dict[tuple[int, int], int] = {}
    for new in range(256, 256 + _MERGES):
        pairs = Counter(pair for piece in pieces for pair in itertools.pairwise(piece))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        learnt[best] = new
        pieces = [_joined(piece, best, new) for piece in pieces]
    return learnt


def _joined(piece: list[int], pair: tuple[int, int], new: int) -> list[int]:
    out, at = [], 0
    while at < len(piece):
        if at + 1 < len(piece) and (piece[at], piece[at + 1]) == pair:
            out.append(new)
            at += 2
        else:
            out.append(piece[at])
            at += 1
    return out


def tokenise(word: str) -> list[int]:
    """Return the tokens of a word: merge byte pairs in learned order, without a cache."""
    known, piece = merges(), list(word.encode())
    while len(piece) > 1:
        pairs = [(known[pair], pair) for pair in itertools.pairwise(piece) if pair in known]
        if not pairs:
            break
        new, pair = min(pairs)
        piece = _joined(piece, pair, new)
    return [token + 1 for token in piece]


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows packed with documents, of which the last one is truncated."""

    def __init__(self, rows: int, length: int) -> None:
        self._rows = rows
        self._length = length

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        rng, words = random.Random(row), vocabulary()
        tokens: list[int] = []
        documents: list[int] = []
        positions: list[int] = []
        document = 0
        while len(tokens) <= self._length:
            text = [token for word in rng.choices(words, k=rng.randint(20, 200)) for token in tokenise(word)]
            text.append(EOS)
            tokens += text
            documents += [document] * len(text)
            positions += range(len(text))
            document += 1
        return {
            "input_ids": torch.tensor(tokens[: self._length]),
            "labels": torch.tensor(tokens[1 : self._length + 1]),
            "document": torch.tensor(documents[: self._length]),
            "position": torch.tensor(positions[: self._length]),
        }


class From:
    """A batch sampler that starts at a batch number, so that a resumed job reads no skipped data."""

    def __init__(self, rows: int, batch_size: int, first: int = 0) -> None:
        self._starts = range(first * batch_size, rows, batch_size)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self):
        return (list(range(start, start + self._batch_size)) for start in self._starts)


def loader(batches: int, batch_size: int, length: int, *, first: int = 0, workers: int = 0) -> DataLoader:
    rows = batches * batch_size
    return DataLoader(PackedRows(rows, length), batch_sampler=From(rows, batch_size, first), num_workers=workers)
