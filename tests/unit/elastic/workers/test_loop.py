"""``Loop``: the order of a step, the step where it resumes, and refused uses."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elastic import BatchPlan, ElasticDataLoader, ExactGradients, Loop, seeded
from elastic.batch_scaling.lr_rules import LinearLRRule
from elastic.errors import NonFiniteLossError, PolicyError, StepOrderError
from elastic.testing import InMemoryCoordinator
from elastic.workers.train_loop import RecoveryPolicy, RunOutcome, run
from tests.support.bits import assert_same_bits
from tieredckpt import Checkpointer
from tieredckpt.session.session import close_sessions
from tieredckpt.testing import memory_node

ONCE = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0, on_error="raise")
AGAIN = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0)
SAMPLES = [torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in range(30)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("elastic.workers.in_process_restart.gc.collect", lambda: 0)


@pytest.fixture
def node():
    with memory_node() as one:
        yield one
        close_sessions()


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1))


def make_loop(world, model=None, optimizer=None, **options):
    model = model or make_model()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, Loop(world, model, optimizer, SAMPLES, **{"global_batch": 6, "microbatch": 2, **options})


def do_step(model, step):
    for x in step:
        step.backward(model(x).square().sum(), weight=len(x))


def run_once(train, policy=ONCE, coordinator=None):
    coordinator = coordinator or InMemoryCoordinator(1)
    return run(train, plane=coordinator.planes[0], policy=policy)


def train_to(total, **options):
    """A train function that returns its losses by step, and its parameters."""

    def train(world):
        model, loop = make_loop(world, **options)
        losses = {}
        for step in loop.until(total):
            do_step(model, step)
            losses[step.number] = step.loss
        return losses, [one.detach().clone() for one in model.parameters()]

    return train


def long_form(total):
    """The same training with the parts that ``Loop`` composes."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    plan = BatchPlan(6, 1, microbatch=2).for_rank(0)
    gradients = ExactGradients(model, tree=True)
    losses = {}
    with ElasticDataLoader(SAMPLES, plan, seed=0) as data:
        for step in range(total):
            work = next(iter(data))
            mine = [batch.data for batch in work]
            for turn in gradients.step(plan):
                x = mine[turn.position]
                with seeded(0, step, turn.id):
                    turn.backward(model(x).square().sum(), weight=len(x))
            losses[step] = gradients.finish(clip=0.5).loss
            optimizer.step()
            work.commit()
    return losses, [one.detach().clone() for one in model.parameters()]


def test_loop_has_the_bits_of_its_parts():
    losses, parameters = run_once(train_to(7, clip=0.5)).value
    expected, expected_parameters = long_form(7)
    assert losses == expected
    assert_same_bits(parameters, expected_parameters)


def test_next_run_resumes_at_the_next_step_with_the_same_bits(node):
    first, _ = run_once(train_to(4, clip=0.5, checkpoint="tiered://job")).value
    close_sessions()
    then, parameters = run_once(train_to(7, clip=0.5, checkpoint="tiered://job")).value
    assert [*then] == [4, 5, 6]
    expected, expected_parameters = long_form(7)
    assert {**first, **then} == expected
    assert_same_bits(parameters, expected_parameters)
    close_sessions()
    assert run_once(train_to(7, checkpoint="tiered://job")).value[0] == {}


def test_last_step_becomes_durable(node, tmp_path):
    run_once(train_to(3, checkpoint="tiered://job", durable=f"file://{tmp_path}", durable_every=100))
    with Checkpointer("tiered://job", durable=f"file://{tmp_path}") as ckpt:
        assert ckpt.wait("durable")
        assert [(one.step, "durable" in one.tiers) for one in ckpt.steps()][-1] == (2, True)


def test_last_step_is_saved_for_any_interval(node):
    run_once(train_to(6, checkpoint="tiered://job", every=4))
    close_sessions()
    assert [*run_once(train_to(8, checkpoint="tiered://job", every=4)).value[0]] == [6, 7]


@pytest.mark.parametrize("kind", ["exception", "resize", "stop"])
def test_interrupted_loop_has_the_losses_of_an_undisturbed_one(node, kind):
    coordinator, losses = InMemoryCoordinator(1), {}

    def train(world):
        model, loop = make_loop(world, clip=0.5, checkpoint="tiered://job")
        for step in loop.until(8):
            do_step(model, step)
            if step.number == 3 and world.epoch == 0:
                if kind == "exception":
                    raise ZeroDivisionError("a step too far")
                (coordinator.stop if kind == "stop" else lambda: coordinator.resize(1))()
                world._gate.poll()
            losses.setdefault(step.number, []).append(step.loss)
        return [one.detach().clone() for one in model.parameters()]

    ended = run_once(train, AGAIN, coordinator)
    if kind == "stop":
        assert ended.outcome is RunOutcome.STOPPED
        close_sessions()
        coordinator = InMemoryCoordinator(1)
        ended = run_once(train, AGAIN, coordinator)
    assert ended.outcome is RunOutcome.FINISHED
    expected, parameters = long_form(8)
    assert {number: set(values) for number, values in losses.items()} == {n: {loss} for n, loss in expected.items()}
    assert all(len(values) == 1 for values in losses.values())
    assert_same_bits(ended.value, parameters)


