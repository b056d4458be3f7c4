"""``elastic map``: each input once, in order, despite lost workers and nodes."""

import contextlib
import json
import os
import random
import signal
import time

import pytest

from tests.support.agents import wait_process_ended
from tests.support.local_nodes import wait_until
from tests.support.map_jobs import map_job

__all__ = ["map_job"]

pytestmark = pytest.mark.e2e


def squares(count):
    return [{"id": number, "square": number**2} for number in range(count)]


def test_outputs_are_in_order_and_each_input_is_called_once(map_job):
    map_job.write_input(100)
    code, out, err = map_job.run("square", "--workers", "2", "--chunk-size", "7")
    assert code == 0, err
    assert map_job.results() == squares(100)
    assert sorted(number for _, number in map_job.calls()) == list(range(100))
    assert "100 inputs, in" in out
    assert "100/100 inputs, 15/15 chunks" in err
    assert sorted(path.name for path in map_job.work.iterdir()) == ["plan.json", "result.json"]


def test_finished_job_is_not_repeated(map_job):
    map_job.write_input(3)
    assert map_job.run("square")[0] == 0
    before = map_job.output.stat()
    code, out, _ = map_job.run("square", "--json")
    value = json.loads(out)
    assert (code, value["inputs"], value["failed"], value["chunks"]) == (0, 3, 0, 1)
    assert map_job.output.stat() == before
    assert len(map_job.calls()) == 3


def test_empty_input_has_an_empty_output(map_job):
    map_job.input.write_text("\n\n")
    assert map_job.run("square")[0] == 0
    assert map_job.output.read_bytes() == b""


