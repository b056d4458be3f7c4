"""Directories that only their user can enter, including the parents created for them."""

from __future__ import annotations

import os
import stat

import pytest

from peerstore.daemon_process import ensure_private_directory
from peerstore.errors import RequestError


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def anybody():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_private_directory_creates_private_parents(anybody, tmp_path):
    ensure_private_directory(tmp_path / "node" / "agent" / "slots")
    assert [mode_of(tmp_path / name) for name in ("node", "node/agent", "node/agent/slots")] == [0o700] * 3
    ensure_private_directory(tmp_path / "node")  # a later call accepts it as its own


def test_private_directory_keeps_existing_parents(anybody, tmp_path):
    (tmp_path / "shared").mkdir()
    ensure_private_directory(tmp_path / "shared" / "mine")
    assert (mode_of(tmp_path / "shared"), mode_of(tmp_path / "shared" / "mine")) == (0o755, 0o700)
    with pytest.raises(RequestError, match="mode 0755"):
        ensure_private_directory(tmp_path / "shared")


def test_inaccessible_private_directory_is_opened_again(tmp_path):
    """A superuser does not notice ``chmod 000``: only the mode shows it."""
    job = tmp_path / "job"
    ensure_private_directory(job / "node")
    (job / "node").chmod(0)
    job.chmod(0)
    ensure_private_directory(job / "node")
    assert [stat.S_IMODE(one.lstat().st_mode) for one in (job, job / "node")] == [0o700, 0o700]
