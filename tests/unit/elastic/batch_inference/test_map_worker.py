"""A worker's thread that renews leases."""

from __future__ import annotations

import errno

import pytest

from elastic.batch_inference.map_worker import LeaseKeeper
from tests.support.local_nodes import wait_until


class FailingLease:
    """A lease whose first renewals fail, as when a shared file system is away."""

    chunk = 3

    def __init__(self) -> None:
        self.calls = 0
        self.is_taken = False

    def renew(self) -> None:
        self.calls += 1
        if self.calls <= 2:
            raise OSError(errno.EIO, "the file server is away")

    def was_taken(self) -> bool:
        return self.is_taken

    def end(self) -> None: ...


def test_lease_is_renewed_again_after_the_file_system_was_away(capsys: pytest.CaptureFixture[str]) -> None:
    keeper, lease = LeaseKeeper(lease_s=0.02, timeout_s=0.0), FailingLease()
    keeper.hold(lease)  # type: ignore[arg-type]
    wait_until(lambda: lease.calls >= 4, "the thread continues after an error")
    assert not keeper.was_taken.is_set()
    lease.is_taken = True
    wait_until(keeper.was_taken.is_set, "the thread sees that the lease was taken")
    keeper.close()
    assert capsys.readouterr().err == "chunk 3: the lease cannot be renewed: [Errno 5] the file server is away\n"
