"""The failure of one rank is raised on all ranks, with its class and its rank."""

from __future__ import annotations

import re

import msgspec
import pytest

from peerstore.errors import AgentUnreachableError
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.errors import SaveFailedError, StoreBusyError, TierUnavailableError, UsageError
from tieredckpt.rank_error import RankError


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (UsageError("no such option"), UsageError),
        (StoreBusyError("later"), StoreBusyError),
        (AgentUnreachableError("no agent"), TierUnavailableError),
        (OSError(28, "No space left on device"), TierUnavailableError),
    ],
)
def test_rank_raises_its_own_failure_with_its_cause(failure, kind):
    def fail():
        raise failure

    with pytest.raises(kind, match=re.escape(str(failure))) as raised:
        RankGroup(None).call_on_all(fail)
    assert type(raised.value) is kind
    assert raised.value is failure or raised.value.__cause__ is failure


def test_rank_without_a_failure_raises_those_of_the_others(monkeypatch):
    ranks = RankGroup(None)
    others = [RankError.of(StoreBusyError("later")), RankError.of(ValueError("a defect"))]
    encoded = [msgspec.json.encode(one).decode() for one in others]
    monkeypatch.setattr(ranks, "all_gather", lambda mine: [mine, *encoded])
    with pytest.raises(StoreBusyError, match=r"^rank 1: later; rank 2: a defect$"):
        ranks.call_on_all(lambda: 3)


def test_failure_without_a_message_is_not_taken_for_success(monkeypatch):
    ranks = RankGroup(None)
    encoded = msgspec.json.encode(RankError.of(ValueError())).decode()
    monkeypatch.setattr(ranks, "all_gather", lambda mine: [mine, encoded])
    with pytest.raises(SaveFailedError, match="rank 1: ValueError"):
        ranks.call_on_all(lambda: 3)
