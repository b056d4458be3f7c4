"""Invalid frames on the real agent's socket, their effect on the agent, and the job's recovery."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest

from elastic.errors import ControlPlaneUnavailableError
from integration.hyperpod.elastic_agent import worker_client as worker_module
from integration.hyperpod.elastic_agent.ipc import AgentConnection as RankConnection
from integration.hyperpod.elastic_agent.ipc import FrameDecoder, encode_agent_frame
from integration.hyperpod.elastic_agent.worker_client import AgentWorker
from integration.hyperpod.operator.sim_loop import SimOverrides
from tests.support.hyperpod_inprocess import TOTAL, step_results
from tests.support.operated_jobs import operated_job, reference_steps
from tests.support.zygote import Zygote, has_ended

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
pytest.importorskip("hyperpod_elastic_agent")

WAITS_S = 60.0


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def encode_message(kind: str, **fields: object) -> bytes:
    return encode_agent_frame({"type": kind, "client_id": "nobody", "local_rank": 0, **fields})


HARMLESS = {
    "no JSON": frame(b"{"),
    "nothing": frame(b""),
    "no type": frame(b"{}"),
    "a type nobody knows": encode_message("something new"),
    "no rank": frame(b'{"type": "job_fault", "client_id": "x"}'),
    "a length of 1 GiB": struct.pack(">I", 1 << 30) + b"{",
    "half a length": b"\x00\x00",
    "half a frame": encode_message("job_fault", rank=0, reason="torn")[:-7],
    "a whole frame and half of one": encode_message("something new") + encode_message("job_fault")[:9],
}
"""Frames after which the agent still serves its ranks, even while the connection stays open."""

DEAFENING = {
    "no UTF-8": frame(b"\xff\xfe\x00\x00"),
    "a list": frame(b"[]"),
    "null": frame(b"null"),
    "a number": frame(b"7"),
    "a fault of no rank": encode_message("job_fault", rank=None),
    "past the barrier, of a rank that is none": encode_message("past_rcb_barrier", local_rank=99),
    "a checkpoint before its prefix": encode_message(
        "ckpt_info_update", step=1, path="p", checkpoint_type="model_checkpoint"
    ),
}
"""Frames that end the agent's only reader thread, so that it silently stops serving its ranks."""


