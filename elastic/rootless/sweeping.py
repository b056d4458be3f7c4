"""The keys of worlds that are over: nobody asks for them again, and a store is not to grow with every world."""

from __future__ import annotations

import atexit
import logging
import re
import threading
import time

import torch.distributed as dist

from elastic.rootless.guarding import Guard
from elastic.rootless.holders import Cut, Holder, NoAnswerError, Patience

log = logging.getLogger(__name__)

_KEY = re.compile(r"elastic/(\d+)/")
_END_S, _EXIT_S, _LOOK_S = 1.0, 15.0, 0.2


def prefix_of(epoch: int) -> str:
    """What all keys of an epoch begin with."""
    return f"elastic/{epoch}"


def is_past(key: str, epoch: int) -> bool:
    """Whether the key is of a world before this one."""
    found = _KEY.match(key)
    return found is not None and int(found[1]) < epoch


class Sweep:
    """Deletes what is of worlds before ``epoch`` from one server, beside everything else.

    To be made when all ranks of ``epoch`` have met: whoever still is in an earlier world has been given up by then.
    """

    def __init__(self, address: str, epoch: int, *, cut: Cut, patience: Patience | None = None) -> None:
        self.deleted = 0
        self._guard = Guard()
        self._holder = Holder(address, cut=cut, guard=self._guard, patience=patience or Patience())
        self._epoch = epoch
        # A thread that is in torch's C++ when the interpreter ends aborts the process.
        atexit.register(self._end_at_exit)
        self._thread = threading.Thread(target=self._run, name="elastic-sweep", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether it is through."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        """What it has not done by now is done after the next meeting.

        Where it hangs in a server that is stopped it is left there: the next world has connections to the same server,
        and only all of them can be cut.
        """
        if not self.join(0):
            self._holder.end()
            self._guard.hurry()
            self.join(_END_S)
        self._guard.forget()
        self._guard.close()

    def _end_at_exit(self) -> None:
        """There is no other world any more."""
        until = time.monotonic() + _EXIT_S
        while not self.join(0) and time.monotonic() < until:
            self._holder.end()
            self.join(_LOOK_S)

    def _run(self) -> None:
        try:
            keys = self._holder.call(_all_keys)
            for key in [key for key in keys if is_past(key, self._epoch)]:
                self.deleted += self._holder.call(lambda client, key=key: client.delete_key(key))  # type: ignore[misc]
        except (NoAnswerError, dist.DistError) as error:
            log.info("old keys are still on %s: %s", self._holder.address, error)
        finally:
            self._holder.close()
            atexit.unregister(self._end_at_exit)


def _all_keys(client: dist.TCPStore) -> list[str]:
    if not hasattr(client, "list_keys"):  # of an older torch: they stay
        return []
    return client.list_keys()
