"""Lines encoded as tokens: the labels and the weight of each token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.finetune.finetune_job import DataError
from integration.finetune.inputs import IGNORE_INDEX, SampleEncoder

BEGIN, END, VOCABULARY = 1, 2, 32


class Letters:
    """A tokenizer that maps each letter to its place in the alphabet plus 2."""

    def __init__(self, ends: bool = False, end: int | None = END) -> None:
        self.eos_token_id, self._ends = end, ends

    def __call__(self, text, add_special_tokens, verbose):
        letters = [ord(letter) - ord("a") + 3 for letter in text]
        return {"input_ids": [BEGIN, *letters, *([END] * self._ends)] if add_special_tokens else letters}


def encoder(length=16, too_long="cut", tokenizer=None):
    return SampleEncoder(tokenizer or Letters(), length, VOCABULARY, too_long)


def listed(sample):
    return tuple(part.tolist() for part in sample)


def test_every_token_of_a_text_and_its_end_counts():
    assert listed(encoder()({"text": "ab"}, "here")) == ([1, 3, 4], [3, 4, 2], [1, 1, 1])


@pytest.mark.parametrize("ends", [False, True])
def test_prompt_tokens_have_no_weight(ends):
    found = listed(encoder(tokenizer=Letters(ends))({"prompt": "ab", "completion": "c"}, "here"))
    assert found == ([1, 3, 4, 5], [3, 4, 5, 2], [0, 0, 1, 1])


def test_end_token_is_omitted_without_one_in_the_tokenizer():
    assert listed(encoder(tokenizer=Letters(end=None))({"text": "a"}, "here")) == ([1], [3], [1])


def test_labels_are_beside_their_tokens_as_elsewhere():
    line = {"input_ids": [5, 6, 7, 8], "labels": [IGNORE_INDEX, IGNORE_INDEX, 7, 9]}
    assert listed(encoder()(line, "here")) == ([5, 6, 7], [0, 7, 9], [0, 1, 1])


def test_weights_are_beside_the_tokens_they_are_of():
    line = {"input_ids": [5, 6, 7, 8], "weights": [9, 0, 0.5, 2]}
    assert listed(encoder()(line, "here")) == ([5, 6, 7], [6, 7, 8], [0, 0.5, 2])


def test_tokens_need_no_tokenizer():
    assert listed(SampleEncoder(None, 8, VOCABULARY)({"input_ids": [4, 5]}, "here")) == ([4], [5], [1])


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=12), st.integers(1, 8))
def test_samples_are_truncated_and_their_parts_have_equal_length(tokens, length):
    sample = encoder(length)({"input_ids": tokens}, "here")
    assert len(sample.ids) == len(sample.targets) == len(sample.weights) == max(1, min(length, len(tokens) - 1))
    assert sample.weights.sum() == max(0, min(length, len(tokens) - 1))
    assert (sample.ids.dtype, sample.weights.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"words": "a"}, "has words; a line needs text"),
        ({}, "has nothing"),
        ({"text": 3}, "text is 3"),
        ({"prompt": "a"}, "completion is None"),
        ({"completion": "a"}, "prompt is None"),
        ({"text": "~"}, "token 32 of the tokenizer, but the model has 32"),
        ({"input_ids": [32]}, "token 32, but the model has 32"),
        ({"input_ids": [-1]}, "token -1"),
        ({"input_ids": [IGNORE_INDEX, 4]}, f"token {IGNORE_INDEX}"),
        ({"input_ids": "ab"}, "are lists of numbers"),
        ({"input_ids": [1.5]}, "are lists of numbers"),
        ({"input_ids": [True]}, "are lists of numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, 1 labels, 2 weights"),
        ({"input_ids": [1, 2], "weights": [1, float("nan")]}, "a weight is 0 or more"),
        ({"input_ids": [1, 2], "weights": [1, -1]}, "a weight is 0 or more"),
    ],
)
def test_unusable_line_is_named(line, named):
    tokenizer = Wide() if line.get("text") == "~" else Letters()
    with pytest.raises(DataError, match=r"^here") as caught:
        encoder(tokenizer=tokenizer)(line, "here")
    assert named in str(caught.value)


class Wide(Letters):
    """A tokenizer with more words than the model."""

    def __call__(self, text, add_special_tokens, verbose):
        return {"input_ids": [VOCABULARY]}


def test_overlong_sample_is_an_error_when_requested():
    with pytest.raises(DataError, match="here has 6 tokens, --length is 4"):
        encoder(4, "error")({"text": "abcd"}, "here")
    assert len(encoder(5, "error")({"text": "abcd"}, "here").ids) == 5


def test_text_without_a_tokenizer_raises_with_advice():
    with pytest.raises(DataError, match="there is no tokenizer: set --tokenizer"):
        SampleEncoder(None, 8, VOCABULARY)({"text": "a"}, "here")
