"""Up to which step a job is protected, and since when not."""

import pytest

from tieredckpt.agent.protection import PATIENCE_S, in_words, protected

NOW = 1_000_000_000.0
OLD = NOW - PATIENCE_S - 1


@pytest.mark.parametrize(
    ("newer", "left_out", "since"),
    [
        ([], (0, 0.0), None),
        ([NOW - 1], (0, 0.0), None),
        ([NOW - 1, OLD], (0, 0.0), OLD),
        ([], (3, NOW - 2), NOW - 2),
        ([NOW - 5], (1, NOW - 2), NOW - 5),
    ],
    ids=["nothing newer", "on its way", "for too long", "a save was left out", "both"],
)
def test_since_when_a_job_is_not_protected(newer, left_out, since):
    found = protected(7, newer, left_out, now=NOW)
    assert (found.step, found.unprotected_since, found.left_out) == (7, since, left_out[0])


def test_in_words():
    assert in_words(protected(7, [], (0, 0.0), now=NOW)) == "protected up to step 7"
    said = in_words(protected(-1, [], (3, NOW), now=NOW))
    assert said == "no step is protected yet, unprotected since 2001-09-09 01:46:40Z (3 saves skipped or failed)"