@pytest.mark.parametrize("read", [False, True])
def test_break_drops_the_step_unless_its_loss_was_read(node, read):
    def train(world):
        model, loop = make_loop(world, checkpoint="tiered://job")
        for step in loop.until(8):
            do_step(model, step)
            if step.number == 2:
                if read:
                    assert step.loss > 0
                break
        with pytest.raises(StepOrderError, match="closed"):
            next(loop.until(9))

    assert run_once(train).outcome is RunOutcome.FINISHED
    close_sessions()
    assert [*run_once(train_to(4, checkpoint="tiered://job")).value[0]] == ([3] if read else [2, 3])


def test_loop_ends_its_resources_when_the_body_raises(node):
    kept = []

    def train(world):
        model, loop = make_loop(world, checkpoint="tiered://job")
        kept.append(loop)
        for step in loop.until(8):
            do_step(model, step)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_once(train)
    assert kept[0].checkpointer._closed


def test_loop_that_was_never_iterated_is_closed_with_its_world(node):
    made = []
    run_once(lambda world: made.append(make_loop(world, checkpoint="tiered://job")[1]))
    assert made[0].checkpointer._closed


def test_checkpointer_of_the_caller_stays_open(node):
    with Checkpointer("tiered://job") as ckpt:
        run_once(train_to(2, checkpoint=ckpt))
        assert ckpt.wait()
        assert [one.step for one in ckpt.steps()][-1] == 1


def test_mean_losses_are_weighted_by_their_samples():
    """The last microbatch has one sample, the others two."""

    def losses(reduction):
        def train(world):
            model, loop = make_loop(world, clip=0.5, global_batch=5)
            found = []
            for step in loop.until(3):
                for x in step:
                    errors = model(x).square().flatten()
                    step.backward(getattr(errors, reduction)(), weight=len(x), reduction=reduction)
                found.append(step.loss)
            return found

        return run_once(train).value

    assert losses("mean") == pytest.approx(losses("sum"), rel=1e-5)


@pytest.mark.parametrize("kind", ["steps", "plateau"])
def test_schedule_and_rule_are_restored(node, kind):
    def train_until(total):
        def train(world):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = (
                StepLR(optimizer, 2, 0.5)
                if kind == "steps"
                else ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            )
            rule = LinearLRRule(base_batch=3)
            options = {"schedule": schedule, "lr_rule": rule, "checkpoint": f"tiered://{total[0]}"}
            model, loop = make_loop(world, model, optimizer, **options)
            for step in loop.until(total[1]):
                do_step(model, step)
            return [one.detach().clone() for one in model.parameters()], optimizer.param_groups[0]["lr"]

        return train

    whole = run_once(train_until(("whole", 7))).value
    run_once(train_until(("parts", 3)))
    close_sessions()
    parts = run_once(train_until(("parts", 7))).value
    assert_same_bits(parts[0], whole[0])
    assert parts[1] == whole[1] < 0.1


def test_further_state_is_saved_and_restored(node):
    seen = torch.zeros(1)

    def train(world):
        model, loop = make_loop(world, checkpoint="tiered://job", state={"seen": seen})
        for step in loop.until(loop.first + 3):
            do_step(model, step)
            seen.add_(1)
        return float(seen)

    assert run_once(train).value == 3
    close_sessions()
    seen.fill_(100)
    assert run_once(train).value == 6


def test_step_that_ends_too_early_is_refused():
    def train(world):
        model, loop = make_loop(world)
        for step in loop.until(3):
            with pytest.raises(StepOrderError, match="outside"):
                step.backward(torch.zeros(1), weight=1)
            for x in step:
                with pytest.raises(StepOrderError, match="before all its microbatches"):
                    assert step.loss
                step.backward(model(x).square().sum(), weight=len(x))
                break

    with pytest.raises(StepOrderError, match="step 0 ended before all its microbatches"):
        run_once(train)


def test_nonfinite_loss_is_a_fault():
    def train(world):
        model, loop = make_loop(world)
        for step in loop.until(3):
            for x in step:
                step.backward(model(x).sum() * float("nan"), weight=len(x))

    with pytest.raises(NonFiniteLossError):
        run_once(train)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": {"model": 1}}, "state has 'model'"),
        ({"every": 3}, "every= need checkpoint="),
        ({"epochs": 3}, "epochs= cannot be set here"),
        ({"epoch_end": "short"}, "epoch_end= cannot be set here"),
    ],
)
def test_contradicting_arguments_are_refused(options, words):
    with pytest.raises(PolicyError, match=words):
        run_once(lambda world: make_loop(world, **options))
