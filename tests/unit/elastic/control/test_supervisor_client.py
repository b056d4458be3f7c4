"""A rank learns of the end of its job from the message that acknowledges its report."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from msgspec.structs import replace

from elastic.control.control_messages import (
    ExitReason,
    RankDesired,
    RankHello,
    RankPhase,
    RankStatus,
    SupervisorEndpoint,
)
from elastic.control.control_plane import Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.epoch_state import ChangeMessage, EpochMessage
from elastic.control.supervisor_client import SupervisorClient
from elastic.errors import ControlDeadlineError, JobFailedError, StaleEpochError
from tests.support.control_planes import PATIENCE_S, start_all
from tests.support.raw_messages import receive_message, send_message

PLACE = RankAssignment(
    epoch=0, rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, node_count=1, store="nowhere:1"
)
STOP = ChangeMessage(NoticeKind.STOP, "enough")


@contextlib.contextmanager
def supervised(tmp_path, over):
    """A rank in a world, whose supervisor acknowledges its seal together with the end of the job."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()

        def answer():
            line, _ = door.accept()
            with line, contextlib.suppress(BrokenPipeError):  # the rank has exited and waits for no answer
                assert receive_message(line, RankHello).token == "token"
                while (says := receive_message(line, RankStatus)) is not None:
                    hears = RankDesired(says.number, PLACE, EpochMessage(PLACE.epoch, pause=STOP, target=4))
                    if says.sealed is not None or (over is ExitReason.JOB_FAILED and says.phase is RankPhase.IN_WORLD):
                        hears = RankDesired(says.number, exit=over, reason="the end")
                    send_message(line, hears)

        thread = threading.Thread(target=answer)
        thread.start()
        plane = SupervisorClient(SupervisorEndpoint(tmp_path / "door", "token"))
        try:
            plane.wait_for_assignment(timeout_s=60)
            yield plane
        finally:
            plane.close()
            thread.join()


@pytest.mark.parametrize("over", [ExitReason.STOPPED, ExitReason.DISMISSED])
def test_dismissal_right_after_sealing_still_counts_the_seal(tmp_path, over):
    with supervised(tmp_path, over) as plane:
        assert plane.agree_on_step(4, timeout_s=60) == 4
        plane.report_sealed(4, timeout_s=60)
        with pytest.raises(Dismissed, match="the end"):
            plane.wait_for_assignment(timeout_s=60)


def test_sealing_for_a_failed_job_raises(tmp_path):
    with supervised(tmp_path, ExitReason.JOB_FAILED) as plane:
        with pytest.raises(StaleEpochError, match="the end"):
            plane.report_sealed(4, timeout_s=60)
        with pytest.raises(JobFailedError, match="the end"):
            plane.wait_for_assignment(timeout_s=60)


def test_stopped_supervisor_blocks_no_rank(tmp_path):
    """Its socket is full: a sender that blocked would hold the lock that other threads need."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        plane = SupervisorClient(SupervisorEndpoint(tmp_path / "door", "token"))

        def speak():
            while not plane._unsent:
                with plane._changed:
                    plane._send_status()
            with pytest.raises(ControlDeadlineError):
                plane.wait_for_assignment(timeout_s=0.1)

        (spoken,) = start_all(speak)
        spoken.result(PATIENCE_S)
        line, _ = door.accept()  # the supervisor continues
        with line:
            assert receive_message(line, RankHello).token == "token"
            says = RankStatus(0, RankPhase.IN_WORLD)
            while says.phase is not RankPhase.READY:
                says = receive_message(line, RankStatus)
        plane.close()


def test_step_sealed_in_a_broken_world_is_reported_until_the_next_world(tmp_path):
    """The rank was in a collective when the seal ended, so no step boundary has reported it."""
    statuses = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()

        def answer():
            line, _ = door.accept()
            with line, contextlib.suppress(BrokenPipeError):  # the rank has closed and waits for no answer
                assert receive_message(line, RankHello).token == "token"
                while (says := receive_message(line, RankStatus)) is not None:
                    statuses.append(says)
                    left = says.phase is RankPhase.READY and says.epoch == 0
                    place = replace(PLACE, epoch=1) if left or says.epoch == 1 else PLACE
                    send_message(line, RankDesired(says.number, place))

        (server,) = start_all(answer)
        plane = SupervisorClient(SupervisorEndpoint(tmp_path / "door", "token"))
        try:
            assert plane.wait_for_assignment(timeout_s=PATIENCE_S).epoch == 0
            plane.report_progress(RankProgress(43, 42, has_sealed=True, job="job", base_step=40))
            assert plane.wait_for_assignment(timeout_s=PATIENCE_S).epoch == 1
            plane.report_progress(RankProgress(43, 42, job="job"))
        finally:
            plane.close()
        server.result(PATIENCE_S)
    left = [one for one in statuses if one.phase is RankPhase.READY and one.epoch == 0]
    entered = [one for one in statuses if one.epoch == 1]
    assert {one.progress for one in left} == {RankProgress(-1, 42, has_sealed=True, job="job", base_step=40)}
    assert entered
    assert {(one.progress.sealed, one.progress.has_sealed, one.progress.base_step) for one in entered} == {
        (42, False, None)
    }
