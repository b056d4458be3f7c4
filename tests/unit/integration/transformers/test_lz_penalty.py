"""The LZ penalty equals its definition, and leaves tokens without a repetition alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from integration.transformers.lz_penalty import LZPenalty

VOCABULARY = 200


def defined_penalty(tokens, token, *, strength, window, buffer, min_match):
    """Compute the penalty by its definition, with loops over Python lists."""
    recent = tokens[-window:]
    longest = -1
    for position, found in enumerate(recent):
        if found == token:
            length = 0
            while length < min(buffer, position) and recent[position - 1 - length] == recent[-1 - length]:
                length += 1
            longest = max(longest, length)
    if longest < min_match:
        return 0.0
    reference = math.log2(window) + math.log2(buffer + 1)
    return strength * math.log(2) * max(0.0, math.log2(VOCABULARY) - reference / (longest + 1))


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    window=st.integers(3, 20),
    buffer=st.integers(1, 9),
    data=st.data(),
)
def test_penalty_equals_its_definition(tokens, window, buffer, data):
    buffer = min(buffer, window - 1)
    options = {"window": window, "buffer": buffer, "min_match": data.draw(st.integers(1, buffer)), "strength": 0.5}
    scores = torch.zeros(1, VOCABULARY)
    found = LZPenalty(**options)(torch.tensor([tokens]), scores)
    expected = [-defined_penalty(tokens, token, **options) if len(tokens) > 1 else 0.0 for token in range(VOCABULARY)]
    torch.testing.assert_close(found[0], torch.tensor(expected))
    assert not scores.any()  # the argument is unchanged


@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=20), padding=st.integers(0, 9))
def test_padding_changes_nothing(tokens, padding):
    # The padding token is also a token of the text, as the end token is in many models.
    scores = torch.randn(1, VOCABULARY)
    alone = LZPenalty(0.3)(torch.tensor([tokens]), scores)
    padded = LZPenalty(0.3, starts=[padding])(torch.tensor([[0] * padding + tokens]), scores)
    assert torch.equal(alone, padded)


def test_sequences_of_a_batch_are_independent():
    rows = torch.randint(0, 4, (5, 30), generator=torch.Generator().manual_seed(1))
    scores = torch.randn(5, VOCABULARY)
    together = LZPenalty(0.3)(rows, scores)
    for row in range(5):
        assert torch.equal(LZPenalty(0.3)(rows[row : row + 1], scores[row : row + 1])[0], together[row])


def test_penalty_grows_with_the_repetition_and_is_bounded():
    penalties = []
    for repeats in range(1, 12):
        scores = LZPenalty(0.15)(torch.tensor([[7, 8, 9] * repeats]), torch.zeros(1, VOCABULARY))
        penalties.append(-scores[0, 7].item())
    assert penalties == sorted(penalties)
    assert penalties[0] == 0.0
    assert 0.5 * 0.15 * math.log(VOCABULARY) < penalties[-1] < 0.15 * math.log(VOCABULARY)


def test_common_tokens_in_new_contexts_keep_their_scores():
    tokens = [token for number in range(10, 60) for token in (1, number)]  # token 1 is every other token
    scores = torch.zeros(1, VOCABULARY)
    assert torch.equal(LZPenalty(1.0)(torch.tensor([tokens]), scores), scores)


def test_strength_zero_changes_nothing():
    scores = torch.randn(1, VOCABULARY)
    assert LZPenalty(0.0)(torch.tensor([[1] * 20]), scores) is scores


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_of_the_scores_stays(dtype):
    scores = torch.zeros(1, VOCABULARY, dtype=dtype)
    found = LZPenalty(0.5)(torch.tensor([[1] * 20]), scores)
    assert found.dtype == dtype
    assert found[0, 1] < 0


@pytest.mark.parametrize("options", [{"strength": -1}, {"window": 1}, {"buffer": 0}, {"min_match": 40}, {"window": 32}])
def test_impossible_sizes_are_an_error(options):
    with pytest.raises(ValueError, match="must hold"):
        LZPenalty(**options)
