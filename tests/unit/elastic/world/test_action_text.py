"""Log messages about the coordinator's decisions with ``-v``."""

from __future__ import annotations

import pytest

from elastic.world.action_text import describe_action
from elastic.world.world_state import BreakWorld, FormationKind, FormWorld, PauseWorld, ReleaseNode


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (
            PauseWorld(0, "at most 2 nodes are wanted", 3332.4),
            "the ranks of world 0 pause at a common step within 600 s: at most 2 nodes are wanted",
        ),
        (
            FormWorld(1, ("n0", "n1"), 2, FormationKind.GROW, 0, "2 nodes are available"),
            "world 1 forms (grow) with 4 ranks on n0, n1: 2 nodes are available",
        ),
        (BreakWorld(0, "n1 was lost", 10.0), "world 0 is broken, its ranks leave within 10 s: n1 was lost"),
        (ReleaseNode("n1", 1, "on request"), "node n1 is released: on request"),
    ],
)
def test_action_is_a_sentence_with_a_duration(action, sentence):
    assert describe_action(action, 2732.4) == sentence
