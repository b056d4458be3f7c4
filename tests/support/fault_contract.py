"""Contract suite for faults between client and S3; subclasses provide a ``server`` fixture."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import (
    CutResponse,
    DropResponse,
    FlipRequestBit,
    FlipResponseBit,
    Hang,
    ReplyBeforeBody,
    ReplyWithStatus,
    ResetRequest,
    TrickleResponse,
)
from tests.support.http_exchange import Exchange
from tests.support.upload_contract import ALL, MIB, UploadCase, part_rule
from tieredckpt.durable.retrying_store import RetryingStore
from tieredckpt.errors import DurableRefusedError, StoreBusyError, TierUnavailableError

PASSING = {
    "internal error": ReplyWithStatus(500, "InternalError"),
    "bad gateway": ReplyWithStatus(502),
    "slow down": ReplyWithStatus(503, "SlowDown", retry_after=0.1),
    "too many requests": ReplyWithStatus(429, retry_after=0.1),
    "request timeout": ReplyWithStatus(400, "RequestTimeout"),
    "conflict": ReplyWithStatus(409, "OperationAborted"),
    "silence": Hang(),
    "reset before the answer": ResetRequest(0),
}
PASSING_FOR_PARTS = {
    **PASSING,
    "reset in the middle": ResetRequest(2 * MIB),
    "slow down before the end": ReplyBeforeBody(503, "SlowDown"),
    "damaged on the way": ReplyWithStatus(400, "BadDigest"),
    "answer lost": DropResponse(),
    "answer without an ETag": ReplyWithStatus(200),
}
REFUSED = {
    "access denied": (ReplyWithStatus(403, "AccessDenied"), "AccessDenied"),
    "expired token": (ReplyWithStatus(400, "ExpiredToken"), "log in again"),
    "wrong region": (ReplyWithStatus(301, "PermanentRedirect"), "region"),
    "wrong clock": (ReplyWithStatus(403, "RequestTimeTooSkewed"), "clock"),
    "no bucket": (ReplyWithStatus(404, "NoSuchBucket"), "Create the bucket"),
    "quota": (ReplyWithStatus(507), "Make room"),
}
DATA = random.Random(3).randbytes(300_000)


_IN_A_PUSH = {"slow down", "reset before the answer"}
"""The faults common to all calls that run on every push; the part upload test runs all of them."""


def each_fault(faults: dict[str, object]) -> pytest.MarkDecorator:
    """Parametrize a test with all of the faults, also on a push."""
    return pytest.mark.parametrize("fault", faults.values(), ids=faults.keys())


def common_faults(faults: dict[str, object]) -> pytest.MarkDecorator:
    """Parametrize a test with the faults; most of the common ones run only in the nightly run."""
    of_the_night = PASSING.keys() - _IN_A_PUSH
    marks = {name: pytest.mark.nightly if name in of_the_night else () for name in faults}
    return pytest.mark.parametrize("fault", [pytest.param(faults[n], id=n, marks=marks[n]) for n in faults])


class FaultContract:
    @pytest.fixture
    def short_timeout_store(self, open_upload_store: Callable[..., RetryingStore]) -> RetryingStore:
        """Open a store that treats a second of silence as a failed request."""
        return open_upload_store(timeout_s=1.0)

    @each_fault(PASSING_FOR_PARTS)
    def test_only_the_failed_part_is_sent_again(
        self, upload_case: UploadCase, short_timeout_store: RetryingStore, fault: object
    ):
        part_rule(upload_case.proxy, 2).fail(fault)
        told: list[int] = []
        upload_case.upload(short_timeout_store, progress=told.append)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == sorted([*ALL, 2])
        assert sum(told) == len(upload_case.data)

    @common_faults(PASSING_FOR_PARTS)
    def test_small_upload_is_retried(self, upload_case: UploadCase, short_timeout_store: RetryingStore, fault: object):
        upload_case.proxy.add_rule("PUT", upload_case.name).fail(fault)
        short_timeout_store.upload(upload_case.name, upload_case.source, 3 * MIB, journal=upload_case.journal)
        assert upload_case.stored_bytes() == upload_case.data[: 3 * MIB]
        assert len(upload_case.proxy.requests("PUT", upload_case.name)) == 2

    @common_faults(PASSING)
    def test_upload_begins_despite_a_fault(
        self, upload_case: UploadCase, short_timeout_store: RetryingStore, fault: object
    ):
        upload_case.proxy.add_rule("POST", query="^uploads").fail(fault)
        upload_case.upload(short_timeout_store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == ALL

    @common_faults({**PASSING, "answer lost": DropResponse()})
    def test_upload_completes_despite_a_fault(
        self, upload_case: UploadCase, short_timeout_store: RetryingStore, fault: object
    ):
        upload_case.proxy.add_rule("POST", query="uploadId=").fail(fault)
        upload_case.upload(short_timeout_store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == ALL
        assert upload_case.unfinished_uploads() == []

    def test_upload_with_a_lost_create_response_is_aborted_later(
        self, upload_case: UploadCase, short_timeout_store: RetryingStore
    ):
        upload_case.proxy.add_rule("POST", query="^uploads").fail(DropResponse())
        upload_case.upload(short_timeout_store)
        assert upload_case.stored_bytes() == upload_case.data
        assert short_timeout_store.abort_stale_uploads("", older_than_s=0) == 1

    def test_upload_completes_if_each_part_fails_once(
        self, upload_case: UploadCase, short_timeout_store: RetryingStore
    ):
        faults = (ReplyWithStatus(500), Hang(), ResetRequest(MIB), ReplyWithStatus(503, "SlowDown"), DropResponse())
        for number, fault in zip(ALL, faults, strict=True):
            part_rule(upload_case.proxy, number).fail(fault)
        upload_case.upload(short_timeout_store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == sorted([*ALL, *ALL])

    @common_faults({**PASSING, "answer lost": DropResponse()})
    def test_put_is_retried(self, upload_case: UploadCase, short_timeout_store: RetryingStore, fault: object):
        upload_case.proxy.add_rule("PUT", "small").fail(fault)
        short_timeout_store.put("small", DATA)
        assert short_timeout_store.get("small") == DATA
        assert len(upload_case.proxy.requests("PUT", "small")) == 2

    @common_faults(
        {
            **PASSING,
            "cut answer": CutResponse(1000),
            "cut at once": CutResponse(0),
            "reset in the middle": CutResponse(1000, reset=True),
        }
    )
    def test_read_is_retried(self, upload_case: UploadCase, short_timeout_store: RetryingStore, fault: object):
        short_timeout_store.put("small", DATA)
        upload_case.proxy.add_rule("GET", "small").fail(fault)
        assert short_timeout_store.get("small") == DATA
        upload_case.proxy.add_rule("GET", "small").fail(fault)
        (got,) = short_timeout_store.get_ranges("small", [(5, 200_005)])
        assert bytes(got) == DATA[5:200_005]

    @common_faults(PASSING)
    def test_list_and_delete_are_retried(
        self, upload_case: UploadCase, short_timeout_store: RetryingStore, fault: object
    ):
        short_timeout_store.put("a/1", b"1")
        upload_case.proxy.add_rule("GET", query="list-type=2").fail(fault)
        assert [info.name for info in short_timeout_store.list("a/")] == ["a/1"]
        upload_case.proxy.add_rule("POST", query="^delete").fail(fault)
        short_timeout_store.delete(["a/1"])
        assert list(short_timeout_store.list("a/")) == []

    def test_slow_response_is_awaited(self, upload_case: UploadCase, short_timeout_store: RetryingStore):
        short_timeout_store.put("small", DATA)
        upload_case.proxy.add_rule("GET", "small").fail(TrickleResponse())
        assert short_timeout_store.get("small") == DATA
        assert len(upload_case.proxy.requests("GET", "small")) == 1

    def test_bit_flipped_in_a_response_reaches_the_caller(
        self, upload_case: UploadCase, short_timeout_store: RetryingStore
    ):
        short_timeout_store.put("small", DATA)
        upload_case.proxy.add_rule("GET", "small").fail(FlipResponseBit(1000))
        got = short_timeout_store.get("small")
        assert len(got) == len(DATA)
        assert [i for i in range(len(DATA)) if got[i] != DATA[i]] == [1000]

    def test_bit_flipped_in_a_part_is_refused_and_sent_again(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore]
    ):
        store = open_upload_store(options={"checksum": "md5"})
        part_rule(upload_case.proxy, 4).fail(FlipRequestBit(MIB))
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == sorted([*ALL, 4])

    # -- faults that do not pass ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            (ReplyWithStatus(500, "InternalError"), TierUnavailableError),
            (ReplyWithStatus(503, "SlowDown"), StoreBusyError),
            (ResetRequest(0), TierUnavailableError),
        ],
        ids=["internal error", "slow down", "reset"],
    )
    def test_unreachable_store_is_unavailable(
        self,
        upload_case: UploadCase,
        open_upload_store: Callable[..., RetryingStore],
        fault: object,
        error: type[Exception],
    ):
        store = open_upload_store(retry_s=0.5)
        for method in ("GET", "PUT", "POST"):
            upload_case.proxy.add_rule(method, times=1000).fail(fault)
        for call in (
            lambda: store.get("x"),
            lambda: store.put("x", b""),
            lambda: list(store.list("")),
            lambda: upload_case.upload(store),
        ):
            with pytest.raises(error, match="tried"):
                call()

    def test_repeatedly_failing_part_ends_the_upload_and_keeps_the_rest(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore]
    ):
        part_rule(upload_case.proxy, 5).hold()  # the upload must end without this part

        def once_the_others_are_there(exchange: Exchange) -> None:
            upload_case.proxy.wait_for(
                lambda proxy: {1, 2, 3} <= {each.part for each in proxy.requests("PUT") if each.status == 200}
            )
            ReplyWithStatus(500, "InternalError")(exchange)

        rule = upload_case.proxy.add_rule("PUT", query="partNumber=4(&|$)", times=1000).fail(once_the_others_are_there)
        with pytest.raises(TierUnavailableError, match="part 4"):
            upload_case.upload(open_upload_store(retry_s=0.3))
        assert rule.met > 1
        upload_case.proxy.drop_held()
        upload_case.proxy.clear()
        upload_case.upload(open_upload_store())
        assert upload_case.stored_bytes() == upload_case.data
        assert upload_case.proxy.parts_sent() == [4, 5]

    @pytest.mark.parametrize(("fault", "advice"), REFUSED.values(), ids=REFUSED.keys())
    def test_refusal_is_final_and_has_advice(
        self, upload_case: UploadCase, store: RetryingStore, fault: object, advice: str
    ):
        for method, call in (
            ("GET", lambda: store.get("x")),
            ("PUT", lambda: store.put("x", b"")),
            ("GET", lambda: list(store.list(""))),
            ("POST", lambda: store.delete(["x"])),
            ("POST", lambda: upload_case.upload(store)),
        ):
            upload_case.proxy.clear()
            upload_case.proxy.add_rule(method, times=1000).fail(fault)
            with pytest.raises(DurableRefusedError, match=advice) as caught:
                call()
            assert upload_case.url in str(caught.value)
            assert len(upload_case.proxy.requests(method)) == 1

    def test_refused_part_ends_the_upload_at_once(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore]
    ):
        part_rule(upload_case.proxy, 3).fail(ReplyWithStatus(403, "AccessDenied"))
        with pytest.raises(DurableRefusedError, match="part 3"):
            upload_case.upload(open_upload_store(concurrency=1))
        assert upload_case.proxy.parts_sent() == [1, 2, 3]
        upload_case.proxy.clear()
        upload_case.upload(open_upload_store())
        assert upload_case.proxy.parts_sent() == [3, 4, 5]
        assert upload_case.stored_bytes() == upload_case.data

    def test_missing_bucket_is_named(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore], tmp_path: Path
    ):
        upload_case.bucket = "no-such-bucket"
        store = open_upload_store()
        for call in (
            lambda: store.get("x"),
            lambda: store.get_ranges("x", [(0, 1)]),
            lambda: store.put("x", b""),
            lambda: list(store.list("")),
            lambda: store.delete(["x"]),
            lambda: upload_case.upload(store),
            lambda: store.upload("x", upload_case.source, 1, journal=upload_case.journal),
        ):
            with pytest.raises(DurableRefusedError, match="no-such-bucket"):
                call()

    def test_wrong_credentials_are_refused(
        self, upload_case: UploadCase, open_upload_store: Callable[..., RetryingStore], monkeypatch: pytest.MonkeyPatch
    ):
        if not upload_case.server.checks_credentials:
            pytest.skip(f"{upload_case.server.name} takes any credentials")
        for name, value in (("AWS_SECRET_ACCESS_KEY", "wrong-secret"), ("AWS_ACCESS_KEY_ID", "AKWRONGWRONG")):
            monkeypatch.setenv(name, value)
            store = open_upload_store()
            for call in (
                lambda store=store: store.get("x"),
                lambda store=store: store.put("x", b""),
                lambda store=store: list(store.list("")),
                lambda store=store: upload_case.upload(store),
                lambda store=store: store.upload("x", upload_case.source, 1, journal=upload_case.journal),
            ):
                with pytest.raises(DurableRefusedError, match=r"[Cc]redentials"):
                    call()

    def test_replaced_credentials_are_used(
        self,
        upload_case: UploadCase,
        open_upload_store: Callable[..., RetryingStore],
        credentials_file: Callable[[str], None],
    ):
        if not upload_case.server.checks_credentials:
            pytest.skip(f"{upload_case.server.name} takes any credentials")
        credentials_file("wrong-secret")
        store = open_upload_store()
        with pytest.raises(DurableRefusedError):
            store.put("x", b"1")
        held = upload_case.proxy.add_rule("POST", query="^uploads").hold()
        credentials_file("")
        held.release()
        upload_case.upload(store)
        assert upload_case.stored_bytes() == upload_case.data
        store.put("x", b"1")
        assert store.get("x") == b"1"
