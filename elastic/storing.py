"""A ``torch.distributed.TCPStore`` and nothing else: ``python -m elastic.storing HOST``.

``elastic run`` starts it on one node, ended by the kernel with that node's supervisor; it prints where it listens.
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta


def main(host: str) -> int:
    """Serve until a signal comes."""
    from torch.distributed import TCPStore

    from peerstore.transport.addresses import join_address

    store = TCPStore("localhost", 0, None, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    print(f"store {join_address(host, store.port)}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
