"""A restore finds a target for every saved entry, or reports the entries without one."""

import logging
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.bits import assert_same_bits
from tieredckpt import Checkpointer
from tieredckpt.errors import MismatchError

JOB = "tiered://entries"


class Tracker:
    """A ``Stateful`` that starts empty and fills up, like best scores, histories and running means."""

    def __init__(self):
        self.scores = {}
        self.history = []
        self.mean = None

    def state_dict(self):
        return {"scores": self.scores, "history": self.history} | ({} if self.mean is None else {"mean": self.mean})

    def load_state_dict(self, state):
        self.scores, self.history, self.mean = state["scores"], state["history"], state.get("mean")


def a_tracker():
    tracker = Tracker()
    tracker.scores = {"per-class": torch.arange(3.0), "val": {"at": 7, "best": 0.25}}
    tracker.history = [torch.full((2,), 5.0), {"lr": 0.1}]
    tracker.mean = torch.tensor([1.0, 2.0])
    return tracker


def saved(state, step=1):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state, step).wait()


def test_empty_stateful_receives_its_saved_state(agent_dir):
    tracker = a_tracker()
    saved({"w": torch.ones(4), "tracker": tracker})
    fresh, weights = Tracker(), torch.zeros(4)
    with Checkpointer(JOB) as ckpt:
        assert ckpt.restore({"w": weights, "tracker": fresh}) == 1
    assert_same_bits(torch.ones(4), weights)
    assert_same_bits(tracker.state_dict(), fresh.state_dict())


def test_failed_restore_does_not_change_a_statefuls_own_dicts(agent_dir):
    saved({"w": torch.ones(4), "tracker": a_tracker()})
    fresh = Tracker()
    with Checkpointer(JOB) as ckpt, pytest.raises(MismatchError):
        ckpt.restore({"w": torch.zeros(5), "tracker": fresh})
    assert fresh.state_dict() == {"scores": {}, "history": []}


def test_saved_entry_without_a_target_is_named(agent_dir):
    saved({"w": torch.ones(4), "best": {"loss": 0.5, "step": 3}})
    state = {"w": torch.zeros(4), "best": {}}
    with Checkpointer(JOB) as ckpt:
        with pytest.raises(MismatchError, match=r"best\.loss.*best\.step.*strict=False"):
            ckpt.restore(state)
        assert_same_bits(torch.zeros(4), state["w"])  # nothing is read unless every entry has a target


def test_moments_of_an_optimizer_missing_in_the_state_are_not_dropped(agent_dir):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved({"model": model, "optim": optimizer})
    with Checkpointer(JOB) as ckpt, pytest.raises(MismatchError, match=r"optim\."):
        ckpt.restore({"model": nn.Linear(4, 2)})


def test_non_strict_restore_skips_and_logs_missing_entries(agent_dir, caplog):
    saved({"w": torch.ones(4), "best": {"loss": 0.5}})
    state = {"w": torch.zeros(4), "new": 3}
    with Checkpointer(JOB) as ckpt, caplog.at_level(logging.WARNING):
        assert ckpt.restore(state, strict=False) == 1
    assert_same_bits({"w": torch.ones(4), "new": 3}, state)
    assert "best.loss" in caplog.text
    assert "new" in caplog.text


def test_target_entry_that_was_never_saved_is_named(agent_dir):
    saved({"w": torch.ones(4)})
    with Checkpointer(JOB) as ckpt, pytest.raises(MismatchError, match=r"\bb\b.*strict=False"):
        ckpt.restore({"w": torch.zeros(4), "b": torch.zeros(2)})


def test_restore_logs_one_line_with_the_bytes_read(agent_dir, caplog):
    saved({"w": torch.ones(1 << 18)}, step=12)
    with Checkpointer(JOB) as ckpt, caplog.at_level(logging.INFO):
        ckpt.restore({"w": torch.zeros(1 << 18)})
    lines = [record.getMessage() for record in caplog.records if "restored step 12" in record.getMessage()]
    assert len(lines) == 1
    assert "1.0 MiB from memory" in lines[0]


def test_defaultdict_of_scores_keeps_its_type(agent_dir):
    class Scores:
        def __init__(self):
            self.best = defaultdict(float)

        def state_dict(self):
            return {"best": dict(self.best)}

        def load_state_dict(self, state):
            self.best.update(state["best"])

    scores = Scores()
    scores.best["val"] = 0.75
    saved({"scores": scores})
    fresh = Scores()
    with Checkpointer(JOB) as ckpt:
        ckpt.restore({"scores": fresh})
    assert fresh.best == {"val": 0.75}


def test_a_restore_that_fails_between_the_ranks_leaves_nothing_pinned(agent_dir):
    """The restore has already pinned the verified slot, which the next saves need."""
    saved({"w": torch.ones(4), "more": torch.ones(4)})
    with Checkpointer(JOB) as ckpt:
        with pytest.raises(MismatchError):
            ckpt.restore({"w": torch.zeros(4)})
        assert ckpt.session.agent.store.status().arena.pins == 0


class Average:
    """A ``Stateful`` that starts empty, and of which each rank has a piece."""

    def __init__(self, full=None):
        self.of = {}
        if full is not None:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            self.of = {"mean": distribute_tensor(full, mesh, [Shard(0)])}

    def state_dict(self):
        return self.of

    def load_state_dict(self, state):
        self.of = state


def averaged():
    with Checkpointer(JOB) as ckpt:
        ckpt.save({"w": torch.ones(4), "average": Average(torch.arange(8.0))}, 1).wait()
        with pytest.raises(MismatchError, match=r"average\.mean"):
            ckpt.restore({"w": torch.zeros(4), "average": Average()})
        average = Average(torch.zeros(8))
        assert ckpt.restore({"w": torch.zeros(4), "average": average}) == 1
        return average.of["mean"].full_tensor().tolist()


def test_sharded_state_is_not_gathered_on_every_rank(agent_dir, ranks):
    assert ranks.run(2, averaged) == [list(range(8))] * 2
