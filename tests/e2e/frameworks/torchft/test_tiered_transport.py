"""torchft's recovery through the node agents: bit equality, damage, absence, lost nodes and timeouts."""

import math
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

pytest.importorskip("torchft", reason="torchft is not installed: pip install tieredckpt[torchft]")

from torchft.checkpointing.transport_test import run_multi_recovery_test

from integration.torchft import TieredTransport
from integration.torchft.transport_state import flatten_for_transport, unflatten_from_transport
from tests.support.bits import assert_same_bits
from tests.support.clusters import AgentNode
from tests.support.leaks import process_prefix
from tests.support.stores import flip_byte, pinned_file
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    MismatchError,
    SaveFailedError,
    TierUnavailableError,
    UntrustedObjectError,
    UsageError,
)
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import load_settings, override_settings

pytestmark = pytest.mark.e2e
SECRET = "a secret of these tests, long enough"
TEN_S, SHORT = timedelta(seconds=10), timedelta(seconds=0.5)


SEND_AND_DIE = """
import os, signal, torch
from datetime import timedelta
from integration.torchft import TieredTransport

transport = TieredTransport()
transport.send_checkpoint([1], 1, {"weight": torch.ones(1000)}, timedelta(seconds=10))
print(transport.metadata(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Custom:
    """Value that is more than data."""


@pytest.fixture
def transport(agent_dir):
    made = TieredTransport()
    yield made
    made.shutdown()


@pytest.fixture
def nodes():
    """Yield two nodes with running agents."""
    made = [
        AgentNode(name, Path("/dev/shm") / (process_prefix("tieredckpt") + uuid.uuid4().hex[:8]))
        for name in ("n1", "n2")
    ]
    try:
        for node in made:
            node.start()
        yield made
    finally:
        close_sessions()
        for node in made:
            node.resume_agent()
            node.lose()


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def transport_on(node, secret=SECRET):
    return TieredTransport(settings=override_settings(node.settings, peer={"secret": secret}))


def send(transport, state, step=1):
    transport.send_checkpoint([1], step, state, TEN_S)


def receive(transport, metadata, step=1, timeout=TEN_S):
    return transport.recv_checkpoint(0, metadata, step, timeout)


def shards_of(transport):
    settings = load_settings()
    return open_session(transport.job, settings).agent.store.list_shards(transport.job)


def state_with_odd_values():
    kinds = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.int8)
    return {
        "user": {
            "model": OrderedDict((str(kind), torch.arange(7).to(kind)) for kind in kinds),
            "nan": torch.tensor([math.nan, -0.0, math.inf], dtype=torch.float64),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3),
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "sparse": torch.eye(3).to_sparse(),
            "optimizer": {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        },
        "torchft": {"step": 4, "batches_committed": 8, "tuple": (1, None, "a"), "nothing": {}, 7: b"bytes"},
    }


def test_shipped_conformance_test_passes(transport):  # with a running agent, as the test allows 10 s in total
    run_multi_recovery_test(TestCase(), lambda rank, size: TieredTransport(), torch.device("cpu"))


def test_received_state_is_bit_equal(transport):
    state = state_with_odd_values()
    send(transport, state)
    received = receive(transport, transport.metadata())
    assert_same_bits(state, received)
    assert type(received["user"]["model"]) is OrderedDict


def test_sender_may_change_its_state_at_once(transport):
    state = {"weight": torch.ones(1000)}
    send(transport, state)
    state["weight"].zero_()
    assert_same_bits(receive(transport, transport.metadata()), {"weight": torch.ones(1000)})


def test_dtensors_retain_spec_and_local_bytes(transport, gloo):
    local = torch.randn(3, 4)
    meshes = (
        DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("replicate", "shard")),
        DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp"), _init_backend=False),
    )
    placements = [(Replicate(), Shard(0)), (Shard(1), Replicate()), (Partial("avg"), Shard(0))]
    state = {
        f"{mesh.shape} {placed}": DTensor.from_local(local, mesh, placed, run_check=False, shape=(6, 8), stride=(8, 1))
        for mesh in meshes
        for placed in placements
    }
    send(transport, state)
    received = receive(transport, transport.metadata())
    assert_same_bits(state, received)
    assert [one._spec for one in received.values()] == [one._spec for one in state.values()]


def test_flipped_byte_is_detected(transport):
    send(transport, {"weight": torch.ones(1 << 16)})
    store = open_session(transport.job, load_settings()).agent.store
    (shard,) = shards_of(transport)
    pin = store.pin(shard.key)
    flip_byte(pinned_file(pin), pin.record.size_bytes // 2)
    pin.close()
    store.unpin(pin.id)
    with pytest.raises(CheckpointDamagedError):
        receive(transport, transport.metadata())
    with pytest.raises(CheckpointDamagedError):  # another receiver, after the agent dropped the shard
        receive(transport, transport.metadata())


def test_other_step_times_out_as_absent(transport):
    send(transport, {"weight": torch.ones(3)}, step=4)
    for step in (3, 5):
        began = time.monotonic()
        with pytest.raises(CheckpointNotFoundError, match=rf"step {step} .* timed out after 0.5 s"):
            receive(transport, transport.metadata(), step, SHORT)
        assert time.monotonic() - began < 5


def test_lower_step_can_follow(transport):
    for step in (5, 5, 3, 4):
        send(transport, {"step": torch.tensor(step)}, step)
        assert receive(transport, transport.metadata(), step) == {"step": torch.tensor(step)}


def test_receiver_waits_for_the_sender(transport):
    later = threading.Timer(0.5, send, (transport, {"weight": torch.ones(3)}))
    later.start()
    assert_same_bits(receive(transport, transport.metadata()), {"weight": torch.ones(3)})
    later.join()


def test_disallow_checkpoint_frees_memory(transport):
    send(transport, {"weight": torch.ones(1 << 20)})
    assert len(shards_of(transport)) == 1
    transport.disallow_checkpoint()
    assert shards_of(transport) == []
    with pytest.raises(CheckpointNotFoundError, match="disallow_checkpoint deleted it"):
        receive(transport, transport.metadata(), timeout=SHORT)


def test_state_of_a_killed_sender_is_received(transport):
    killed = subprocess.run([sys.executable, "-c", SEND_AND_DIE], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert_same_bits(receive(transport, killed.stdout), {"weight": torch.ones(1000)})


def test_unsafe_value_is_refused_before_it_is_sent(transport):
    with pytest.raises(UntrustedObjectError, match=r"\['b'\].*Custom"):
        send(transport, {"a": 1, "b": Custom()})
    with pytest.raises(UntrustedObjectError, match=r"\['f'\]"):
        send(transport, {"f": lambda: 1})
    assert shards_of(transport) == []


def test_state_without_room_is_a_failed_save(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "1MiB")
    transport = TieredTransport()
    with pytest.raises(SaveFailedError, match=r"agent\.budget"):
        send(transport, {"weight": torch.ones(1 << 20)})


def test_metadata_of_another_transport_is_refused(transport):
    with pytest.raises(UsageError, match="TieredTransport"):
        receive(transport, "http://host:29500/checkpoint/")


def test_state_of_another_step_is_refused():
    flat = flatten_for_transport({"weight": torch.ones(3)}, 1, trust_objects=False)
    assert_same_bits(unflatten_from_transport(flat, 1), {"weight": torch.ones(3)})
    with pytest.raises(MismatchError, match="has step 1, and step 2 was requested"):
        unflatten_from_transport(flat, 2)


def test_another_node_reads_from_the_senders_agent(nodes):
    sender, receiver = map(transport_on, nodes)
    state = state_with_odd_values()
    for step in (1, 2):
        send(sender, state, step)
        assert_same_bits(receive(receiver, sender.metadata(), step), state)


@pytest.mark.parametrize("secrets", [("", ""), ("", SECRET), (SECRET, "")])
def test_another_node_needs_the_secret(nodes, secrets):
    sender, receiver = map(transport_on, nodes, secrets)
    send(sender, {"weight": torch.ones(3)})
    with pytest.raises(UsageError, match=r"on node n1, and this node is n2.*peer\.secret"):
        receive(receiver, sender.metadata())


def test_another_secret_is_refused(nodes):
    sender, receiver = transport_on(nodes[0]), transport_on(nodes[1], secret="another secret, as long as this")
    send(sender, {"weight": torch.ones(3)})
    with pytest.raises(TierUnavailableError):
        receive(receiver, sender.metadata(), timeout=timedelta(seconds=3))


@pytest.mark.parametrize(
    ("known", "loss"),
    [
        (True, "suspend_agent"),
        (False, "lose"),
        pytest.param(True, "lose", marks=pytest.mark.nightly),
        pytest.param(False, "suspend_agent", marks=pytest.mark.nightly),
    ],
)
def test_lost_sender_is_unreachable_within_the_timeout(nodes, loss, known):
    sender, receiver = map(transport_on, nodes)
    send(sender, {"weight": torch.ones(3)})
    metadata = sender.metadata()
    if known:
        receive(receiver, metadata)
    open_session(sender.job, override_settings(nodes[0].settings)).stop_watching_agent()
    getattr(nodes[0], loss)()
    began = time.monotonic()
    with pytest.raises(TierUnavailableError, match="timed out after 3 s"):
        receive(receiver, metadata, timeout=timedelta(seconds=3))
    assert time.monotonic() - began < 10
