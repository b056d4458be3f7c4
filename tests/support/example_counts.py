"""Numbers of examples for property tests: all in a nightly run, a share on a push."""

from __future__ import annotations

import hypothesis

_OF_A_NIGHT = 100
_FEWEST = 5


def examples(many: int) -> int:
    """Scale ``many`` by the profile's ``max_examples`` over 100: all of them in a nightly run."""
    return max(_FEWEST, many * hypothesis.settings.default.max_examples // _OF_A_NIGHT)
