"""A TCPStore in a process of its own: ``python -m elastic.rendezvous.store_process HOST``.

``elastic run`` starts it on one node, ended by the kernel with that node's supervisor; it prints where it listens: at
the address by which this node is reached and at no other, because a ``TCPStore`` asks nobody who he is.
"""

from __future__ import annotations

import signal
import socket
import sys
from datetime import timedelta

_BACKLOG = 2048


def main(host: str) -> int:
    """Serve until a signal comes."""
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
        listener.detach()  # it is the store's
    print(f"store {join_address(host, store.port)}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
