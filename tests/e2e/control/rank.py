"""A rank that only counts steps, follows instructions in files, and prints events as JSON.

``python rank.py FOLDER`` reads its instructions from FOLDER. Tests create ``finish``, ``ignore-NODE``, ``fault-NODE``
and ``hungry-NODE``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from elastic.control.control_plane import Dismissed, NoticeKind, RankProgress
from elastic.control.supervisor_client import SupervisorClient
from elastic.errors import JobFailedError, StaleEpochError
from elastic.settings import supervisor_endpoint

STEP_S = 0.005


def report(what: str, **more: object) -> None:
    # One write: print makes two, and a line of the log may come between them.
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **more})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def allocate_until_killed(asked: Path) -> None:
    """Touch memory until the kernel's OOM killer ends this process first."""
    asked.unlink()
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    while True:
        held.append(b"x" * (4 << 20))


def main(folder: Path) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    plane, node = SupervisorClient(supervisor_endpoint()), os.environ["ELASTIC_NODE"]
    report("warm")
    step = 0
    while True:
        try:
            place = plane.wait_for_assignment()
        except Dismissed as end:
            report("dismissed", reason=str(end))
            return 0
        except JobFailedError as end:
            report("job failed", reason=str(end))
            return 3
        report(
            "in",
            epoch=place.epoch,
            rank=place.rank,
            size=place.world_size,
            local=place.local_rank,
            node=node,
            store=place.store,
            restarts=place.restarts,
        )
        try:
            while True:
                if (folder / "finish").exists():
                    plane.report_finished()
                    report("finished", step=step)
                    return 0
                fault = folder / f"fault-{node}"
                if fault.exists():
                    fault.unlink()
                    plane.report_fault("a fault was asked for")
                if (folder / f"hungry-{node}").exists():
                    allocate_until_killed(folder / f"hungry-{node}")
                notice = plane.notice()
                if notice is not None and not (folder / f"ignore-{node}").exists():
                    report("notice", want=notice.kind.value, epoch=notice.epoch, reason=notice.reason)
                    if notice.kind is NoticeKind.RESTART:
                        break
                    target = plane.agree_on_step(step)
                    step = target
                    report("target", step=target, epoch=place.epoch)
                    plane.report_sealed(step)
                    break
                time.sleep(STEP_S)
                step += 1
                plane.report_progress(RankProgress(step, step - 1))
        except StaleEpochError as error:
            report("stale", reason=str(error))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
