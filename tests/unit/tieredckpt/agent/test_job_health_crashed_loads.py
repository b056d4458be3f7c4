"""Process deaths that count against the step that the process loaded."""

import pytest

from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.shard_records import VersionId
from tieredckpt.agent.job_health import CRASHED_LOAD_EXPIRY_S, CrashedLoads

STEP, OLDER = VersionId(1, 10, 0, "a"), VersionId(1, 9, 0, "a")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loads(clock):
    return CrashedLoads(clock)


def dead(number):
    """Return the identity of a process that no longer exists."""
    return ProcessIdentity(1 << 30, number)


def end(loads, owner, group=STEP, rank=0, *, done=False):
    loads.load_started(owner, "job", group, rank)
    if done:
        loads.load_done(owner, "job")
    loads.on_client_left(owner, "job")


@pytest.mark.parametrize("done", [False, True])
def test_death_in_a_load_or_before_the_first_step_counts(loads, done):
    for number in range(3):
        end(loads, dead(number), done=done)
    assert loads.count("job") == {STEP: 3}
    assert loads.count("other") == {}


def test_clean_exit_or_live_process_does_not_count(loads):
    loads.load_started(dead(1), "job", STEP, 0)
    loads.load_ended(dead(1), "job", stepped=False)
    loads.on_client_left(dead(1), "job")
    end(loads, current_process())
    loads.load_started(dead(2), "job", STEP, 0)  # its connections are still open
    assert loads.count("job") == {}


def test_ranks_of_a_node_that_die_together_count_once(loads):
    for rank in range(8):
        end(loads, dead(rank), rank=rank)
    assert loads.count("job") == {STEP: 1}


def test_death_long_after_a_load_does_not_count(loads, clock):
    loads.load_started(dead(1), "job", STEP, 0)
    loads.load_done(dead(1), "job")
    clock.now += 3600
    loads.on_client_left(dead(1), "job")
    assert loads.count("job") == {}


def test_crashed_load_expires(loads, clock):
    end(loads, dead(1))
    clock.now += CRASHED_LOAD_EXPIRY_S / 2
    end(loads, dead(2))
    assert loads.count("job") == {STEP: 2}
    clock.now += CRASHED_LOAD_EXPIRY_S / 2
    assert loads.count("job") == {STEP: 1}
    clock.now += CRASHED_LOAD_EXPIRY_S / 2
    assert loads.count("job") == {}


def test_completed_step_or_newer_save_clears_crashed_loads(loads):
    end(loads, dead(1))
    end(loads, dead(2), OLDER)
    loads.load_started(dead(3), "job", STEP, 0)
    loads.load_ended(dead(3), "job", stepped=True)
    assert loads.count("job") == {OLDER: 1}
    loads.forget("job", before=10)
    assert loads.count("job") == {}


def test_clearing_one_step_keeps_the_others(loads):
    end(loads, dead(1))
    end(loads, dead(2), OLDER)
    loads.forget("job", group=STEP)
    assert loads.count("job") == {OLDER: 1}
    loads.forget("job")
    assert loads.count("job") == {}
