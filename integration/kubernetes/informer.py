"""One collection of objects: listed once, watched from there on, indexed by key.

An index never goes back. What a write of ours has made is in it before the next look, so that whoever reads from it
makes no second pod and forgets none; what the watch says of it later is nothing new. What an older watch event, a late
answer or a list of an older revision says is left out.

A watch that ends is taken up where it ended. One that is too old for the server (410) begins with a list again, and
whatever else goes wrong is tried again after a pause, each time a longer one.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from integration.kubernetes.errors import ApiServerError, ApiServerUnreachableError, ExpiredError, ResourceNotFoundError

log = logging.getLogger(__name__)


Object = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name."""


class ObjectIndex:
    """By name and by job. Any thread may ask, and any may say what it has heard."""

    def __init__(self, job_of: Callable[[Object], str], changed: Callable[[str, str], None]) -> None:
        """``job_of``: the job that an object is about; ``changed`` is called with its namespace and that name."""
        self._job_of, self._changed = job_of, changed
        self._lock = threading.Lock()
        self._objects: dict[Key, Object] = {}
        self._of_job: dict[Key, set[str]] = {}
        self._reached = 0
        """The revision up to which the watch, or a list of all, has said everything."""
        self._gone: set[str] = set()
        """Objects (uids) that a list of one job no longer had; the watch may not have said yet that they were there."""
        self._covered: dict[Key, str] = {}
        self._listed = threading.Event()
        self.is_absent = False
        """The server knows no such kind."""
        self.is_followed = False
        """What changes is heard of; where not, only the server can be asked."""

    @property
    def is_listed(self) -> bool:
        return self._listed.is_set()

    def until_listed(self, timeout_s: float) -> bool:
        return self._listed.wait(timeout_s)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, namespace: str, name: str) -> Object | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def of_job(self, namespace: str, job: str) -> list[Object]:
        """In the order of their names."""
        with self._lock:
            return [self._objects[namespace, name] for name in sorted(self._of_job.get((namespace, job), ()))]

    def versions(self) -> dict[Key, str]:
        with self._lock:
            return {key: one["metadata"]["resourceVersion"] for key, one in self._objects.items()}

    # -- what came of a list or a watch -------------------------------------------------------------------------------

    def replace_all(self, items: Iterable[Object], revision: str) -> None:
        """All there are at ``revision``; what is known to be newer stays."""
        reached, now = _number(revision), {_key(one): one for one in items}
        told = set[Key]()
        with self._lock:
            for key, one in list(self._objects.items()):
                if key not in now and _version(one) <= reached:
                    told.add(self._drop(key))
            for key, one in now.items():
                if key not in self._objects or _version(self._objects[key]) < _version(one):
                    told.add(self._put(key, one))
            self._reached = max(self._reached, reached)
            self._gone.clear()
            self.is_absent = False
        self._listed.set()
        self._tell(told)

    def heard(self, kind: str, one: Object) -> None:
        """One event of the watch: ``ADDED``, ``MODIFIED``, ``DELETED``, or a ``BOOKMARK``."""
        told = set[Key]()
        with self._lock:
            self._reached = max(self._reached, _version(one))
            if kind == "BOOKMARK":
                return
            key, uid = _key(one), one["metadata"].get("uid")
            held = self._objects.get(key)
            if kind == "DELETED":
                self._gone.discard(str(uid))
                if held is not None and held["metadata"].get("uid") == uid:
                    told.add(self._drop(key))
            elif uid not in self._gone and (held is None or _version(held) < _version(one)):
                told.add(self._put(key, one))
        self._tell(told)

    def is_not_there(self) -> None:
        """The server does not know what is watched."""
        with self._lock:
            told = {self._drop(key) for key in list(self._objects)}
            self.is_absent, self.is_followed = True, False
            self._listed.clear()
        self._tell(told)

    # -- what came of our own requests --------------------------------------------------------------------------------

    def answered(self, one: Object) -> None:
        """What a write of ours, or a read of this one object, was answered with."""
        with self._lock:
            key = _key(one)
            held = self._objects.get(key)
            if held is None and _version(one) <= self._reached:
                return  # the watch was further already: it is gone
            if held is None or _version(held) < _version(one):
                self._put(key, one)

    def leaves(self, namespace: str, name: str, uid: str) -> None:
        """It is being deleted, or gone: the watch will say which."""
        with self._lock:
            held = self._objects.get((namespace, name))
            if held is not None and held["metadata"].get("uid") == uid:
                moment = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                meta = {"deletionTimestamp": moment, **held["metadata"]}
                self._objects[namespace, name] = {**held, "metadata": meta}

    def replace_of_job(self, namespace: str, job: str, items: Iterable[Object], revision: str) -> None:
        """All of one job at ``revision``, which is not said of any other one."""
        reached = _number(revision)
        now = {_key(one): one for one in items}
        with self._lock:
            if reached < self._reached:
                return  # the watch was further already
            for name in list(self._of_job.get((namespace, job), ())):
                key = namespace, name
                if key not in now and _version(self._objects[key]) <= reached:
                    self._gone.add(str(self._objects[key]["metadata"].get("uid")))
                    self._drop(key)
            for key, one in now.items():
                if key not in self._objects or _version(self._objects[key]) < _version(one):
                    self._put(key, one)

    # -- how far it goes ----------------------------------------------------------------------------------------------

    def covers(self, job: Key, version: str) -> bool:
        """Whether what is here of a job is at least as new as this version of the job itself."""
        with self._lock:
            return self._covered.get(job) == version

    def cover(self, versions: Mapping[Key, str]) -> None:
        with self._lock:
            self._covered.update(versions)

    def uncover(self, job: Key) -> None:
        """It is not there any more."""
        with self._lock:
            self._covered.pop(job, None)

    # -- within -------------------------------------------------------------------------------------------------------

    def _put(self, key: Key, one: Object) -> Key:
        if key in self._objects:
            self._drop(key)
        meta = {name: value for name, value in one["metadata"].items() if name != "managedFields"}
        self._objects[key] = one = {**one, "metadata": meta}
        job = key[0], self._job_of(one)
        self._of_job.setdefault(job, set()).add(key[1])
        return job

    def _drop(self, key: Key) -> Key:
        job = key[0], self._job_of(self._objects.pop(key))
        names = self._of_job[job]
        names.discard(key[1])
        if not names:
            del self._of_job[job]
        return job

    def _tell(self, jobs: Iterable[Key]) -> None:
        for job in jobs:
            self._changed(*job)


