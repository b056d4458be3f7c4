"""Saves that return before the copy: an optimizer's step waits, and other changes are detected."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from torch import nn

from tests.support.async_device import AsyncDevice
from tests.support.async_staging import mapped_slot
from tests.support.bits import assert_same_bits, zeros_like_state
from tieredckpt import Checkpointer
from tieredckpt.checkpointer import overlapped_copy
from tieredckpt.checkpointer.overlapped_copy import OptimizerWatch, OverlappedStaging, optimizer_watch
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import SaveFailedError
from tieredckpt.format.shard_layout import Layout, TensorEntry, build_layout
from tieredckpt.format.slice_boxes import full_box
from tieredckpt.live.abort_fence import AbortFence, use_fence
from tieredckpt.session.session import open_session
from tieredckpt.settings import load_settings
from tieredckpt.tensors.device import use_device_backend
from tieredckpt.tensors.plain_tensors import dtype_name
from tieredckpt.tensors.slot_copy import Copier, SlotCopy, SlotWrite
from tieredckpt.tensors.state_dict import flatten_state, resolve_stateful
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WAIT_S = 60.0
WIDTH = 32
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw, foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw, fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adamw, one by one": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
}


class Gate:
    """Gate that blocks the copies after a save until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self._open = threading.Event()
        self._open.set()
        real = SlotCopy.copy_host_part

        def copy(one, copier):
            if threading.current_thread().name.startswith("tieredckpt-stage"):
                assert self._open.wait(WAIT_S)
            real(one, copier)

        monkeypatch.setattr(SlotCopy, "copy_host_part", copy)

    @contextlib.contextmanager
    def closed(self):
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


@pytest.fixture
def fresh_watch(monkeypatch):
    """Reset the watch after the test."""
    watch = optimizer_watch()
    yield watch
    watch.is_compiled = watch.is_replayed = False


class Training:
    """A model with buffers, its optimizer and its checkpointer, two steps after the first save."""

    def __init__(self, make=OPTIMIZERS["adamw, foreach"]) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.optimizer = make(self.model.parameters())
        self.state = {"model": self.model, "optim": self.optimizer, "cursor": {"at": 0}}
        self.checkpointer = Checkpointer("tiered://job")
        for step in range(2):
            self.gradients(step)
            self.optimizer.step()
            self.checkpointer.save(self.state, step).wait(timeout_s=WAIT_S)
        open_session("job", load_settings()).slots.wait_until_prepared()
        self.gradients(2)
        self.optimizer.step()

    def gradients(self, step: int) -> None:
        made = torch.Generator().manual_seed(step)
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH, generator=made)).square().mean().backward()
        self.state["cursor"]["at"] = step

    def held(self) -> dict[str, object]:
        """Return a copy of the current state."""
        flat = flatten_state(resolve_stateful(self.state))
        return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in flat.items()}

    def restored(self, step: int) -> dict[str, object]:
        other = Training.__new__(Training)
        other.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        other.optimizer = type(self.optimizer)(other.model.parameters(), **_options(self.optimizer))
        other.state = {"model": other.model, "optim": other.optimizer, "cursor": {"at": -1}}
        assert self.checkpointer.restore(other.state, step) == step
        return other.held()


def _options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    named = {"sgd": ("lr", "momentum"), "adamw": ("lr", "foreach", "fused")}[type(optimizer).__name__.lower()]
    return {name: optimizer.param_groups[0][name] for name in named}


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


def step_in_thread(optimizer: torch.optim.Optimizer) -> threading.Thread:
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    return thread


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_step_waits_for_the_copy(node, gate, make):
    training = Training(make)
    with training.checkpointer as checkpointer:
        expected = training.held()
        with gate.closed():
            saved = checkpointer.save(training.state, 2)
            assert saved.state is SaveState.STAGED
            training.gradients(3)  # also changes the buffers of BatchNorm
            steps = step_in_thread(training.optimizer)
            assert not saved.job.copied.done()
            assert_same_bits(expected["model.0.weight"], training.model[0].weight.detach())
        steps.join(WAIT_S)
        assert saved.wait("staged", timeout_s=WAIT_S) in (SaveState.STAGED, SaveState.SEALED)
        assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED
        assert not torch.equal(expected["model.0.weight"], training.model[0].weight)
        assert_same_bits(expected, training.restored(2))


def test_tensors_of_no_optimizer_are_copied_before_the_save_returns(node, gate):
    training = Training()
    average = {name: one.detach().clone() for name, one in training.model.named_parameters()}
    training.state["average"] = average
    with training.checkpointer as checkpointer:
        checkpointer.save(training.state, 2).wait(timeout_s=WAIT_S)
        open_session("job", load_settings()).slots.wait_until_prepared()
        training.gradients(3)
        training.optimizer.step()
        expected = {name: one.clone() for name, one in average.items()}
        with gate.closed():
            saved = checkpointer.save(training.state, 3)
            for one in average.values():
                one.add_(1)
        assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED
        state = {"average": zeros_like_state(expected)}
        assert checkpointer.restore(state, 3, strict=False) == 3
        assert_same_bits(expected, state["average"])


