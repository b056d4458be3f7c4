"""P9's training loop under torchft and DDP, modeled on torchft's ``train_ddp.py``.

No state outlives the processes: a restarted rank receives it from a running one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.diary import Diary, began
from benchmarks.recovery_trainer import LOOKED_AT, Task, Training

_TIMEOUT = timedelta(seconds=60)
"""Longer than the 5 to 30 s of torchft's example: here a lost rank resets its connections at once."""
HTTP, ALL = "http", "all"
"""Options: send the state by HTTP instead of a process group; take no step without all groups."""


def fault_tolerant(task: Task, diary: Diary) -> None:
    diary.write("imported", began=began())
    try:
        _train(task, diary)
    except Exception as error:
        diary.write("heard", error=f"{type(error).__name__}: {error}")
        raise


def _train(task: Task, diary: Diary) -> None:
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    local, per_group = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if task.device == "cuda":
        torch.cuda.set_device((group * per_group + local) % torch.cuda.device_count())
    training = Training(task, diary, group * per_group + local, groups * per_group)
    training.model.to_empty(device=training.device)
    training.fill()  # the initial state; a rank that joins later receives the others' state
    pg = (ProcessGroupNCCL if task.device == "cuda" else ProcessGroupGloo)(timeout=_TIMEOUT)
    configure = pg.configure
    news = {"looked": 0}

    def configured(*args: Any, **named: Any) -> None:
        configure(*args, **named)
        news["looked"] = 0
        training.say("grouped")
        training.say("entered", groups=args[3])

    pg.configure = configured

    def kept() -> dict[str, Any]:
        return {"tensors": dict(enumerate(one.detach() for one in training.tensors()))}

    def load(state: dict[str, Any]) -> None:
        _with_moments(training)
        with torch.no_grad():
            for index, tensor in enumerate(one.detach() for one in training.tensors()):
                tensor.copy_(state["tensors"][index])
        training.say("loaded", step=manager.current_step() - 1)

    manager = Manager(
        pg=pg,
        load_state_dict=load,
        state_dict=kept,
        min_replica_size=groups if ALL in task.options else 1,
        replica_id=f"recovery_{group}",
        timeout=_TIMEOUT,
        checkpoint_transport=_by_http() if HTTP in task.options else PGTransport(pg, _TIMEOUT, training.device),
        hostname="127.0.0.1",  # the machine's name may resolve to another address
        init_sync=False,  # as torchft requires if all ranks start with the same weights
    )
    training.model = DistributedDataParallel(manager, training.model)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    optimizer = Optimizer(manager, training.optimizer)
    training.say("built")
    training.feed(0)
    training.say("fed")
    while True:
        step = manager.current_step()
        training.fail_if_told()
        optimizer.zero_grad()
        training.model(training.batch(step)).square().mean().backward()
        optimizer.step()
        if manager.current_step() == step:
            training.say("refused", step=step)
            continue
        done = manager.current_step() - 1
        together = manager.num_participants() * per_group
        training.stepped(done, together=together)
        news["looked"] += together == training.size
        if news["looked"] == LOOKED_AT or done in task.compared:
            training.look(done)
        if task.compared and done >= max(task.compared):
            return


def _with_moments(training: Training) -> None:
    """Create AdamW's state for parameters without a step."""
    for parameter in training.model.parameters():
        if not training.optimizer.state[parameter]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            training.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _by_http() -> HTTPTransport:
    transport = HTTPTransport(_TIMEOUT, num_chunks=0)
    transport._server.RequestHandlerClass.log_message = lambda *_args: None  # a line for every request
    port = urlsplit(transport.metadata()).port
    transport.metadata = lambda: f"http://127.0.0.1:{port}/checkpoint/"
    return transport
