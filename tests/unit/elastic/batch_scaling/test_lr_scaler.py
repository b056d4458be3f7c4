"""``LRScaler`` with real optimizers and schedulers: the exact rates of each step."""

from __future__ import annotations

import copy
import io
import json
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler as torch_schedulers

from elastic.batch_scaling.lr_rules import (
    AdamSqrtLRRule,
    ConstantLRRule,
    LinearLRRule,
    LRScale,
    LRTable,
    Rewarmup,
    SqrtLRRule,
    scaled_beta,
)
from elastic.batch_scaling.lr_scaler import LRScaler
from elastic.errors import PolicyError

STEPS = 20
LRS = (0.1, 0.003)


def one_cycle(optimizer):
    return torch_schedulers.OneCycleLR(optimizer, max_lr=list(LRS), total_steps=STEPS + 2)


def sequential(optimizer):
    first = torch_schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    then = torch_schedulers.CosineAnnealingLR(optimizer, T_max=STEPS)
    return torch_schedulers.SequentialLR(optimizer, [first, then], milestones=[5])


def chained(optimizer):
    return torch_schedulers.ChainedScheduler(
        [torch_schedulers.ConstantLR(optimizer, 0.1, 4), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULERS = {
    "none": lambda _: None,
    "LambdaLR": lambda o: torch_schedulers.LambdaLR(o, [lambda n: 0.95**n, lambda n: 1 / (1 + n)]),
    "MultiplicativeLR": lambda o: torch_schedulers.MultiplicativeLR(o, lambda n: 0.97),
    "StepLR": lambda o: torch_schedulers.StepLR(o, 4, 0.3),
    "MultiStepLR": lambda o: torch_schedulers.MultiStepLR(o, [3, 9, 14], 0.7),
    "ConstantLR": lambda o: torch_schedulers.ConstantLR(o, 0.2, 7),
    "LinearLR": lambda o: torch_schedulers.LinearLR(o, 0.1, total_iters=11),
    "ExponentialLR": lambda o: torch_schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch_schedulers.PolynomialLR(o, total_iters=20, power=2),
    "CosineAnnealingLR": lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=STEPS, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 5, 2),
    "CyclicLR": lambda o: torch_schedulers.CyclicLR(o, 1e-4, list(LRS), step_size_up=5),
    "OneCycleLR": one_cycle,
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: torch_schedulers.ReduceLROnPlateau(o, factor=0.3, patience=2),
}
OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95)),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5),
}


