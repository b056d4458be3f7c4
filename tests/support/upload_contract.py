"""Contract of S3 uploads that are killed, canceled, aborted or repeated; needs a ``server`` fixture."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fault_proxy import FaultProxy, Rule
from tests.support.faults import Hold
from tests.support.journals import FileJournal
from tests.support.s3 import BUCKET, S3Server
from tieredckpt.durable.object_store import UploadCancelledError
from tieredckpt.durable.retrying_store import RetryingStore, open_store
from tieredckpt.errors import TierUnavailableError
from tieredckpt.settings import DurableSettings

MIB = 1 << 20
SIZE = 23 * MIB  # five parts of 5 MiB, the last one shorter
ALL = [1, 2, 3, 4, 5]
WAIT_S = 60


@dataclass
class UploadCase:
    """A file to upload through a proxy, under a prefix of its own."""

    server: S3Server
    proxy: FaultProxy
    root: str
    source: Path
    data: bytes
    journal: FileJournal
    journal_directory: Path
    name: str = "step-7/shard-8"
    bucket: str = BUCKET

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.root}"

    @property
    def key(self) -> str:
        return f"{self.root}/{self.name}"

    def settings(self, **changes: object) -> DurableSettings:
        return self.server.settings(endpoint=self.proxy.endpoint, **changes)

    def upload(self, store: RetryingStore, *, identity: str = "digest-1", **more: object) -> None:
        store.upload(self.name, self.source, SIZE, journal=self.journal, identity=identity, **more)

    def stored_bytes(self) -> bytes:
        """Read the object directly from the server."""
        with self.server.client() as client:
            return client.get_object(Bucket=BUCKET, Key=self.key)["Body"].read()

    def unfinished_uploads(self) -> list[str]:
        """Return the keys of unfinished uploads below this prefix."""
        with self.server.client() as client:
            try:
                listed = client.list_multipart_uploads(Bucket=BUCKET, Prefix=self.root)
            except client.exceptions.NoSuchUpload:
                return []
            return [each["Key"] for each in listed.get("Uploads", [])]

    def abort_uploads(self) -> None:
        with self.server.client() as client:
            for each in client.list_multipart_uploads(Bucket=BUCKET, Prefix=self.root).get("Uploads", []):
                client.abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])

    def kill_upload_at(self, held: Hold, *, also: Callable[[FaultProxy], bool] = bool, **changes: object) -> None:
        """Upload in another process, SIGKILL it once ``held`` is reached and ``also`` holds, clear the proxy."""
        task = {
            "url": self.url,
            "settings": dataclasses.asdict(self.settings(**changes)),
            "name": self.name,
            "source": str(self.source),
            "size_bytes": SIZE,
            "journal": str(self.journal_directory),
            "identity": "digest-1",
        }
        command = [sys.executable, "-m", "tests.support.upload_process"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
            try:
                process.stdin.write(json.dumps(task).encode())
                process.stdin.close()
                assert held.reached.wait(WAIT_S)
                self.proxy.wait_for(also)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self.proxy.clear()
        held.drop()


@functools.cache
def random_data() -> bytes:
    """Return the bytes that all tests upload, cached because they take 0.1 s to create."""
    return random.Random(7).randbytes(SIZE)


@pytest.fixture
def upload_case(server: S3Server, tmp_path: Path) -> Iterator[UploadCase]:
    data = random_data()
    source = tmp_path / "slot"
    source.write_bytes(data + b"what an older and longer shard left in the slot")
    journal = tmp_path / "journal"
    with FaultProxy(server.port) as proxy:
        yield UploadCase(server, proxy, secrets.token_hex(4), source, data, FileJournal(journal), journal)


@pytest.fixture
def open_upload_store(upload_case: UploadCase) -> Iterator[Callable[..., RetryingStore]]:
    opened: list[RetryingStore] = []

    def open_and_record(**changes: object) -> RetryingStore:
        opened.append(open_store(upload_case.url, upload_case.settings(**changes)))
        return opened[-1]

    yield open_and_record
    for store in opened:
        store.close()


@pytest.fixture
def store(open_upload_store: Callable[..., RetryingStore]) -> RetryingStore:
    return open_upload_store()


def part_rule(proxy: FaultProxy, number: int) -> Rule:
    return proxy.add_rule("PUT", query=f"partNumber={number}(&|$)")


def other_parts_done(proxy: FaultProxy) -> bool:
    return sum(each.status == 200 for each in proxy.requests("PUT", query="partNumber=")) == len(ALL) - 1


class ShortUploadContract:
    """Upload tests that run against every server on each push."""

    def test_no_part_is_sent_twice(self, upload_case: UploadCase, store: RetryingStore):
        told: list[int] = []
        upload_case.upload(store, progress=told.append)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == ALL
        assert sorted(told) == [3 * MIB, 5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB]
        assert upload_case.unfinished_uploads() == []

    def test_killed_upload_sends_only_the_missing_middle_part(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.kill_upload_at(part_rule(upload_case.proxy, 2).hold(), also=other_parts_done, concurrency=5)
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == [2]

    def test_upload_aborted_by_the_store_between_runs_starts_again(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.kill_upload_at(part_rule(upload_case.proxy, 4).hold(), concurrency=1)
        upload_case.abort_uploads()
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == ALL


class UploadContract(ShortUploadContract):
    @pytest.mark.parametrize("number", [1, 3, *(pytest.param(one, marks=pytest.mark.nightly) for one in (2, 4, 5))])
    def test_killed_upload_resumes_at_the_next_part(self, upload_case: UploadCase, store: RetryingStore, number: int):
        upload_case.kill_upload_at(part_rule(upload_case.proxy, number).hold(), concurrency=1)
        told: list[int] = []
        upload_case.upload(store, progress=told.append)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == ALL[number - 1 :]
        assert sum(told) == SIZE - (number - 1) * 5 * MIB
        assert upload_case.journal.get(upload_case.name) is None
        assert upload_case.unfinished_uploads() == []

    def test_upload_killed_before_its_creation_begins_again(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.kill_upload_at(upload_case.proxy.add_rule("POST", query="^uploads").hold())
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == ALL
        assert upload_case.unfinished_uploads() == []

    def test_upload_killed_before_its_completion_only_completes(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.kill_upload_at(upload_case.proxy.add_rule("POST", query="uploadId=").hold())
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == []

    def test_upload_killed_after_its_completion_finds_its_object(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.kill_upload_at(upload_case.proxy.add_rule("POST", query="uploadId=").hold(done=True))
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == []
        assert upload_case.proxy.requests("POST", query="^uploads") == []
        assert upload_case.journal.get(upload_case.name) is None

    def test_twice_killed_upload_completes(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.kill_upload_at(part_rule(upload_case.proxy, 2).hold(), concurrency=1)
        upload_case.kill_upload_at(part_rule(upload_case.proxy, 4).hold(), concurrency=1)
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == [4, 5]

    def test_new_part_size_applies_to_new_uploads(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore]
    ):
        upload_case.kill_upload_at(part_rule(upload_case.proxy, 3).hold(), concurrency=1)
        upload_case.upload(open_upload_store(part_size="6MiB"))
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == [3, 4, 5]

    def test_parts_of_another_content_are_not_used(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.kill_upload_at(part_rule(upload_case.proxy, 4).hold(), concurrency=1)
        upload_case.upload(store, identity="digest-2")
        assert upload_case.proxy.parts_sent() == ALL
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.unfinished_uploads() == []

    def test_invalid_journal_is_ignored(self, upload_case: UploadCase, store: RetryingStore):
        upload_case.journal.put(upload_case.name, b'{"upload_id": "of another release"}')
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.journal.get(upload_case.name) is None

    def test_upload_aborted_by_the_store_while_sending_starts_again(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore]
    ):
        if not upload_case.server.knows_aborted:
            pytest.skip(f"{upload_case.server.name} answers with an internal error")
        held = part_rule(upload_case.proxy, 3).hold()
        with ThreadPoolExecutor(1) as pool:
            uploading = pool.submit(upload_case.upload, open_upload_store(concurrency=1))
            assert held.reached.wait(WAIT_S)
            upload_case.abort_uploads()
            held.release()
            uploading.result(WAIT_S)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == sorted([*ALL, 1, 2, 3])
        assert upload_case.unfinished_uploads() == []

    def test_repeatedly_aborted_upload_fails_after_three_tries(self, upload_case: UploadCase, store: RetryingStore):
        if not upload_case.server.knows_aborted:
            pytest.skip(f"{upload_case.server.name} answers with an internal error")

        def abort(exchange: object) -> None:
            upload_case.abort_uploads()
            exchange.forward_unchanged()

        upload_case.proxy.add_rule("PUT", query="partNumber=1(&|$)", times=99).fail(abort)
        with pytest.raises(TierUnavailableError, match=r"NoSuch(Upload|Key)|404"):
            upload_case.upload(store)
        assert len(upload_case.proxy.requests("POST", query="^uploads")) == 3

    def test_upload_to_a_silent_store_can_be_cancelled(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore]
    ):
        held = part_rule(upload_case.proxy, 3).hold()
        cancel = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            uploading = pool.submit(
                upload_case.upload, open_upload_store(concurrency=1, timeout_s=WAIT_S), cancel=cancel
            )
            assert held.reached.wait(WAIT_S)
            cancel.set()
            with pytest.raises(UploadCancelledError):
                uploading.result(WAIT_S / 2)
        upload_case.proxy.clear()
        held.drop()
        upload_case.upload(open_upload_store())
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == [3, 4, 5]

    def test_abandoned_uploads_are_discarded(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore]
    ):
        store = open_upload_store(concurrency=1)
        for upload_case.name in ("a/kept", "a/dropped", "b/other"):
            held = part_rule(upload_case.proxy, 2).hold()
            cancel = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                uploading = pool.submit(upload_case.upload, store, cancel=cancel)
                assert held.reached.wait(WAIT_S)
                cancel.set()
                with pytest.raises(UploadCancelledError):
                    uploading.result(WAIT_S)
            upload_case.proxy.clear()
            held.drop()
        assert store.abort_stale_uploads("a/", older_than_s=0, keep=["a/kept"]) == 1
        assert sorted(upload_case.unfinished_uploads()) == [f"{upload_case.root}/a/kept", f"{upload_case.root}/b/other"]
        assert store.abort_stale_uploads("", older_than_s=0) == 2
        assert upload_case.unfinished_uploads() == []
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == ALL
