"""Under a launcher with torchrun's environment, a rank that cannot leave a broken world exits."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.launched import start_ranks
from tests.support.local_nodes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def stuck(how: str) -> None:
    if how == "native":
        ctypes.PyDLL(None).pause()
    signal.pause()


def trains(_say, folder: str, how: str) -> str:
    """Fail at rank 1, and hang at rank 0 while it leaves the world."""
    log = os.open(Path(folder) / f"rank-{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(stream=sys.stderr, force=True)
    os.environ["ELASTIC_ABORT_TIMEOUT"] = "2"
    import elastic

    def train(world):
        if world.rank == 1:
            wait_until((Path(folder) / "inside").exists)
            raise ZeroDivisionError("the fault")
        world.add_cleanup(lambda: stuck(how))
        (Path(folder) / "inside").touch()
        if how == "train":
            stuck(how)
        dist.all_reduce(torch.ones(1))

    return str(elastic.run(train))


@pytest.fixture
def port():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("train", ": the train function. The process exits"),
        ("cleanup", ": the callbacks of world.add_cleanup. The process exits"),
        ("native", "Timeout (0:00:"),
    ],
)
def test_rank_that_does_not_leave_ends_itself_with_its_stacks(tmp_path, zygote, port, how, words):
    late, fails = start_ranks(zygote, 2, port, trains, str(tmp_path), how)
    try:
        wait_until(lambda: late.has_ended)
        written = (tmp_path / "rank-0.log").read_text()
        assert words in written
        assert "in stuck" in written
    finally:
        for one in (late, fails):
            one.kill_if_alive()
            with contextlib.suppress(AssertionError):  # both ranks end with an error
                one.wait()