class Run:
    """A small model in two parameter groups that records the numbers of each step."""

    def __init__(self, optimizer="SGD", scheduler="none", rule=None, batch=128, world=8, rewarm=None):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(3, size, bias=False) for size in (1, 2)))
        groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(self.model, LRS, strict=True)]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        made = {"global_batch": batch, "world_size": world, "rewarm": rewarm}
        self.rate = None if rule is None else LRScaler(self.optimizer, rule, **made)
        self.used = []
        self.record()

    def record(self):
        """Record the following steps in a hook that runs after all existing hooks."""
        self.optimizer.register_step_pre_hook(self._record)

    def _record(self, optimizer, args, kwargs):
        names = ("lr", "betas", "alpha", "eps")
        self.used.append([{name: group[name] for name in names if name in group} for group in optimizer.param_groups])

    def step(self, number):
        for parameter in self.model.parameters():
            parameter.grad = (parameter.detach() + number).sin()
        self.optimizer.step()
        if isinstance(self.scheduler, torch_schedulers.ReduceLROnPlateau):
            self.scheduler.step(5.0 - min(number, 6))  # improves for a while, then stops
        elif self.scheduler is not None:
            self.scheduler.step()

    def train(self, first, last):
        for number in range(first, last):
            self.step(number)
        return self

    def state(self):
        """Pass the state through bytes without pickled objects, like a checkpoint."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "rate": self.rate}
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items() if part is not None}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, state, order=("model", "optimizer", "scheduler", "rate")):
        for name in order:
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        return self

    @property
    def lrs(self):
        return [[group["lr"] for group in groups] for groups in self.used]

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.weights(), other.weights(), strict=True))


PAIRS = [*((o, s) for o in ("SGD", "AdamW") for s in SCHEDULERS), ("RMSprop", "StepLR")]


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_a_constant_rule_changes_no_bit(optimizer, scheduler):
    plain = Run(optimizer, scheduler).train(0, STEPS)
    ruled = Run(optimizer, scheduler, ConstantLRRule(), rewarm=Rewarmup(5, 0.0)).train(0, STEPS // 2)
    ruled.rate.resize(128, 24)
    ruled.rate.resize(512, 64)
    ruled.train(STEPS // 2, STEPS)
    assert ruled.used == plain.used
    assert same_bits(ruled, plain)


@pytest.mark.parametrize(
    "rule", [LinearLRRule(128), SqrtLRRule(128), AdamSqrtLRRule(128), LRTable({4: 3e-4, 24: 9e-4}, 3e-4)]
)
def test_no_rule_changes_a_bit_while_the_batch_stays(rule):
    plain = Run("AdamW", "OneCycleLR").train(0, STEPS)
    ruled = Run("AdamW", "OneCycleLR", rule, rewarm=Rewarmup(5, 0.0)).train(0, STEPS // 2)
    ruled.rate.resize(128, 16)
    ruled.train(STEPS // 2, STEPS)
    assert ruled.used == plain.used
    assert same_bits(ruled, plain)


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_a_factor_is_of_the_schedules_own_value_in_every_step(optimizer, scheduler):
    """The factor is applied once, even if the schedule derives each value from the previous one."""
    plain = Run(optimizer, scheduler).train(0, STEPS)
    ruled = Run(optimizer, scheduler, SqrtLRRule(128), batch=384).train(0, STEPS)
    by = math.sqrt(3)
    assert ruled.lrs == [[lr * by for lr in lrs] for lrs in plain.lrs]
    shown = [[group["lr"] for group in run.optimizer.param_groups] for run in (plain, ruled)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_change_is_warmed_up_to(scheduler):
    plain = Run("SGD", scheduler).train(0, STEPS)
    ruled = Run("SGD", scheduler, LinearLRRule(128), rewarm=Rewarmup(3)).train(0, 8)
    ruled.rate.resize(256, 16)
    ruled.train(8, 16)
    ruled.rate.resize(64, 4)
    ruled.train(16, STEPS)
    by = [1.0] * 8 + [1.25, 1.5, 1.75] + [2.0] * 5 + [0.5] * 4
    expected = [[lr * f for lr in lrs] for lrs, f in zip(plain.lrs, by, strict=True)]
    assert ruled.lrs == expected


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_a_restored_run_uses_the_same_rates_and_gets_the_same_weights(optimizer, scheduler):
    made = (optimizer, scheduler, SqrtLRRule(128))
    whole = Run(*made, rewarm=Rewarmup(6)).train(0, 5)
    whole.rate.resize(288, 8)
    whole.train(5, 8)
    saved = whole.state()
    whole.train(8, STEPS)
    again = Run(*made, batch=288, rewarm=Rewarmup(6)).load(saved).train(8, STEPS)
    assert again.used == whole.used[8:]
    assert same_bits(again, whole)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(SCHEDULERS)),
    st.lists(st.tuples(st.integers(0, STEPS), st.sampled_from([64, 128, 200, 512])), max_size=3),
    st.integers(0, STEPS),
    st.permutations(["model", "optimizer", "scheduler", "rate"]),
    st.builds(Rewarmup, st.integers(0, 9), st.none() | st.sampled_from([0.0, 0.3, 1.0])),
)
def test_resumed_run_matches_for_any_cut_and_load_order(scheduler, resizes, cut, order, rewarm):
    def train(run, first, last):
        for number in range(first, last):
            for at, batch in resizes:
                if at == number:
                    run.rate.resize(batch, 8)
            run.step(number)

    batch = ([128] + [batch for at, batch in sorted(resizes, key=lambda resize: resize[0]) if at < cut])[-1]
    whole = Run("SGD", scheduler, LinearLRRule(128), rewarm=rewarm)
    train(whole, 0, cut)
    saved = whole.state()
    train(whole, cut, STEPS)
    again = Run("SGD", scheduler, LinearLRRule(128), batch=batch, rewarm=rewarm)
    again.load(json_of_rate(saved), order)
    train(again, cut, STEPS)
    assert again.used == whole.used[cut:]
    assert same_bits(again, whole)


def json_of_rate(state):
    return {**state, "rate": json.loads(json.dumps(state["rate"]))}


def test_restore_into_a_resized_world_warms_up_from_the_saved_factor():
    """The new process detects the change: its batch differs from the saved one."""
    old = Run(rule=LinearLRRule(128), batch=128).train(0, 4)
    new = Run(rule=LinearLRRule(128), batch=256, world=16, rewarm=Rewarmup(1)).load(old.state()).train(4, 7)
    assert new.lrs == [[lr * by for lr in LRS] for by in (1.5, 2.0, 2.0)]


def test_initial_batch_size_needs_no_warmup():
    run = Run(rule=LinearLRRule(128), batch=256, rewarm=Rewarmup(5, 0.0)).train(0, 1)
    assert run.lrs == [[lr * 2 for lr in LRS]]


def test_a_table_follows_the_world():
    run = Run(rule=LRTable({8: 0.1, 16: 0.2}, base=0.1)).train(0, 1)
    run.rate.resize(128, 16)
    run.train(1, 2)
    run.rate.resize(128, 12)
    run.train(2, 3)
    assert [lrs[0] for lrs in run.lrs] == [0.1, 0.2, 0.1]


def test_adam_for_another_batch_is_the_adam_of_the_rule():
    """The optimizer equals, bit for bit, one created with the rule's numbers."""
    betas = scaled_beta("beta1", 0.9, 4), scaled_beta("beta2", 0.95, 4)
    run = Run("AdamW", rule=AdamSqrtLRRule(128), batch=512)
    own = Run("AdamW")
    own.optimizer = torch.optim.AdamW(
        [{"params": part.parameters(), "lr": lr * 2} for part, lr in zip(own.model, LRS, strict=True)],
        betas=betas,
        eps=5e-9,
    )
    run.train(0, 6)
    own.train(0, 6)
    assert run.used[0][0] == {"lr": LRS[0] * 2, "betas": betas, "eps": 5e-9}
    assert same_bits(run, own)
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert run.optimizer.param_groups[0]["eps"] == 1e-8


