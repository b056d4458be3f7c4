"""A step captured in a graph changes tensors without Python: it is not recorded, and warns."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.async_device import AsyncDevice
from tieredckpt.checkpointer.hydrate_from_survivors import hydrate_from_survivors
from tieredckpt.live.boundary_recorder import BoundaryRecorder
from tieredckpt.live.survivor_state import SurvivorState, track_step_boundaries
from tieredckpt.settings import load_settings
from tieredckpt.tensors.device import AcceleratorBackend, accelerator, use_device_backend

GRAPH_CLASSES = [("cuda", torch.cuda.CUDAGraph)]
if hasattr(torch.xpu, "XPUGraph"):  # from torch 2.11 on
    GRAPH_CLASSES.append(("xpu", torch.xpu.XPUGraph))


class Trained:
    """A step that is captured once, including its optimizer, and then replayed."""

    def __init__(self, device: AsyncDevice) -> None:
        self.device = device
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optim": self.optimizer}
        self.noter = BoundaryRecorder("job", load_settings())

    def eager(self, step: int) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.noter.record(self.state, step)

    def captured(self) -> None:
        """Change the weights like kernels of a graph, without hooks or version counters."""

        def kernels() -> None:
            for one in self.model.parameters():
                torch.from_numpy(one.detach().numpy()).sub_(1.0)

        self.device.replay(kernels)


@pytest.fixture
def trained():
    with use_device_backend(AsyncDevice()) as device, track_step_boundaries() as held:
        one = Trained(device)
        one.held = held
        held.enter_world(0)
        yield one


def test_a_state_that_a_replayed_graph_has_changed_is_not_kept(trained, caplog):
    trained.eager(1)
    trained.captured()  # of step 2, in which the rank is lost
    with caplog.at_level("INFO"):
        trained.held.retain_after_fault()
    assert trained.held.retained == {}
    assert "replayed from a graph" in caplog.text


def test_captured_steps_are_not_recorded_and_warn_once(trained, caplog):
    trained.eager(0)
    for step in range(1, 4):
        trained.captured()
        trained.noter.record(trained.state, step)
    assert trained.held.boundaries == {}
    assert len([one for one in caplog.records if "replayed from a graph" in one.message]) == 1
    trained.held.retain_after_fault()
    assert trained.held.reached_steps == {"job": 3}


def test_next_world_reports_why_only_the_snapshot_is_used(trained):
    trained.eager(0)
    trained.captured()
    trained.noter.record(trained.state, 1)
    trained.held.retain_after_fault()
    (found,) = hydrate_from_survivors(trained.held, torch.distributed.HashStore(), 0, 1)
    assert (found.mode, found.reached) == ("snapshot", 1)
    assert "replayed from a graph" in found.why


def test_a_world_without_captured_steps_is_noted_again(trained):
    trained.captured()
    trained.held.retain_after_fault()
    trained.held.enter_world(1)
    trained.eager(5)
    trained.held.retain_after_fault()
    assert trained.held.retained["job"].step == 5


@pytest.mark.parametrize(("kind", "graph"), GRAPH_CLASSES, ids=[kind for kind, _ in GRAPH_CLASSES])
def test_torch_s_own_graphs_are_seen_while_they_are_watched(kind, graph, monkeypatch):
    """``torch.compile(mode="reduce-overhead")`` replays its graphs through the same class."""
    replayed, seen = [], []
    monkeypatch.setattr(graph, "replay", lambda _self: replayed.append(1))
    before = graph.replay
    with AcceleratorBackend(kind).on_replay(lambda: seen.append(1)):
        graph.replay(None)
    assert (replayed, seen) == ([1], [1])
    assert graph.replay is before
    graph.replay(None)
    assert (replayed, seen) == ([1, 1], [1])


@pytest.mark.parametrize(("kind", "graph"), GRAPH_CLASSES, ids=[kind for kind, _ in GRAPH_CLASSES])
def test_graph_replays_are_seen_by_all_remaining_watchers(kind, graph, monkeypatch):
    seen = []
    monkeypatch.setattr(graph, "replay", lambda _self: seen.append("replayed"))
    before = graph.replay
    first, second = (AcceleratorBackend(kind).on_replay(lambda name=name: seen.append(name)) for name in "ab")
    first.__enter__()
    second.__enter__()
    graph.replay(None)
    first.__exit__(None, None, None)
    graph.replay(None)
    second.__exit__(None, None, None)
    assert seen == ["a", "b", "replayed", "b", "replayed"]
    assert graph.replay is before


def test_reduce_overhead_replays_through_the_watched_class():
    (folder,) = importlib.util.find_spec("torch._inductor").submodule_search_locations
    source = (Path(folder) / "cudagraph_trees.py").read_text()
    assert "torch.cuda.CUDAGraph()" in source
    assert "self.graph.replay()" in source


@pytest.mark.skipif(not isinstance(accelerator(), AcceleratorBackend), reason="no accelerator")
def test_a_step_captured_on_the_device_is_seen():
    place = accelerator().current()
    tensor, held = torch.zeros(3, device=place), SurvivorState()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    with accelerator().on_replay(held.is_replayed):
        graph.replay()
    assert held.replays
