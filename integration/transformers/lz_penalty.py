"""The LZ penalty: a processor of scores that makes a model leave long repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


class LZPenalty(LogitsProcessor):
    """Lower the score of each token by the bits that an LZ77 coder would save with it.

    Let ``w`` be the last ``window`` tokens and ``V`` the number of tokens of the model. Some ends of ``w``
    occur earlier in ``w``, followed by a token ``a``. ``m(a)`` is the length of the longest, at most ``buffer``. The
    coder can replace these ``m`` tokens and ``a`` by one reference, of a position and a length::

        C(n) = log2(window) + log2(buffer + 1)                  bits of a reference to n tokens
        s(a) = max(0, log2(V) - C(m(a) + 1) / (m(a) + 1))       bits saved for each of its tokens
        score(a) <- score(a) - strength * ln(2) * s(a)          if m(a) >= min_match

    Tokens outside of ``w``, and tokens that follow no repeated end, keep their scores. So a word may return any number
    of times in new contexts, unlike with a repetition or frequency penalty. The penalty of a loop grows with its length
    and stays below ``strength * ln(V)``. The idea is that of arXiv 2504.20131.
    """

    def __init__(
        self,
        strength: float = 0.15,
        *,
        window: int = 512,
        buffer: int = 32,
        min_match: int = 1,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Set the sizes in tokens.

        ``starts`` is the position of each sequence's first token that is not padding.
        """
        if strength < 0 or window < 2 or not 1 <= min_match <= buffer < window:
            raise ValueError(
                f"strength {strength}, window {window}, buffer {buffer}, min_match {min_match}: strength must not be "
                "negative, and 1 <= min_match <= buffer < window must hold"
            )
        self.strength, self.window, self.buffer, self.min_match = strength, window, buffer, min_match
        self.starts = starts
        self._table: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token, lowered by the penalty. The arguments stay unchanged."""
        if self.strength == 0 or input_ids.shape[1] < 2:
            return scores
        lengths = self.match_lengths(input_ids)
        if self._table is None or self._table.device != scores.device:
            self._table = self._penalties(scores.shape[-1]).to(scores.device)
        found = self._table[lengths].to(scores.dtype)
        recent = input_ids[:, -self.window :]
        penalty = torch.zeros_like(scores).scatter_reduce_(1, recent, found, "amax")
        return scores - penalty

    def match_lengths(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return, for each of the recent tokens, how many tokens before it equal the end of the sequence."""
        total = input_ids.shape[1]
        recent = input_ids[:, -self.window :]
        if self.starts is not None:
            positions = torch.arange(total - recent.shape[1], total, device=recent.device)
            first = torch.tensor(self.starts, device=recent.device)[:, None]
            recent = recent.masked_fill(positions < first, -1)
        depth = min(self.buffer, recent.shape[1])
        end = recent[:, -depth:]
        # -2 before the first token, and -1 for padding: neither equals a token.
        before = torch.nn.functional.pad(recent[:, :-1], (depth, 0), value=-2).unfold(1, depth, 1)
        equal = (before == end[:, None]) & (end[:, None] >= 0)
        return equal.flip(2).cumprod(2, dtype=torch.int32).sum(2)

    def _penalties(self, vocabulary: int) -> torch.Tensor:
        """Return the penalty of each match length from 0 to ``buffer``."""
        reference = math.log2(self.window) + math.log2(self.buffer + 1)
        values = [
            self.strength * math.log(2) * max(0.0, math.log2(vocabulary) - reference / (length + 1))
            if length >= self.min_match
            else 0.0
            for length in range(self.buffer + 1)
        ]
        return torch.tensor(values)
