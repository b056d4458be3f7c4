"""How many examples a property is tried with: a share of them in a push, all of them in a night."""

from __future__ import annotations

import hypothesis

_OF_A_NIGHT = 100
_FEWEST = 5


def examples(many: int) -> int:
    """``many`` in a night, and in a push as large a share of them as of those that a property has that says nothing."""
    return max(_FEWEST, many * hypothesis.settings.default.max_examples // _OF_A_NIGHT)
