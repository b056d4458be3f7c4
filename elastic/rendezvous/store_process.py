"""A separate process for one TCPStore: ``python -m elastic.rendezvous.store_process HOST``.

The supervisor of a node starts it, and the kernel ends it with that supervisor. It prints its address. It listens only
at the address of this node in the job, because a ``TCPStore`` does not authenticate its clients.
"""

from __future__ import annotations

import signal
import socket
import sys
from datetime import timedelta

_BACKLOG = 2048


def main(host: str) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    from torch.distributed import TCPStore

    from peerstore.network_addresses import join_address

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=_BACKLOG) as listener:
        store = TCPStore(
            host,
            listener.getsockname()[1],
            None,
            is_master=True,
            timeout=timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store owns the socket now
    print(f"store {join_address(host, store.port)}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
