"""An event log under a plain launcher: only ``$TIEREDCKPT_EVENT_LOG``, no agent, no checkpoint."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tieredckpt.event_log import EVENT_LOG_ENV, read_event_log
from tieredckpt.event_log.event_types import StageEvent
from tieredckpt.goodput import analyse

pytestmark = pytest.mark.e2e

STEPS = 5


def training(_say, first: int) -> str:
    from elastic.workers.train_loop import run

    def train(world) -> None:
        if world.size > 1:
            dist.barrier()  # no rank may leave the world before the other one has connected
        for step in world.steps(first, STEPS):
            world.report(loss=float(step), samples=4)

    return run(train).outcome.value


def start(zygote, folder, ranks, restarts, first):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        EVENT_LOG_ENV: str(folder),
    }
    running = [
        zygote.start(training, first, environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    return [one.wait() for one in running]


def test_event_log_covers_a_restart_of_all_ranks(zygote, tmp_path):
    assert [one.result for one in start(zygote, tmp_path, 2, 0, 0)] == ["finished", "finished"]
    assert [one.result for one in start(zygote, tmp_path, 2, 1, 3)] == ["finished", "finished"]
    read = read_event_log(tmp_path)
    found = analyse(read.events)
    assert (found.ranks, found.worlds, len(found.runs), found.runs[0].how) == (2, 2, 1, "finished")
    assert [(one.step, one.counts) for one in found.step_views] == [
        *((step, step < 3) for step in range(STEPS)), (3, True), (4, True),
    ]  # fmt: skip
    assert found.samples == STEPS * 4
    assert [(one.category.value, one.how, one.steps_lost) for one in found.recoveries] == [
        ("startup", "start", 0),
        ("recovery", "restart", 2),
    ]
    stages = {(one.epoch, one.rank): set() for one in read.events if isinstance(one, StageEvent)}
    assert set(stages) == {(epoch, rank) for epoch in (0, max(epoch for epoch, _ in stages)) for rank in (0, 1)}


def test_single_process_records_its_run(zygote, tmp_path):
    assert zygote.run(training, 0, environ={EVENT_LOG_ENV: str(tmp_path)}).result == "finished"
    found = analyse(read_event_log(tmp_path).events)
    assert (found.ranks, found.steps_counted, found.runs[0].how, found.faults) == (1, STEPS, "finished", 0)
