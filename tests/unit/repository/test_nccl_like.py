"""The tests' backend behaves like NCCL when a world breaks."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elastic.errors import PolicyError
from elastic.workers.native_connections import close_gloo_connections
from elastic.workers.process_groups import ProcessGroups, abort_groups, disable_nccl_watchdog
from tests.support import nccl_like
from tests.support.nccl_like import NcclLike

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_DUMP = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_PATIENCE_S = 60


@pytest.fixture(autouse=True)
def errors_are_left_to_us(monkeypatch):
    monkeypatch.setenv(_HANDLING, "0")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "0")
    monkeypatch.setenv(_DUMP, "0")
    with nccl_like.cleaned_up():
        yield


@pytest.fixture
def pair():
    store = dist.HashStore()
    return [NcclLike(store, rank, 2, timedelta(seconds=_PATIENCE_S)) for rank in range(2)]


class Call:
    """Something that another thread does."""

    def __init__(self, do):
        self._do, self.error = do, None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self._do()
        except BaseException as error:
            self.error = error

    @property
    def is_over(self):
        return not self._thread.is_alive()

    def join(self):
        self._thread.join(_PATIENCE_S)
        assert self.is_over
        return self.error


def meet(pair):
    """Run a collective, after which both ranks have their communicators."""
    here = [torch.ones(2), torch.full((2,), 2.0)]
    both = zip(pair, here, strict=True)
    calls = [Call(lambda one=one, tensor=tensor: one.allreduce([tensor]).wait()) for one, tensor in both]
    assert [call.join() for call in calls] == [None, None]
    assert [tensor.tolist() for tensor in here] == [[3.0, 3.0]] * 2


def test_aborted_and_later_collectives_return_garbage(pair):
    meet(pair)
    sent = torch.full((4,), 7.0)
    work = pair[0].allreduce([sent])
    assert not work.is_completed()
    abort_groups(pair[:1])
    assert work.wait()
    assert sent.isfinite().all()
    assert not torch.equal(sent, torch.full((4,), 7.0))
    later = torch.full((4,), 7.0)
    assert pair[0].allreduce([later]).wait()
    assert not torch.equal(later, torch.full((4,), 7.0))


def test_lost_peer_is_noticed_only_by_the_watchdog(pair, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(nccl_like.os, "kill", lambda *_: ended.set())
    meet(pair)
    work = pair[0].allreduce([torch.ones(1)])
    close_gloo_connections()
    assert not work.is_completed()
    assert not ended.is_set()
    monkeypatch.setenv(_HANDLING, "3")
    pair[1].allreduce([torch.ones(1)])
    assert ended.wait(_PATIENCE_S)
    assert not work.is_completed()


def test_cleanup_watchdog_returns_garbage_silently(pair, monkeypatch):
    meet(pair)
    monkeypatch.setenv(_HANDLING, "2")
    work = pair[0].allreduce([torch.ones(1)])
    close_gloo_connections()
    assert work.wait()


@pytest.fixture
def asleep(monkeypatch):
    """A pair whose first group has lost its peer; the watchdog sleeps."""
    monkeypatch.setenv(_DUMP, "60000")
    store = dist.HashStore()
    pair = [NcclLike(store, rank, 2, timedelta(seconds=_PATIENCE_S)) for rank in range(2)]
    meet(pair)
    pair[0].allreduce([torch.ones(1)])
    close_gloo_connections()
    assert pair[0].watchdog.asleep.wait(_PATIENCE_S)
    pair[0].communicator.join(_PATIENCE_S)  # after this only the list holds the group
    return pair


def test_destructor_joins_the_sleeping_watchdog(asleep):
    abort_groups(asleep[:1])
    watchdog = asleep[0].watchdog
    drop = Call(asleep.clear)
    drop._thread.join(0.2)
    assert watchdog.is_running
    assert not drop.is_over
    with nccl_like.cleaned_up():
        pass
    assert drop.join() is None
    assert not watchdog.is_running


def test_collective_waits_for_the_sleeping_watchdog(asleep):
    start = Call(lambda: asleep[0].allreduce([torch.ones(1)]))
    start._thread.join(0.2)
    assert not start.is_over
    with nccl_like.cleaned_up():
        pass
    assert start.join() is None


def test_an_abort_does_not_end_the_making_of_a_communicator(pair):
    tensor = torch.zeros(1)
    making = Call(lambda: pair[0].allreduce([tensor]).wait())
    pair[0]._store.get("here/0")
    pair[0].abort()
    assert not making.is_over
    other = Call(lambda: pair[1].allreduce([torch.zeros(1)]))  # it is over when the other rank has come
    assert making.join() is None
    other.join()


def test_nonblocking_communicator_setup_can_be_aborted(pair, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    making = Call(lambda: pair[0].allreduce([torch.zeros(1)]))
    pair[0]._store.get("here/0")
    pair[0].abort()
    assert isinstance(making.join(), dist.DistBackendError)


@pytest.fixture
def two_groups():
    nccl_like.register()
    dist.init_process_group(nccl_like.NAME, store=dist.HashStore(), rank=0, world_size=1)
    other = dist.new_group()
    for group in (None, other):
        dist.all_reduce(torch.ones(1), group=group)
    yield list(dist.distributed_c10d._world.pg_map)
    abort_groups(list(dist.distributed_c10d._world.pg_map))
    dist.destroy_process_group()


def test_aborting_only_one_of_two_communicators_deadlocks(two_groups):
    call = Call(two_groups[0].abort)
    assert nccl_like.deadlocked.wait(_PATIENCE_S)
    assert not call.is_over
    with nccl_like.cleaned_up():
        pass
    assert call.join() is None


# -- what the product does about it -----------------------------------------------------------------------------------


def groups(backend):
    from elastic.control.control_plane import RankAssignment

    return ProcessGroups(RankAssignment(0, 0, 1, 0, 1, 0, 1, "127.0.0.1:1", reason="test"), backend=backend)


def test_all_groups_are_aborted_together(two_groups):
    call = Call(groups(nccl_like.NAME).abort_groups)
    assert call.join() is None
    assert not nccl_like.deadlocked.is_set()
    assert all(group._aborted.is_set() for group in two_groups)


def test_leaving_a_broken_world_does_not_wait_for_a_sleeping_watchdog(monkeypatch):
    """The thread that trains must not run the destructor: it joins the watchdog."""
    monkeypatch.setenv(_DUMP, "60000")
    nccl_like.register()
    store = dist.HashStore()
    dist.init_process_group(nccl_like.NAME, store=store, rank=0, world_size=2)
    world = dist.group.WORLD
    peer = NcclLike(world._store, 1, 2, timedelta(seconds=_PATIENCE_S))
    meet([world, peer])
    watchdog = world.watchdog
    world.allreduce([torch.ones(1)])
    close_gloo_connections()
    assert watchdog.asleep.wait(_PATIENCE_S)
    del world
    try:
        leave = Call(lambda: groups(nccl_like.NAME).destroy(broken=True))
        assert leave.join() is None
        assert watchdog.is_running
    finally:
        abort_groups([peer])
        with nccl_like.cleaned_up():
            pass
    watchdog.join()


def test_failing_abort_leaves_no_other_backend_running():
    class Backend:
        def __init__(self, error=None):
            self.aborted, self._error = 0, error

        def abort(self):
            self.aborted += 1
            if self._error is not None:
                raise self._error

    class Group:
        def __init__(self, **backends):
            self._backends = backends
            self._device_types = [torch.device(kind) for kind in backends]

        def _get_backend(self, device):
            return self._backends[device.type]

    def broken():
        return Backend(RuntimeError("it cannot"))

    parent, child = (Group(cpu=broken(), cuda=Backend()), Group(cpu=broken(), cuda=Backend()))
    abort_groups([parent, child])
    assert [one.aborted for group in (parent, child) for one in group._backends.values()] == [1, 1, 1, 1]


def test_the_watchdog_is_off_before_the_first_group_is_made(monkeypatch):
    monkeypatch.delenv(_HANDLING)
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING")
    monkeypatch.delenv(_DUMP)
    found = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_a, **_n: found.append(dict(nccl_like.os.environ)))
    monkeypatch.setattr(ProcessGroups, "_store", lambda _self: dist.HashStore())
    groups(nccl_like.NAME).initialize()
    assert (found[0][_HANDLING], found[0]["TORCH_NCCL_ENABLE_MONITORING"], found[0][_DUMP]) == ("0", "0", "0")


@pytest.mark.parametrize("name", [_HANDLING, "NCCL_ASYNC_ERROR_HANDLING"])
@pytest.mark.parametrize("value", ["1", "2", "3"])
def test_an_environment_that_has_the_watchdog_act_is_refused(name, value):
    environ = {name: value}
    with pytest.raises(PolicyError, match=f"{name}={value}: NCCL's watchdog would end this process"):
        disable_nccl_watchdog(environ)
    assert environ == {name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", "True"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("NCCL_DESYNC_DEBUG", "yes"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
    ],
)
def test_environment_that_ends_the_process_is_refused(name, value):
    """The monitor ends the process; the other variables override the disabled error handling."""
    environ = {_HANDLING: "0", name: value}
    with pytest.raises(PolicyError, match=f"{name}={value}: "):
        disable_nccl_watchdog(environ)
    assert environ == {_HANDLING: "0", name: value}


@pytest.mark.parametrize("value", ["501", "15000", "-1", "1s", ""])
def test_long_sleep_of_the_watchdog_is_refused(value):
    with pytest.raises(PolicyError, match=f"{_DUMP}={value}: after an error NCCL's watchdog sleeps four times"):
        disable_nccl_watchdog({_DUMP: value})


def test_all_environment_problems_are_reported_at_once():
    with pytest.raises(PolicyError, match=r"HANDLING=3: .*MONITORING=1: .*Unset .*HANDLING and .*MONITORING"):
        disable_nccl_watchdog({_HANDLING: "3", "TORCH_NCCL_ENABLE_MONITORING": "1"})


def test_correct_environment_is_unchanged():
    environ = {
        "NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "false",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
    }
    before = dict(environ)
    disable_nccl_watchdog(environ)
    assert environ == before


def test_only_gloo_aborts_with_an_error():
    assert [groups(name).aborts_silently for name in ("gloo", "cpu:gloo,cuda:nccl", "nccl", nccl_like.NAME)] == [
        False,
        True,
        True,
        True,
    ]
