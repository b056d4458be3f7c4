"""StepHooks: a framework's loop has the steps of World.steps."""

from __future__ import annotations

import pytest
import torch

from elastic import StepHooks
from elastic.errors import PolicyError, StepOrderError, WorldChanged
from elastic.testing import InMemoryCoordinator
from elastic.workers.train_loop import RecoveryPolicy, RunOutcome, run
from tieredckpt import Checkpointer, NullCheckpointer, TierUnavailableError
from tieredckpt.session.session import close_sessions
from tieredckpt.testing import memory_node

AGAIN = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0)
ONCE = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0, on_error="raise")


@pytest.mark.parametrize("kind", ["resize", "stop"])
def test_stop_seals_the_step_and_the_next_world_restores_it(kind):
    coordinator, done = InMemoryCoordinator(1), []

    def train(world):
        state = {"step": torch.tensor(-1)}
        with Checkpointer("tiered://job", every=100) as ckpt:
            step = ckpt.restore(state) + 1
            assert int(state["step"]) == step - 1
            hooks = StepHooks(world, ckpt, state)
            while step < 9 and hooks.begin(step):
                state["step"].fill_(step)
                ckpt.save(state, step)
                done.append(step)
                if step == 4 and world.epoch == 0:
                    (coordinator.stop if kind == "stop" else lambda: coordinator.resize(1))()
                    world._gate.poll()
                hooks.end(step)
                step += 1
            assert not hooks.is_stopped or not hooks.begin(step)
            assert hooks.is_stopped == (world.stop_notice is not None)
            return world.completed

    with memory_node():
        ended = run(train, plane=coordinator.planes[0], policy=AGAIN)
        assert ended.outcome is (RunOutcome.STOPPED if kind == "stop" else RunOutcome.FINISHED)
        close_sessions()
        if kind == "stop":
            coordinator = InMemoryCoordinator(1)
            run(train, plane=coordinator.planes[0], policy=AGAIN)
    assert done == [*range(9)]
    assert coordinator.planes[0].faults == []


def test_broken_world_is_left_by_an_exception():
    coordinator, worlds = InMemoryCoordinator(1), []

    def train(world):
        worlds.append(world.epoch)
        hooks = StepHooks(world)
        for step in range(3):
            assert hooks.begin(step)
            hooks.end(step)
            if step == 1 and len(worlds) == 1:
                coordinator.restart()
                with pytest.raises(WorldChanged):
                    hooks.begin(step + 1)
                raise WorldChanged("restarted")
        return "finished"

    ended = run(train, plane=coordinator.planes[0], policy=AGAIN)
    assert (ended.value, ended.worlds) == ("finished", 2)


def test_stop_that_cannot_be_sealed_is_left_by_an_exception():
    coordinator, left = InMemoryCoordinator(1), []

    def seal(_step):
        raise TierUnavailableError("no agent")

    def train(world):
        hooks = StepHooks(world, seal=seal)
        if world.epoch == 0:
            assert hooks.begin(0)
            coordinator.resize(1)
            world._gate.poll()
            hooks.end(0)
            try:
                hooks.begin(1)
            except WorldChanged:
                left.append(hooks.is_stopped)
                raise

    assert run(train, plane=coordinator.planes[0], policy=AGAIN).worlds == 2
    assert left == [False]


def test_steps_out_of_order_are_refused():
    def train(world):
        hooks = StepHooks(world)
        with pytest.raises(StepOrderError, match="no step has begun"):
            hooks.end(5)
        assert hooks.begin(5)
        with pytest.raises(StepOrderError, match="step 5 has begun and not ended"):
            hooks.begin(6)
        with pytest.raises(StepOrderError, match="step 5 has begun"):
            hooks.end(4)
        hooks.end(5)
        with pytest.raises(StepOrderError, match="the next step is 6"):
            hooks.begin(7)
        return world.completed

    assert run(train, plane=InMemoryCoordinator(1).planes[0], policy=ONCE).value == 6


def test_checkpointer_without_state_is_refused():
    def train(world):
        with pytest.raises(PolicyError, match="together"):
            StepHooks(world, NullCheckpointer())

    run(train, plane=InMemoryCoordinator(1).planes[0], policy=ONCE)