@pytest.mark.parametrize("how", ["in place", "through .data", "through .data and back"])
def test_change_outside_of_an_optimizer_step_is_not_saved(node, gate, how):
    training = Training()
    weight = training.model[0].weight
    with training.checkpointer as checkpointer:
        with gate.closed():
            saved = checkpointer.save(training.state, 2)
            if how == "in place":
                with torch.no_grad():
                    weight.add_(1)
            else:
                weight.data.add_(1)
        with pytest.raises(SaveFailedError, match=r"step 2 is not saved: model\.0\.weight was changed outside"):
            saved.wait(timeout_s=WAIT_S)
        if how == "through .data and back":
            weight.data.sub_(1)
        training.gradients(3)
        training.optimizer.step()
        expected = training.held()
        with gate.closed():
            saved = checkpointer.save(training.state, 3)
            weight.data.add_(1)  # is copied before the save returns by now
        assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED
        assert_same_bits(expected, training.restored(3))


def test_step_after_an_error_in_the_backward_pass_waits(node, gate):
    training = Training()
    with training.checkpointer as checkpointer:
        expected = training.held()
        with gate.closed():
            saved = checkpointer.save(training.state, 2)
            with pytest.raises(RuntimeError, match="shape"):
                training.model(torch.zeros(8, WIDTH + 1)).sum().backward()
            training.gradients(3)
            steps = step_in_thread(training.optimizer)
        steps.join(WAIT_S)
        saved.wait(timeout_s=WAIT_S)
        assert_same_bits(expected, training.restored(2))


def test_restore_into_the_copied_state_waits(node, gate):
    training = Training()
    with training.checkpointer as checkpointer:
        expected = training.held()
        with gate.closed():
            saved = checkpointer.save(training.state, 2)
            restores = threading.Thread(target=checkpointer.restore, args=(training.state, 1))
            restores.start()
            assert_same_bits(expected["model.0.weight"], training.model[0].weight.detach())
        restores.join(WAIT_S)
        assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED


def test_save_without_a_step_since_the_last_one_copies_before_it_returns(node):
    """This happens if a gradient scaler skips the step, or the optimizer never steps."""
    training = Training()
    with training.checkpointer as checkpointer:
        checkpointer.save(training.state, 2).wait(timeout_s=WAIT_S)
        expected = training.held()
        saved = checkpointer.save(training.state, 3)
        assert saved.job.copied is None
        training.model[0].weight.data.add_(1)
        assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED
        assert_same_bits(expected, training.restored(3))


