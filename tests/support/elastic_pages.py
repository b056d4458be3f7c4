"""A run of two ranks with a page of its coordinator, in which a rank is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

from tests.support.elastic_runs import ROOT, ElasticRun, elastic_job, kill
from tests.support.local_nodes import wait_until
from tests.support.page_text import PageText

SCRIPT = ROOT / "tests/support/event_log_training.py"
TOTAL, KILLED_AT = 12, 5


class RunWithPage:
    """Job ``told``, whose ranks wait before step ``KILLED_AT + 1`` and before the last one."""

    def __init__(self, job: ElasticRun) -> None:
        self.job = job
        self._limit = job.folder / "limit"
        self._limit.write_text(str(KILLED_AT))
        self._running: subprocess.Popen[bytes] = job.start(
            "run", "--nproc", "2", "--job", "told", "--log-dir", str(job.folder / "logs"), "--node", "n0",
            "--http", "127.0.0.1:0", str(SCRIPT), str(job.folder), str(TOTAL),
        )  # fmt: skip
        found = wait_until(
            lambda: re.search(r"the page of job told is at http://(\S+)\n", job.output()), "it is logged"
        )
        self.address = found[1]

    def get(self, path: str) -> str:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=30)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode()

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/status"))

    def page(self) -> str:
        return PageText(self.get("/")).text

    def wait_paused(self) -> None:
        """Wait until the ranks are in step ``KILLED_AT``, and the coordinator knows it."""
        wait_until(lambda: len(self.job.rank_messages("step", step=KILLED_AT)) == 2, "both ranks are in the step", 120)
        wait_until(lambda: self.status()["step"] == KILLED_AT, "the coordinator knows the step", 60)

    def recover(self) -> str:
        """Kill a rank, and wait for the next world in its last step; return the page with the recovery."""
        (rank, *_) = self.job.rank_messages("step", step=KILLED_AT, rank=1)
        kill(rank["pid"])
        self._limit.write_text(str(TOTAL - 1))  # the other rank continues until it waits for the killed one
        last = "the next world is in its last step"
        wait_until(lambda: self.job.rank_messages("step", step=TOTAL - 1, rank=1), last, 120)

        def recovered() -> str:
            text = self.page()
            words = r"respawn, world 1 2 to 2 \d\S* (ms|s|min) n0 local rank 1: \S.*SIGKILL"
            return text if re.search(words, text) else ""

        return wait_until(recovered, "the page shows the recovery with its time", 60)

    def finish(self) -> int:
        self._limit.write_text(str(TOTAL))
        return self.job.wait_ended(self._running)


@contextlib.contextmanager
def run_with_page() -> Iterator[RunWithPage]:
    with elastic_job() as one:
        one.environ |= {"OMP_NUM_THREADS": "1", "TIEREDCKPT_AGENT_BUDGET": "64MiB"}
        one.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(one.folder / "run" / "told" / "n0" / "agent")
        yield RunWithPage(one)
