"""The coordinator's page and ``/status`` of a real ``elastic run`` whose rank is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from typing import Any

import pytest

from tests.support.elastic_runs import ROOT, ElasticRun, elastic_job, kill
from tests.support.local_nodes import wait_until
from tests.support.page_text import PageText

pytestmark = pytest.mark.e2e

SCRIPT = ROOT / "tests/support/event_log_training.py"
TOTAL, KILLED_AT = 12, 5


@pytest.fixture
def job():
    with elastic_job() as one:
        one.environ |= {"OMP_NUM_THREADS": "1", "TIEREDCKPT_AGENT_BUDGET": "64MiB"}
        one.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(one.folder / "run" / "told" / "n0" / "agent")
        yield one


def get(address: str, path: str) -> str:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()


def page_address(job: ElasticRun) -> str:
    """Wait until the log names the address of the page, and return it."""
    found = wait_until(lambda: re.search(r"the page of job told is at http://(\S+)\n", job.output()), "it is logged")
    return found[1]


def without_ages(status: dict[str, Any]) -> dict[str, Any]:
    return {**status, "nodes": [{**node, "last_heartbeat_s": 0.0} for node in status["nodes"]]}


def served_status(address: str) -> dict[str, Any]:
    return without_ages(json.loads(get(address, "/status")))


def listed_status(job: ElasticRun) -> dict[str, Any]:
    return without_ages(job.run_json("status", "--job", "told"))


def test_page_shows_the_world_and_the_recovery_from_a_killed_rank(job):
    limit = job.folder / "limit"
    limit.write_text(str(KILLED_AT))
    running = job.start(
        "run", "--nproc", "2", "--job", "told", "--log-dir", str(job.folder / "logs"), "--node", "n0",
        "--http", "127.0.0.1:0", str(SCRIPT), str(job.folder), str(TOTAL),
    )  # fmt: skip
    address = page_address(job)
    (rank, *_) = wait_until(lambda: job.rank_messages("step", step=KILLED_AT, rank=1), "rank 1 is in the step", 120)
    wait_until(lambda: job.rank_messages("step", step=KILLED_AT, rank=0), "rank 0 is in the step")
    wait_until(lambda: json.loads(get(address, "/status"))["step"] == KILLED_AT, "the coordinator knows the step", 60)
    wait_until(lambda: listed_status(job) == served_status(address), "both are the same", 60)
    before = PageText(get(address, "/")).text
    assert "told training" in before
    assert f"step reached {KILLED_AT} by every rank" in before
    assert f"n0 training 0 to 1 0 {KILLED_AT} " in before
    assert "start, epoch 0" in before

    kill(rank["pid"])
    limit.write_text(str(TOTAL - 1))  # the other rank continues until it waits for the killed one
    wait_until(lambda: job.rank_messages("step", step=TOTAL - 1, rank=1), "the next world is in its last step", 120)

    def recovered() -> str:
        text = PageText(get(address, "/")).text
        return (
            text
            if re.search(r"respawn, epoch 1 2 to 2 n0 local rank 1: \S.*SIGKILL.*? \d\S* (ms|s|min) ", text)
            else ""
        )

    page = wait_until(recovered, "the page shows the recovery with its time", 60)
    assert "The median recovery took" in page
    assert "hydrate" in page
    assert json.loads(get(address, "/status"))["epoch"] == 1
    limit.write_text(str(TOTAL))
    assert job.wait_ended(running) == 0, job.output()
    with pytest.raises(OSError):
        get(address, "/status")