def _key(one: Object) -> Key:
    meta = one["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _version(one: Object) -> int:
    return _number(one["metadata"]["resourceVersion"])


def _number(version: str) -> int:
    """Kubernetes says that versions of one kind can be compared, as numbers."""
    if not (version.isascii() and version.isdigit()):
        raise ApiServerUnreachableError(f"the version {version!r} of this API server's objects is no number")
    return int(version)


_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_SHORT_S = 1.0
_WATCH_S = (240, 360)
"""Not all at once: a server that was started anew has all of its clients at the same time."""


@dataclass(frozen=True)
class ResourceCollection:
    """What is listed and watched."""

    path: str
    selector: str = ""
    only_metadata: bool = False
    """Of nodes the labels are enough, and their status changes all the time."""


class ListWatch(Protocol):
    """As :class:`integration.kubernetes.api_client.ApiServerClient` has it."""

    def list_all(self, what: ResourceCollection) -> tuple[Sequence[Object], str]:
        """All, and the revision of the list."""

    def watch(self, what: ResourceCollection, since: str, timeout_s: int) -> AbstractContextManager[Iterator[Object]]:
        """Events after ``since``, for so long; :class:`ExpiredError` where that is too long ago."""


class WatchHandler(Protocol):
    """Who is told; :class:`integration.kubernetes.informer.ObjectIndex` is one."""

    is_followed: bool

    def replace_all(self, items: Sequence[Object], revision: str) -> None: ...

    def heard(self, kind: str, one: Object) -> None: ...

    def is_not_there(self) -> None: ...


class Informer:
    """Keeps ``follower`` up to date until it is closed."""

    def __init__(
        self,
        source: ListWatch,
        what: ResourceCollection,
        follower: WatchHandler,
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
            log.info("%s: what changed meanwhile is not known any more, all is listed again", self._what.path)
            self._since = None
        except ResourceNotFoundError:
            self._since = None
            self._follower.is_not_there()
        except ApiServerError as error:
            log.warning("%s is not heard of at present: %s", self._what.path, error)
        except Exception:  # the top of a thread: nobody else would take it up again
            log.exception("%s is not heard of at present", self._what.path)
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


def _error(status: Object) -> ApiServerError:
    said = f"the watch ended with {status.get('code')}: {status.get('message', '')}"
    return ExpiredError(said) if status.get("code") == 410 else ApiServerError(said)