def test_step_of_another_optimizer_waits_too(node, gate):
    training = Training()
    other = torch.optim.SGD(training.model.parameters(), lr=0.5)
    with training.checkpointer as checkpointer:
        expected = training.held()
        with gate.closed():
            saved = checkpointer.save(training.state, 2)
            training.gradients(3)
            steps = step_in_thread(other)
        steps.join(WAIT_S)
        saved.wait(timeout_s=WAIT_S)
        assert_same_bits(expected, training.restored(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("how", ["compiled", "replayed"])
def test_steps_that_cannot_wait_have_saves_copy_everything_at_once(node, gate, fresh_watch, how):
    training = Training()
    with training.checkpointer as checkpointer:
        with gate.closed():
            saved = checkpointer.save(training.state, 2)
            training.gradients(3)
            if how == "compiled":
                steps = threading.Thread(target=torch.compile(training.optimizer.step, backend="eager"))
            else:
                steps = threading.Thread(target=fresh_watch.before_replay)
            steps.start()
            if how == "compiled":
                steps.join(WAIT_S)
        steps.join(WAIT_S)
        if how == "compiled":
            with pytest.raises(SaveFailedError, match=r"outside of an optimizer's step|step was compiled"):
                saved.wait(timeout_s=WAIT_S)
        else:  # the replay has waited
            assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED
        saved = checkpointer.save(training.state, 3)
        assert saved.job.copied is None
        assert saved.wait(timeout_s=WAIT_S) is SaveState.SEALED


def test_replays_are_watched_as_long_as_the_process_runs():
    with use_device_backend(AsyncDevice()) as device, contextlib.closing(OptimizerWatch()) as watch:
        gc.collect()
        device.replay(lambda: None)
        assert watch.is_replayed


def test_blocking_staging_copies_before_the_save_returns(node, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_MEMORY_STAGING", "blocking")
    training = Training()
    with training.checkpointer as checkpointer:
        assert checkpointer.save(training.state, 2).job.copied is None


def test_close_ends_the_copy(node, gate):
    training = Training()
    expected = training.held()
    with gate.closed():
        saved = training.checkpointer.save(training.state, 2)
        closes = threading.Thread(target=training.checkpointer.close)
        closes.start()
    closes.join(WAIT_S)
    assert saved.state is SaveState.SEALED
    training.checkpointer = Checkpointer("tiered://job")
    with training.checkpointer:
        assert_same_bits(expected, training.restored(2))


def layout_of(tensors: dict[str, torch.Tensor]) -> Layout:
    entries = [
        TensorEntry(name, dtype_name(one.dtype), tuple(one.shape), full_box(tuple(one.shape)), one.itemsize)
        for name, one in tensors.items()
    ]
    return build_layout(entries, [], None)


# -- on a device -------------------------------------------------------------------------------------------------


class DeviceTraining:
    """Tensors on late devices that an optimizer owns, and a slot with a page behind every byte."""

    def __init__(self, device: AsyncDevice, stack: contextlib.ExitStack, *, tiny: bool) -> None:
        self.device = device
        values = [torch.randn(shape) for shape in ((2,), (3,)) if tiny]
        values = values or [torch.randn(shape) for shape in ((5000,), (33, 70), (2,), (7000,))]
        self.tensors = [device.to_device(one, number % 2) for number, one in enumerate(values)]
        self.buffer = device.to_device(torch.randn(100))
        self.expected = [*values, self.buffer.clone()]
        self.optimizer = torch.optim.SGD(self.tensors, lr=0.1)
        self.staging = OverlappedStaging()
        self.copier = stack.enter_context(contextlib.closing(Copier(2)))
        self.slot = stack.enter_context(mapped_slot(1 << 18))
        self.slot.prefault(self.copier, lambda: False)

    def start(self) -> overlapped_copy.OverlappedCopy:
        tensors = {f"t{number}": tensor for number, tensor in enumerate([*self.tensors, self.buffer])}
        layout = layout_of(tensors)
        writes = [SlotWrite(tensors[one.fqn], layout.header_bytes + one.start) for one in layout.tensors]
        starts = {one.fqn: write.start for one, write in zip(layout.tensors, writes, strict=True)}
        self.views = [self.slot.tensor(starts[name], torch.float32, one.shape) for name, one in tensors.items()]
        copy = self.staging.start(7, self.slot, layout, writes, self.copier)
        assert copy is not None
        return copy

    def note_step(self) -> None:
        """Call the hook as before an optimizer's step."""
        optimizer_watch().before_step(self.optimizer, (), {})

    def check(self) -> None:
        for view, expected in zip(self.views, self.expected, strict=True):
            assert torch.equal(view, expected)


@pytest.fixture
def on_devices(request):
    with contextlib.ExitStack() as stack:
        seed, tiny = request.param if isinstance(request.param, tuple) else (request.param, False)
        device = stack.enter_context(use_device_backend(AsyncDevice(seed)))
        training = DeviceTraining(device, stack, tiny=tiny)
        yield training
        device.close()
    assert (device.violations, device.races) == ([], [])


@pytest.mark.parametrize("on_devices", range(20), indirect=True)
def test_devices_do_not_change_a_tensor_before_it_is_copied(on_devices):
    training, device = on_devices, on_devices.device
    for one in training.tensors:
        device.launch(lambda it: it.add_(1), [one])
    training.expected = [*(one + 1 for one in training.expected[:-1]), training.expected[-1]]
    training.note_step()
    copy = training.start()
    device.launch(lambda it: it.zero_(), [training.buffer])  # a forward pass changes it before any step
    training.note_step()
    for one in training.tensors:
        device.launch(lambda it: it.add_(1), [one])
    copy.run(training.copier)
    training.check()


@pytest.mark.parametrize("on_devices", range(20), indirect=True)
def test_change_on_a_device_before_a_step_is_seen(on_devices):
    training = on_devices
    training.note_step()
    copy = training.start()
    torch.autograd.graph.increment_version(training.tensors[1])
    training.note_step()
    with pytest.raises(SaveFailedError, match="t1 was changed outside"):
        copy.run(training.copier)


# The ends of larger tensors go through memory that this device, unlike others, waits for.
@pytest.mark.parametrize("on_devices", [(seed, True) for seed in range(5)], indirect=True)
def test_step_that_an_aborted_world_computed_is_not_saved(on_devices):
    training, device = on_devices, on_devices.device
    fence = AbortFence(lambda: None)
    with use_fence(fence):
        training.note_step()
        for _ in range(50):
            device.launch(lambda it: it.add_(1), [training.tensors[0]])
        copy = training.start()
        fence.close()
        with pytest.raises(SaveFailedError, match="its world was aborted"):
            copy.run(training.copier)


@pytest.mark.parametrize("on_devices", range(5), indirect=True)
def test_step_that_was_computed_before_the_abort_is_saved(on_devices):
    training = on_devices
    fence = AbortFence(lambda: None)
    with use_fence(fence):
        training.note_step()
        copy = training.start()
        for place in (0, 1):
            training.device.current_stream(torch.device(training.device.type, place)).synchronize()
        fence.close()
        copy.run(training.copier)
    training.check()
