"""The keys of worlds that are over: nobody asks for them again, and a store is not to grow with every world."""

from __future__ import annotations

import logging
import re
from datetime import timedelta

import torch.distributed as dist

log = logging.getLogger(__name__)

_KEY = re.compile(r"elastic/(\d+)/")
_PATIENCE = timedelta(seconds=30)


def prefix_of(epoch: int) -> str:
    """What all keys of an epoch begin with."""
    return f"elastic/{epoch}"


def is_past(key: str, epoch: int) -> bool:
    """Whether the key is of a world before this one."""
    found = _KEY.match(key)
    return found is not None and int(found[1]) < epoch


def sweep(host: str, port: int, epoch: int) -> int:
    """Delete what is of worlds before ``epoch`` from one server; how much that was.

    Only to be called when all ranks of ``epoch`` have met: whoever still is in an earlier world has been given up.
    """
    try:
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        if not hasattr(client, "list_keys"):
            return 0
        return sum(client.delete_key(key) for key in client.list_keys() if is_past(key, epoch))
    except dist.DistError as error:  # it is done after the next meeting
        log.info("the store on %s:%d was not swept: %s", host, port, error)
        return 0
