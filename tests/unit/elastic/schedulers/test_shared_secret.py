"""A secret that one machine writes for the others: late, from another start, or exposed."""

from __future__ import annotations

import threading

import pytest

from elastic.errors import PolicyError
from elastic.schedulers.shared_secret import shared_secret
from peerstore.errors import RequestError


def test_shared_secret_waits_for_the_first_node(tmp_path):
    found = []

    def wait():
        with shared_secret(tmp_path / "shared", "12.0-0", makes=False, within_s=60) as secret:
            found.append(secret)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with shared_secret(tmp_path / "shared", "12.0-0", makes=True) as secret:
        waiting.join()
    assert found == [secret]
    assert list((tmp_path / "shared").iterdir()) == []


def test_shared_secret_of_another_start_is_ignored(tmp_path):
    with (
        shared_secret(tmp_path / "shared", "12.0-0", makes=True),
        pytest.raises(PolicyError, match=r"left no secret in .*12\.0-1\.secret within 0 s.*ELASTIC_SECRET="),
        shared_secret(tmp_path / "shared", "12.0-1", makes=False, within_s=0),
    ):
        pass


def test_shared_secret_readable_by_others_is_refused(tmp_path):
    with shared_secret(tmp_path / "shared", "a", makes=True):
        (tmp_path / "shared/a.secret").chmod(0o644)
        with (
            pytest.raises(RequestError, match="may be read or written"),
            shared_secret(tmp_path / "shared", "a", makes=False),
        ):
            pass
