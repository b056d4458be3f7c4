"""The HyperPod agent's launcher, with a restart limit that a busy machine cannot reach.

The agent applies ``--inprocess-timeout`` to each start of its ranks and to each return of them to the barrier. A slow
import of torch then looks like a hang. Here the limit applies only to a return, and only where a rank hangs:
``TEST_HANGS`` names a file that exists while one does. Without that variable every return has the limit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hyperpod_elastic_agent.ipc.server import InProcessRestartSocketServer

from integration.hyperpod.hyperpodrun import main

_return_of_ranks = InProcessRestartSocketServer.get_ranks_at_barrier


def get_ranks_at_barrier(server: Any, timeout: float | None = None, init: bool = False) -> Any:
    """Wait for all ranks; drop ``timeout`` where no rank hangs."""
    hangs = Path(os.environ["TEST_HANGS"]).exists() if "TEST_HANGS" in os.environ else True
    return _return_of_ranks(server, timeout=timeout if hangs and not init else None, init=init)


if __name__ == "__main__":
    InProcessRestartSocketServer.get_ranks_at_barrier = get_ranks_at_barrier
    main()
