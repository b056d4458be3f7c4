"""The coordinator's page and ``/status`` of a real ``elastic run`` whose rank is killed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.elastic_pages import KILLED_AT, run_with_page
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e


def without_ages(status: dict[str, Any]) -> dict[str, Any]:
    return {**status, "nodes": [{**node, "last_heartbeat_s": 0.0} for node in status["nodes"]]}


def test_page_shows_the_world_and_the_recovery_from_a_killed_rank():
    with run_with_page() as run:
        run.wait_paused()

        def is_equal() -> bool:
            listed = run.job.run_json("status", "--job", "told")
            return without_ages(listed) == without_ages(run.status())

        wait_until(is_equal, "both are the same", 60)
        before = run.page()
        assert "told training" in before
        assert f"step reached {KILLED_AT} by every rank" in before
        assert f"n0 training 0 to 1 0 {KILLED_AT} " in before
        assert "start, world 0" in before

        page = run.recover()
        assert "The median recovery took" in page
        assert "hydrate" in page
        wait_until(lambda: run.status()["epoch"] == 1, "the status is published", 60)
        assert run.finish() == 0, run.job.output()
        with pytest.raises(OSError):
            run.status()
