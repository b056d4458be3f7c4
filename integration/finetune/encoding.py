"""From a line to tokens, what is to be predicted after each, and how much that counts.

::

    {"text": ...}                                       every token counts
    {"prompt": ..., "completion": ...}                  those of the completion count, and the end
    {"input_ids": [...], "labels": [...]}               labels of -100 do not count, all others do; without, all
    {"input_ids": [...], "weights": [...]}              each as much as is said
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from integration.finetune.errors import DataError

UNCOUNTED = -100
"""A label that is not to be predicted, as Transformers has it."""
_KINDS = "text; prompt and completion; or input_ids, with labels or weights"


class Sample(NamedTuple):
    """One sample; all three as long as one another."""

    ids: np.ndarray
    targets: np.ndarray
    """The token after each."""
    weights: np.ndarray
    """Of predicting it; 0: it does not count."""


class Encoder:
    """A tokenizer with the length that a sample may have. The same line always gives the same sample."""

    def __init__(self, tokenizer: Any, length: int, vocabulary: int, too_long: Literal["cut", "error"] = "cut") -> None:
        self._tokenizer = tokenizer
        self._length = length
        self._vocabulary = vocabulary
        self._too_long = too_long

    def __call__(self, line: Mapping[str, Any], where: str) -> Sample:
        tokens, labels, weights = self._tokens(line, where)
        if len(tokens) > self._length + 1:
            if self._too_long == "error":
                raise DataError(
                    f"{where} has {len(tokens)} tokens, --length is {self._length}: cut it, leave it out, or say "
                    "--too-long cut"
                )
            end = self._length + 1
            tokens, labels, weights = tokens[:end], labels[:end], weights[:end]
        ids = np.asarray(tokens[:-1] or tokens or [0], np.int32)
        if len(tokens) < 2:  # there is nothing after it
            return Sample(ids, np.zeros(len(ids), np.int32), np.zeros(len(ids), np.float32))
        targets, counted = np.asarray(labels[1:], np.int32), np.asarray(weights[1:], np.float32)
        counted[targets == UNCOUNTED] = 0
        targets[targets == UNCOUNTED] = 0
        return Sample(ids, targets, counted)

    def _tokens(self, line: Mapping[str, Any], where: str) -> tuple[list[int], list[int], list[float]]:
        if "input_ids" in line:
            return self._given(line, where)
        if "prompt" in line or "completion" in line:
            prompt = self._encoded(line, "prompt", where, begins=True)
            rest = self._encoded(line, "completion", where, begins=False) + self._end()
            weights = [0.0] * len(prompt) + [1.0] * len(rest)
            return prompt + rest, prompt + rest, weights
        if "text" in line:
            tokens = self._encoded(line, "text", where, begins=True) + self._end()
            return tokens, tokens, [1.0] * len(tokens)
        raise DataError(f"{where} has {', '.join(sorted(map(str, line))) or 'nothing'}; a line needs {_KINDS}")

    def _given(self, line: Mapping[str, Any], where: str) -> tuple[list[int], list[int], list[float]]:
        tokens = line["input_ids"]
        labels, weights = line.get("labels", tokens), line.get("weights")
        if not _all(tokens, int) or not _all(labels, int) or not (weights is None or _all(weights, (int, float))):
            raise DataError(f"{where}: input_ids, labels and weights are lists of numbers")
        weights = [1.0] * len(tokens) if weights is None else weights
        if not len(tokens) == len(labels) == len(weights):
            raise DataError(
                f"{where}: {len(tokens)} input_ids, {len(labels)} labels, {len(weights)} weights: as many of each"
            )
        beyond = [one for one in (*tokens, *labels) if not 0 <= one < self._vocabulary and one != UNCOUNTED]
        if beyond or UNCOUNTED in tokens:
            raise DataError(f"{where}: token {(beyond or [UNCOUNTED])[0]}, but the model has {self._vocabulary}")
        if any(not 0 <= one < float("inf") for one in weights):
            raise DataError(f"{where}: a weight is 0 or more")
        return list(tokens), list(labels), [float(one) for one in weights]

    def _encoded(self, line: Mapping[str, Any], name: str, where: str, *, begins: bool) -> list[int]:
        text = line.get(name)
        if not isinstance(text, str):
            raise DataError(f"{where}: {name} is {text!r}: it is to be text")
        if self._tokenizer is None:
            raise DataError(f"{where} has {name}, and there is no tokenizer: say --tokenizer, or bring input_ids")
        found: list[int] = self._tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        while begins and found and found[-1] == end:  # some put an end to everything; ours comes once, in the end
            found = found[:-1]
        beyond = [one for one in found if one >= self._vocabulary]
        if beyond:
            raise DataError(f"{where}: token {beyond[0]} of the tokenizer, but the model has {self._vocabulary}")
        return found

    def _end(self) -> list[int]:
        end = None if self._tokenizer is None else self._tokenizer.eos_token_id
        return [] if end is None else [end]


def _all(values: Any, kind: Any) -> bool:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return False
    return all(isinstance(one, kind) and not isinstance(one, bool) for one in values)