def test_failed_inputs_are_lines_and_the_exit_status(map_job):
    map_job.write_input(6)
    with map_job.input.open("a") as file:
        file.write("\n{not json\n")
    code, out, err = map_job.run("odd_fails", "--retries", "1", "--chunk-size", "2", "--json")
    results = map_job.results()
    assert code == 1
    assert json.loads(out)["failed"] == 4
    assert [result["id"] for result in results if "error" not in result] == [0, 2, 4]
    assert [(result["line"], result["input"]) for result in results if "error" in result] == [
        (2, {"id": 1}),
        (4, {"id": 3}),
        (6, {"id": 5}),
        (8, "{not json"),
    ]
    assert results[1]["error"] == {"type": "ValueError", "message": "1 is odd", "attempts": 2}
    assert sorted(number for _, number in map_job.calls()) == [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert err.count("a line of the function") == 3  # its output does not mix with the JSON


def test_class_is_constructed_once_per_worker(map_job):
    map_job.write_input(40)
    code, _, err = map_job.run("Model", "--option", "scale=3", "--chunk-size", "4", "--batch-size", "3")
    assert code == 0, err
    assert map_job.results() == [3 * number for number in range(40)]
    assert [call for _, call in map_job.calls()] == ["loaded"]


@pytest.mark.parametrize(
    ("function", "options", "code", "message"),
    [
        ("absent", [], 2, "has no absent"),
        ("Broken", [], 8, "RuntimeError: no weights"),
        ("Model", [], 8, "TypeError"),
        ("Exits", [], 8, "3 workers ended with status 1"),
        ("square", ["--option", "3"], 2, "KEY=VALUE"),
    ],
)
def test_function_that_cannot_be_loaded_is_one_error(map_job, function, options, code, message):
    map_job.write_input(3)
    found, _, err = map_job.run(function, *options)
    assert found == code, err
    assert message in err
    assert not map_job.output.exists()


def test_input_that_kills_its_worker_fails_alone(map_job):
    map_job.write_input(12)
    code, _, err = map_job.run("kills", "--batch-size", "4", "--chunk-size", "12", "--max-losses", "2")
    assert code == 1
    results = map_job.results()
    assert [result["error"] for result in results if "error" in result] == [
        {"type": "WorkerLost", "message": "2 processes ended or stopped during this input", "attempts": 2}
    ]
    assert results[:5] + results[6:] == [{"id": number} for number in range(12) if number != 5]
    assert err.count("ended with status 9") == 3  # once in a batch, twice alone
    assert [number for _, number in map_job.calls()].count(0) == 1  # finished inputs of the chunk are not repeated


def test_call_beyond_the_timeout_ends_its_worker(map_job):
    map_job.write_input(8)
    code, _, err = map_job.run("hangs", "--timeout", "0.5", "--max-losses", "1")
    assert code == 1
    assert [number for number, result in enumerate(map_job.results()) if "error" in result] == [5]
    assert "exceeded the timeout of 0.5 s" in err


def test_other_job_in_the_same_directory_is_refused(map_job):
    map_job.write_input(3)
    assert map_job.run("square")[0] == 0
    code, _, err = map_job.run("hold")
    assert code == 2
    assert "the function was" in err
    map_job.write_input(4)
    code, _, err = map_job.run("square")
    assert (code, "the input has other bytes" in err) == (2, True)
    assert map_job.results() == squares(3)


def test_existing_output_of_another_origin_is_refused(map_job):
    map_job.write_input(3)
    map_job.output.write_text("precious")
    code, _, err = map_job.run("square")
    assert (code, "does not belong to a job" in err) == (2, True)
    assert map_job.output.read_text() == "precious"


def test_damaged_chunk_is_reported_and_computed_again(map_job):
    map_job.write_input(4)
    (map_job.folder / "hold").touch()
    node = map_job.start("hold", "--chunk-size", "2")
    map_job.wait_calls(1)
    (map_job.work / "done" / "00000001").write_bytes(b"damaged")
    (map_job.folder / "hold").unlink()
    _, err = node.communicate(timeout=200)
    assert (node.returncode, "is damaged" in err) == (4, True)
    assert not map_job.output.exists()
    (map_job.work / "done" / "00000001").unlink()
    assert map_job.run("hold", "--chunk-size", "2")[0] == 0
    assert [result["id"] for result in map_job.results()] == [0, 1, 2, 3]


def test_stopped_job_is_resumed_by_the_same_command(map_job):
    map_job.write_input(30)
    (map_job.folder / "hold").touch()
    node = map_job.start("hold", "--workers", "2", "--chunk-size", "5", "--lease", "600")
    map_job.wait_calls(2)
    node.send_signal(signal.SIGTERM)
    (map_job.folder / "hold").unlink()
    _, err = node.communicate(timeout=200)
    assert node.returncode == 7, err
    assert not map_job.output.exists()
    code, _, err = map_job.run("hold", "--chunk-size", "5", "--lease", "600")  # leases have ended, and none expires
    assert code == 0, err
    assert [result["id"] for result in map_job.results()] == list(range(30))
    assert sorted(number for _, number in map_job.calls()) == list(range(30))


def test_killed_node_is_resumed_without_waiting_for_leases(map_job):
    map_job.write_input(30)
    (map_job.folder / "hold").touch()
    node = map_job.start("hold", "--workers", "2", "--chunk-size", "5", "--lease", "600")
    workers = {pid for pid, _ in map_job.wait_calls(2)}
    node.kill()
    for pid in workers:
        wait_process_ended(pid)  # the kernel kills the workers of a node that is killed
    (map_job.folder / "hold").unlink()
    code, _, err = map_job.run("hold", "--chunk-size", "5", "--lease", "600")
    assert code == 0, err
    assert [result["id"] for result in map_job.results()] == list(range(30))


def test_suspended_node_loses_its_chunk_and_its_late_output(map_job):
    map_job.write_input(4)
    (map_job.folder / "hold").touch()
    late = map_job.start("hold", "--chunk-size", "4", "--lease", "0.5")
    ((late_worker, _),) = map_job.wait_calls(1)
    os.killpg(late.pid, signal.SIGSTOP)
    other = map_job.start("hold", "--chunk-size", "4", "--lease", "0.5")
    calls = map_job.wait_calls(2)  # after the lease has expired
    assert calls[1][0] != late_worker
    (map_job.folder / "hold").unlink()
    _, err = other.communicate(timeout=200)
    assert other.returncode == 0, err
    before = map_job.output.read_bytes(), map_job.output.stat().st_ino
    os.killpg(late.pid, signal.SIGCONT)
    out, err = late.communicate(timeout=200)
    assert late.returncode == 0, err
    assert "4 inputs" in out
    assert (map_job.output.read_bytes(), map_job.output.stat().st_ino) == before
    assert [result["id"] for result in map_job.results()] == [0, 1, 2, 3]
    assert late_worker not in {result["pid"] for result in map_job.results()}


def test_late_worker_does_not_replace_a_finished_chunk_of_a_running_job(map_job):
    map_job.write_input(4)
    (map_job.folder / "hold").touch()
    (map_job.folder / "hold-3").touch()
    words = ["hold", "--chunk-size", "2", "--lease", "0.5"]
    late = map_job.start(*words)
    ((late_worker, _),) = map_job.wait_calls(1)
    os.killpg(late.pid, signal.SIGSTOP)
    other = map_job.start(*words, "--workers", "2")
    map_job.wait_calls(3)  # another worker has taken the chunk of the suspended one
    (map_job.folder / "hold").unlink()
    finished = map_job.work / "done" / "00000000"
    wait_until(finished.exists, "the first chunk")
    before = finished.read_bytes()
    os.killpg(late.pid, signal.SIGCONT)
    wait_until(lambda: not map_job.holds_chunk(late_worker, 0), "the late worker has left the chunk")
    assert finished.read_bytes() == before
    (map_job.folder / "hold-3").unlink()
    for node in (late, other):
        _, err = node.communicate(timeout=200)
        assert node.returncode == 0, err
    assert [result["id"] for result in map_job.results()] == [0, 1, 2, 3]
    assert late_worker not in {result["pid"] for result in map_job.results()[:2]}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_nodes_that_come_and_go_write_each_input_once(map_job, seed):
    """Workers are killed, suspended beyond their lease and continued; nodes are killed and started."""
    rng = random.Random(seed)
    count = 600
    map_job.write_input(count)
    words = ["slow", "--workers", "2", "--chunk-size", "20", "--lease", "0.5", "--max-losses", "1000"]
    running = [map_job.start(*words) for _ in range(2)]
    suspended: list[int] = []
    events = {"kill": 0, "suspend": 0, "node": 0}
    kinds = rng.sample(sorted(events), len(events))
    deadline = time.monotonic() + 150

    def next_calls(number):
        target = len(map_job.calls()) + number
        wait_until(lambda: len(map_job.calls()) >= target or map_job.output.exists(), "progress", 100)

    map_job.wait_calls(1)
    while not map_job.output.exists() and time.monotonic() < deadline:
        next_calls(rng.randrange(10, 50))
        event = kinds[sum(events.values()) % len(kinds)]
        workers = [pid for node in running for pid in map_job.workers(node) if pid not in suspended]
        if event == "node":
            node = running.pop(0)
            node.kill()
            running.append(map_job.start(*words))
        elif workers and event != "node":
            pid = rng.choice(workers)
            try:
                os.kill(pid, signal.SIGKILL if event == "kill" else signal.SIGSTOP)
            except ProcessLookupError:
                continue
            if event == "suspend":
                suspended.append(pid)
        events[event] += 1
        if len(suspended) > 2:  # continued long after its lease has expired
            continue_process(suspended.pop(0))
    for pid in suspended:
        continue_process(pid)
    for node in running:
        _, err = node.communicate(timeout=200)
        assert node.returncode == 0, err
    assert map_job.results() == squares(count)
    assert all(events.values()), events


def continue_process(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
