"""Uploads despite faults, kills and cancellations, against real servers."""

from __future__ import annotations

import pytest

from tests.support.fault_contract import FaultContract
from tests.support.s3 import S3Server
from tests.support.upload_contract import ShortUploadContract, UploadContract, open_upload_store, store, upload_case  # noqa: F401

pytestmark = pytest.mark.e2e


class TestUploads(UploadContract):
    @pytest.fixture
    def server(self, rclone: S3Server) -> S3Server:
        return rclone


class TestUploadsToMoto(ShortUploadContract):
    @pytest.fixture
    def server(self, moto: S3Server) -> S3Server:
        return moto


@pytest.mark.nightly
class TestAllUploadsToMoto(UploadContract):
    @pytest.fixture
    def server(self, moto: S3Server) -> S3Server:
        return moto


class TestFaults(FaultContract):
    @pytest.fixture
    def server(self, rclone: S3Server) -> S3Server:
        return rclone