def test_rmsprop_scales_its_single_average():
    run = Run("RMSprop", rule=AdamSqrtLRRule(128), batch=512).train(0, 1)
    assert run.used[0][0]["alpha"] == pytest.approx(0.96)
    assert run.used[0][0]["eps"] == 5e-9
    assert run.optimizer.param_groups[0]["alpha"] == 0.99


def test_betas_that_a_schedule_changes_are_scaled_as_they_are():
    plain = Run("AdamW", "OneCycleLR").train(0, STEPS)
    run = Run("AdamW", "OneCycleLR", AdamSqrtLRRule(128), batch=256).train(0, STEPS)
    for before, after in zip(plain.used, run.used, strict=True):
        assert after[0]["betas"] == tuple(scaled_beta("beta", beta, 2) for beta in before[0]["betas"])


def test_a_batch_too_large_for_a_beta_is_refused_and_changes_nothing():
    run = Run("AdamW", rule=AdamSqrtLRRule(128))
    with pytest.raises(PolicyError, match=r"beta1 is 0.9.* up to 10 times"):
        run.rate.resize(128 * 11, 8)
    run.train(0, 1)
    assert run.lrs == [list(LRS)]
    with pytest.raises(PolicyError, match="beta1"):
        Run("AdamW", rule=AdamSqrtLRRule(128), batch=128 * 11)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD, torch.optim.Adagrad])
