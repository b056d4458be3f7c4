"""One collection, listed once and watched from there on, in a thread of its own.

A watch that ends is taken up where it ended. One that is too old for the server (410) begins with a list again, and
whatever else goes wrong is tried again after a pause, each time a longer one.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from integration.kubernetes.errors import AbsentError, ClusterError, ExpiredError

Object = Mapping[str, Any]

_log = logging.getLogger(__name__)
_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_SHORT_S = 1.0
_WATCH_S = (240, 360)
"""Not all at once: a server that was started anew has all of its clients at the same time."""


@dataclass(frozen=True)
class Collection:
    """What is listed and watched."""

    path: str
    selector: str = ""
    only_metadata: bool = False
    """Of nodes the labels are enough, and their status changes all the time."""


class ListWatch(Protocol):
    """As :class:`integration.kubernetes.cluster.Cluster` has it."""

    def list_all(self, what: Collection) -> tuple[Sequence[Object], str]:
        """All, and the revision of the list."""

    def watch(self, what: Collection, since: str, timeout_s: int) -> AbstractContextManager[Iterator[Object]]:
        """Events after ``since``, for so long; :class:`ExpiredError` where that is too long ago."""


class Follower(Protocol):
    """Who is told; :class:`integration.kubernetes.index.ObjectIndex` is one."""

    is_followed: bool

    def replace_all(self, items: Sequence[Object], revision: str) -> None: ...

    def heard(self, kind: str, one: Object) -> None: ...

    def is_not_there(self) -> None: ...


class Informer:
    """Keeps ``follower`` up to date until it is closed."""

    def __init__(
        self,
        source: ListWatch,
        what: Collection,
        follower: Follower,
        *,
        before_list: Callable[[], Callable[[], None]] | None = None,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """``before_list`` is called before a list is asked for, and what it gives once the list is taken in."""
        self._source, self._what, self._follower = source, what, follower
        self._before_list = before_list
        self._since: str | None = None
        self._failed = 0
        self._closed = threading.Event()
        self._wait = self._closed.wait if wait is None else wait
        self._thread = threading.Thread(target=self._run, name=f"watch {what.path}", daemon=True)

    def start(self) -> Informer:
        self._thread.start()
        return self

    def close(self) -> None:
        """What is under way ends by itself, within a watch's time."""
        self._closed.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.step()

    def step(self) -> None:
        """One list, or one watch to its end; a pause where it failed."""
        try:
            if self._since is None:
                self._list()
            else:
                self._watch(self._since)
            return
        except ExpiredError:
            _log.info("%s: what changed meanwhile is not known any more, all is listed again", self._what.path)
            self._since = None
        except AbsentError:
            self._since = None
            self._follower.is_not_there()
        except ClusterError as error:
            _log.warning("%s is not heard of at present: %s", self._what.path, error)
        except Exception:  # noqa: BLE001 - the top of a thread: nobody else would take it up again
            _log.exception("%s is not heard of at present", self._what.path)
            self._since = None
        self._follower.is_followed = False
        self._pause()

    def _list(self) -> None:
        listed = self._before_list() if self._before_list is not None else None
        items, revision = self._source.list_all(self._what)
        self._follower.replace_all(items, revision)
        self._since = revision
        self._follower.is_followed = True
        if listed is not None:
            listed()

    def _watch(self, since: str) -> None:
        seconds, began_s = random.randint(*_WATCH_S), time.monotonic()
        with self._source.watch(self._what, since, seconds) as events:
            self._follower.is_followed = True
            for event in events:
                kind, one = event["type"], event["object"]
                if kind == "ERROR":
                    raise _error(one)
                self._follower.heard(kind, one)
                self._since = one["metadata"]["resourceVersion"]
                self._failed = 0
                if self._closed.is_set():
                    return
        if time.monotonic() - began_s < _SHORT_S:
            self._pause()  # a server that ends every watch at once is not asked without end

    def _pause(self) -> None:
        pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(self._failed, 10))
        self._failed += 1
        self._wait(pause_s * random.uniform(0.5, 1.0))


def _error(status: Object) -> ClusterError:
    said = f"the watch ended with {status.get('code')}: {status.get('message', '')}"
    return ExpiredError(said) if status.get("code") == 410 else ClusterError(said)
