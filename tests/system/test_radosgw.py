"""Object store and upload suites against Ceph's gateway, which is stricter than the small servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.support.fault_contract import FaultContract
from tests.support.object_store_contract import ObjectStoreContract, Opener
from tests.support.radosgw import missing_programs, radosgw_server
from tests.support.s3 import BUCKET, S3Server
from tests.support.upload_contract import UploadContract, open_upload_store, store, upload_case  # noqa: F401
from tieredckpt.durable.object_store import StoreCapabilities
from tieredckpt.durable.retrying_store import RetryingStore, open_store

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with radosgw_server(tmp_path_factory.mktemp("ceph")) as gateway:
        yield gateway


class TestObjectStore(ObjectStoreContract):
    @pytest.fixture
    def opener(self, server: S3Server) -> Opener:
        url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
        return lambda bandwidth: open_store(url, server.settings(), bandwidth=bandwidth)

    def test_capabilities_match_the_observed_behavior(self, store: RetryingStore):  # noqa: F811
        assert store.capabilities() == StoreCapabilities(conditional_put=True, resumable_upload=True)


class TestUploads(UploadContract):
    pass


class TestFaults(FaultContract):
    pass