def test_an_optimizer_without_betas_cannot_be_scaled_like_adam(kind):
    optimizer = kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(PolicyError, match="AdamSqrtLRRule scales betas and eps"):
        LRScaler(optimizer, AdamSqrtLRRule(128), global_batch=256, world_size=8)


class Broken:
    def scale(self, global_batch, world_size):
        return LRScale(math.nan)


def test_a_rule_that_gives_no_number_is_refused():
    with pytest.raises(PolicyError, match="multiplies the learning rate by nan"):
        Run(rule=Broken())


def test_learning_rates_of_the_next_step_are_readable():
    run = Run(rule=LinearLRRule(128), batch=256)
    assert run.rate.learning_rates == [lr * 2 for lr in LRS]
    assert run.rate.factor == 2
    run.train(0, 1)
    assert run.lrs == [run.rate.learning_rates]


def test_optimizer_accepts_a_single_scaler():
    run = Run(rule=LinearLRRule(128))
    with pytest.raises(PolicyError, match="close the other LRScaler first"):
        LRScaler(run.optimizer, ConstantLRRule(), global_batch=128, world_size=8)
    run.rate.close()
    run.rate.close()
    with LRScaler(run.optimizer, LinearLRRule(128), global_batch=256, world_size=8):
        run.record()
        run.train(0, 1)
    run.train(1, 2)
    assert run.lrs[1::2] == [[lr * 2 for lr in LRS], list(LRS)]


def test_a_learning_rate_in_a_tensor_stays_that_tensor():
    """Captured and compiled steps read it where it was when they were made."""
    weight = torch.nn.Parameter(torch.ones(2))
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.Adam([weight], lr=lr, foreach=False, capturable=False)
    scheduler = torch_schedulers.ExponentialLR(optimizer, 0.5)
    rate = LRScaler(optimizer, LinearLRRule(128), global_batch=384, world_size=8)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append((o.param_groups[0]["lr"], float(lr))))
    for plain in (0.1, 0.05, 0.025):
        assert optimizer.param_groups[0]["lr"] is lr
        assert float(lr) == plain
        assert rate.learning_rates == [pytest.approx(3 * plain)]
        weight.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
    assert all(used is lr for used, _ in seen)
    assert [value for _, value in seen] == [0.1 * 3, 0.05 * 3, 0.025 * 3]


class OutOfMemory(Exception):
    pass


def test_a_step_that_fails_leaves_nothing_behind():
    def closure():
        raise OutOfMemory

    run = Run(rule=LinearLRRule(128), batch=256, rewarm=Rewarmup(2))
    run.rate.resize(512, 8)
    expected = run.rate.learning_rates
    with pytest.raises(OutOfMemory):
        run.optimizer.step(closure)
    assert run.rate.learning_rates == expected
    assert [group["lr"] for group in run.optimizer.state_dict()["param_groups"]] == list(LRS)
    with pytest.raises(OutOfMemory):
        run.optimizer.step(closure)
    run.train(0, 1)
    assert run.lrs == [expected, expected, expected]
    with pytest.raises(OutOfMemory):
        run.optimizer.step(closure)
    run.rate.close()
    assert [group["lr"] for group in run.optimizer.param_groups] == list(LRS)