def send_frame(path: Path, frame: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    sock.sendall(frame)
    return sock


def is_answering(path: Path) -> bool:
    """Return whether the agent answers a request that it answers at once."""
    with send_frame(path, encode_message("init") + encode_message("ckpt_info_get")) as sock:
        sock.settimeout(WAITS_S)
        frames = FrameDecoder()
        while data := sock.recv(1 << 16):
            for message in frames.feed(data):
                return message["type"] == "ckpt_info_get"
    return False


def _serve(_say: Callable[[str], object], folder: str, address: str) -> None:
    """Run the agent's own socket server for two ranks, and report the end of its reader thread."""
    pipe = Client(address)
    tempfile.tempdir = folder
    from hyperpod_elastic_agent.ipc import server as ipc
    from hyperpod_elastic_agent.ipc.socket import HyperPodElasticAgentSocketServer as Socket

    Socket._singleton_instance = None  # the import created it in the parent process
    ipc.BaseIPCSocketServer.socket_server = Socket()
    ended = threading.Event()
    threading.excepthook = lambda _: ended.set()
    ipc.CheckpointDiscoverySocketServer()
    server = ipc.InProcessRestartSocketServer(2)
    pipe.send(server.socket_server.server_address)
    while True:
        if ended.wait(0.05):
            pipe.send("deaf")
            pipe.recv()
            return
        if pipe.poll():
            return


@pytest.fixture
def agent_socket(zygote: Zygote, tmp_path: Path) -> Iterator[tuple[Path, Connection]]:
    with Listener() as listener:
        process = zygote.start(_serve, str(tmp_path), listener.address)
        ours = listener.accept()
    try:
        assert ours.poll(WAITS_S)
        yield Path(ours.recv()), ours
    finally:
        with contextlib.suppress(OSError):
            ours.send("end")
        has_ended(process.pid, 10)
        process.kill_if_alive()
        process.wait()
        ours.close()


def test_agent_survives_harmless_frames(agent_socket: tuple[Path, Connection]) -> None:
    path, pipe = agent_socket
    kept = [send_frame(path, frame) for frame in HARMLESS.values()]
    assert is_answering(path)
    for sock in kept:
        sock.close()
    assert is_answering(path)
    assert not pipe.poll()


@pytest.mark.parametrize("frame", DEAFENING.values(), ids=DEAFENING)
def test_agent_stops_answering_after_hostile_frames_and_the_rank_times_out(
    frame: bytes, agent_socket: tuple[Path, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "AGENT_SILENCE_LIMIT_S", 0.3)
    monkeypatch.setattr(worker_module, "_POLL_S", 0.05)
    path, pipe = agent_socket
    assert is_answering(path)
    with send_frame(path, frame):
        assert pipe.poll(WAITS_S)
        assert pipe.recv() == "deaf"
        worker = AgentWorker(RankConnection(path, 0))
        try:
            with pytest.raises(ControlPlaneUnavailableError, match="has not read"):
                worker.wait_at_barrier(timeout_s=WAITS_S)
        finally:
            worker.close()


def socket_of(agent: int) -> Path:
    return Path(tempfile.gettempdir()) / f"hyperpod_elastic_agent_{agent}.sock"


@pytest.mark.nightly
def test_job_survives_invalid_frames_and_an_unresponsive_agent(tmp_path: Path, zygote) -> None:
    """A spare replaces a pod, and receives both of its assignments by ``/update``."""
    with operated_job(tmp_path, spares=1, environ={"STORY_DEAF_S": "3"}) as job:
        job.set_limit(2)
        first = job.wait_step(1, 1)
        pods = job.state.members
        (spare,) = job.wait_until(lambda: job.state.spares, "a spare exists")
        job.wait_until(
            lambda: job.last_status(spare).version == job.state.world.version, "the spare has its assignment"
        )
        assert (job.last_status(spare).rank, job.last_status(spare).spare) == (2, True)
        waiting = job.rank_pids(spare)

        # Unknown clients send frames to both agents and stay connected.
        sockets = [socket_of(job.agent_pid(pod)) for pod in pods]
        strangers = [send_frame(path, frame) for path in sockets for frame in HARMLESS.values()]
        job.set_limit(3)
        assert {one.pid for one in job.wait_step(1, 2)} == {one.pid for one in first}

        # A rank is killed in the middle of a frame; the other pod's ranks keep their processes.
        job.break_at("tear", rank=2, step=3)
        second = job.wait_step(2, 3)
        assert {one.pid for one in second if one.pod == pods[0]} == {one.pid for one in first if one.pod == pods[0]}
        for stranger in strangers:
            stranger.close()

        # An agent stops reading. Its ranks train until they must send a message, and then fail.
        with send_frame(sockets[0], DEAFENING["no UTF-8"]):
            job.set_limit(5)
            assert {one.pid for one in job.wait_step(2, 4)} == {one.pid for one in second}
            job.break_at("raise", rank=1, step=5)
            job.wait_until(
                lambda: "has not read for 3 s" in job.rank_output(pods[0]), "its ranks report the silent agent"
            )
        if job.state.epoch == 2:  # the operator's own time limits are longer than those of health monitoring
            job.place.save_overrides(SimOverrides(bad_nodes={job.node_of(pods[0]): "UnschedulablePendingReplacement"}))
        third = job.wait_step(3, 5)
        assert job.state.members == (spare, pods[1])
        assert {one.pid for one in third if one.pod == spare} <= waiting
        assert {one.pid for one in third if one.pod == pods[1]} == {one.pid for one in second if one.pod == pods[1]}
        assert job.count_requests(spare, "/update") >= 2
        assert job.count_requests(spare, "/start") == 1

        job.set_limit(TOTAL)
        job.wait_until(lambda: job.state.phase.is_final, "the job has ended")
        lines = job.process_lines()
    assert job.state.phase.value == "Succeeded", job.events
    assert step_results(lines) == reference_steps(zygote)
