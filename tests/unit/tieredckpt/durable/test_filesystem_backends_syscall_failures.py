"""Each system call of a durable tier in a directory fails once in every way.

No data is lost, half written, or reported as absent or damaged, and a retry succeeds.
"""

import contextlib
import errno
import shutil
import tempfile
from pathlib import Path

import pytest

from peerstore.shard_records import VersionId
from tests.support.local_nodes import wait_until
from tests.support.stores import MIB, shard_content, shard_key
from tests.support.syscall_failures import CODES, MOSTLY_NIGHTLY, CallRecorder
from tests.unit.peerstore.store.test_node_store_syscall_failures import descriptors
from tieredckpt.agent.durable_catalog import DurableCatalog, delete_step
from tieredckpt.durable.object_store import ObjectExistsError
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import DurableRefusedError, TierUnavailableError
from tieredckpt.format import object_keys
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.slow

JOB, ONE, TWO = "job", VersionId(1, 1, 0, "a"), VersionId(1, 2, 0, "a")
DATA = shard_content(shard_key(1), MIB + 5)


class Journal(dict):
    def put(self, name, data):
        self[name] = data

    def remove(self, name):
        self.pop(name, None)


def story(folder, calls):
    """Run a drain, a load and a retention, with retries of transient errors."""
    said = []
    shard = folder / "shard"
    shard.write_bytes(DATA)
    url = f"file://{folder}/durable"
    settings = DurableSettings(url=url, retry_s=0.0)
    before = f"{JOB}/before"

    def asked(work):
        for left in (2, 1, 0):
            try:
                return work()
            except Exception as error:
                said.append(error)
                if not left:
                    raise
        return None

    with calls.recording(), contextlib.ExitStack() as cleanup:
        store = asked(lambda: open_store(url, settings))
        cleanup.callback(store.close)
        asked(lambda: store.put(before, b"old"))
        for group in (ONE, TWO):
            name = f"{object_keys.shards_prefix(JOB, group)}0.safetensors"
            asked(lambda name=name: store.upload(name, shard, len(DATA), journal=Journal(), identity="x"))
            with contextlib.suppress(ObjectExistsError):  # it was created although the first call failed
                asked(
                    lambda group=group: store.put(
                        object_keys.manifest_key(JOB, group, None), b"of it", create_only=True
                    )
                )
            assert asked(lambda name=name: store.get(name)) == DATA
            (piece,) = asked(lambda name=name: store.get_ranges(name, [(10, 20)]))
            assert bytes(piece) == DATA[10:20]
        asked(lambda: store.put(before, b"new"))
        assert asked(lambda: store.get(before)) == b"new"
        ours = DurableCatalog(store, JOB, clock=iter(range(0, 10**9, 100)).__next__)
        assert set(asked(ours.listing).manifests) == {ONE, TWO}
        asked(lambda: ours.keep(TWO, kept=True))
        asked(lambda: ours.quarantine(ONE, "a test"))
        listing = asked(lambda: ours.listing(fresh=True))
        assert (listing.kept, listing.quarantined) == ({TWO}, {ONE})
        ours.manifest = lambda group: (_ for _ in ()).throw(AssertionError)
        asked(lambda: store.delete([object_keys.manifest_key(JOB, ONE, None)]))
        asked(lambda: ours.listing(fresh=True))
        asked(lambda: delete_step(ours, JOB, ONE))
        assert set(asked(lambda: ours.listing(fresh=True)).manifests) == {TWO}
        left = [info.name for info in asked(lambda: list(store.list("")))]
        assert not [name for name in left if "epoch-1/step-1" in name]
        assert asked(lambda: store.get(f"{object_keys.shards_prefix(JOB, TWO)}0.safetensors")) == DATA
        asked(lambda: store.abort_stale_uploads("", older_than_s=0.0))
        assert not list((folder / "durable").rglob("*.staged*"))
    told = (TierUnavailableError, DurableRefusedError, ObjectExistsError, OSError)
    wrong = [error for error in said if not isinstance(error, told)]
    assert not wrong, "told as something else"


def played(calls):
    before = descriptors()
    folder = Path(tempfile.mkdtemp(prefix="tieredckpt-test-"))
    try:
        story(folder, calls)
        wait_until(lambda: descriptors() <= before, "everything that was opened is closed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def made():
    watching = CallRecorder("tieredckpt")
    played(watching)
    return watching.made


def each_fails(calls, code):
    wrong, unmet = [], 0
    for call in calls:
        failing = CallRecorder("tieredckpt", failing=call, code=code)
        try:
            played(failing)
        except Exception as error:
            wrong.append(f"{call}: {error!r}")
        unmet += not failing.failed
    assert not wrong, f"{len(wrong)} of {len(calls)}\n" + "\n".join(wrong)
    assert unmet <= len(calls) // 10, "not the same calls again"


@pytest.mark.parametrize("code", MOSTLY_NIGHTLY)
def test_failed_syscall_loses_no_data_and_the_retry_succeeds(made, code):
    """Each call site fails with one of the errors; the nightly run tries all of them on each call."""
    places = list({(call.what, call.stack[:3]): call for call in made}.values())
    assert len(places) > 20
    each_fails(places[CODES.index(code) :: len(CODES)], code)


@pytest.mark.nightly
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_every_syscall_failure_loses_no_data(made, code):
    each_fails(made, code)