def test_failed_step_does_not_alter_rates_loaded_afterwards():
    def closure():
        raise OutOfMemory

    run = Run(rule=LinearLRRule(128), batch=256)
    saved = copy.deepcopy(run.optimizer.state_dict())
    for group in saved["param_groups"]:
        group["lr"] = 0.5
    with pytest.raises(OutOfMemory):
        run.optimizer.step(closure)
    run.optimizer.load_state_dict(saved)
    assert run.rate.learning_rates == [1.0, 1.0]
    run.train(0, 1)
    assert run.lrs[-1] == [1.0, 1.0]
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.5, 0.5]


def test_after_a_failed_step_a_batch_is_judged_by_the_optimizers_own_betas():
    def closure():
        raise OutOfMemory

    run = Run("AdamW", rule=AdamSqrtLRRule(128), batch=512)
    with pytest.raises(OutOfMemory):
        run.optimizer.step(closure)
    run.rate.resize(384, 8)
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.95)


class Overriding(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_overriding_step_that_calls_super_counts_once():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Overriding([weight], lr=1.0)
    rate = LRScaler(optimizer, LinearLRRule(1), global_batch=1, world_size=1, rewarm=Rewarmup(3))
    rate.resize(5, 1)
    for expected in (2.0, 3.0, 4.0, 5.0, 5.0):
        weight.grad = torch.ones(1)
        before = weight.item()
        optimizer.step()
        assert before - weight.item() == expected


def test_scheduler_in_a_step_hook_sees_its_own_rate():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch_schedulers.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    LRScaler(optimizer, LinearLRRule(1), global_batch=3, world_size=1)
    for expected in (3.0, 1.5, 0.75):
        weight.grad = torch.ones(1)
        before = weight.item()
        optimizer.step()
        assert before - weight.item() == expected


def test_optimizer_state_creation_is_not_counted_as_a_step():
    """``torch.distributed.checkpoint`` creates the state by a step with a learning rate of 0."""
    old = Run("AdamW", rule=LinearLRRule(128), rewarm=Rewarmup(3)).train(0, 2)
    old.rate.resize(256, 8)
    old.train(2, 3)
    saved = old.rate.state_dict()
    weights = get_optimizer_state_dict(old.model, old.optimizer)
    new = Run("AdamW", rule=LinearLRRule(128), batch=256, rewarm=Rewarmup(3))
    new.rate.load_state_dict(saved)
    set_optimizer_state_dict(new.model, new.optimizer, weights)
    assert new.rate.state_dict() == saved
    assert new.rate.learning_rates == old.rate.learning_rates == [lr * 1.5 for lr in LRS]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_scaler_state_round_trips_through_dcp(tmp_path):
    old = Run(rule=SqrtLRRule(128), rewarm=Rewarmup(4)).train(0, 1)
    old.rate.resize(512, 8)
    old.train(1, 3)
    dcp.save({"rate": old.rate}, checkpoint_id=tmp_path, no_dist=True)
    new = Run(rule=SqrtLRRule(128), batch=512, rewarm=Rewarmup(4))
    dcp.load({"rate": new.rate}, checkpoint_id=tmp_path, no_dist=True)
    assert new.rate.state_dict() == old.rate.state_dict()
    assert new.rate.factor == 1.6


def test_steps_that_a_scaler_skips_are_not_counted():
    """A step skipped for non-finite gradients advances neither the schedule nor the warmup."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rate = LRScaler(optimizer, LinearLRRule(1), global_batch=1, world_size=1, rewarm=Rewarmup(3))
    rate.resize(5, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for grad, expected in ((math.inf, 2.0), (1.0, 3.0), (math.nan, 3.0), (1.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale(weight * grad).backward()
        scaler.step(optimizer)
        scaler.update()
        assert rate.factor == expected


def test_groups_that_are_added_later_are_scaled_too():
    run = Run(rule=LinearLRRule(128), batch=256).train(0, 1)
    extra = torch.nn.Parameter(torch.ones(1))
    run.optimizer.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.ones(1)
    run.optimizer.step()
    assert run.lrs[-1] == [LRS[0] * 2, LRS[1] * 2, 1.0]
