"""Informer of one collection of objects: one list, then watches, indexed by key.

An index never goes back in time. It contains the result of each own write at once, so its readers neither create a
second pod nor miss one. Older watch events, late responses and older lists are ignored.

A watch that ends resumes at its last revision. If the server no longer has it (410), the informer lists again. After
any other error it retries, with increasing pauses.
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
    """Objects by name and by job. Any thread may read and update it."""

    def __init__(self, job_of: Callable[[Object], str], changed: Callable[[str, str], None]) -> None:
        """Create an empty index.

        ``job_of`` returns the name of an object's job; ``changed`` is called with the job's namespace and name.
        """
        self._job_of, self._changed = job_of, changed
        self._lock = threading.Lock()
        self._objects: dict[Key, Object] = {}
        self._of_job: dict[Key, set[str]] = {}
        self._reached = 0
        """Revision up to which the index reflects all changes."""
        self._gone: set[str] = set()
        """Uids missing from a list of one job. The watch may still deliver older events of them."""
        self._covered: dict[Key, str] = {}
        self._listed = threading.Event()
        self.is_absent = False
        """Whether the server does not know this kind of object."""
        self.is_followed = False
        """Whether the watch works; if not, only direct reads of the server are current."""

    @property
    def is_listed(self) -> bool:
        return self._listed.is_set()

    def until_listed(self, timeout_s: float) -> bool:
        return self._listed.wait(timeout_s)

    def get(self, namespace: str, name: str) -> Object | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def of_job(self, namespace: str, job: str) -> list[Object]:
        """Return the job's objects, sorted by name."""
        with self._lock:
            return [self._objects[namespace, name] for name in sorted(self._of_job.get((namespace, job), ()))]

    def versions(self) -> dict[Key, str]:
        with self._lock:
            return {key: resource["metadata"]["resourceVersion"] for key, resource in self._objects.items()}

    def replace_all(self, items: Iterable[Object], revision: str) -> None:
        """Replace all objects by the list at ``revision``, except newer ones."""
        reached, listed = _number(revision), {_key(resource): resource for resource in items}
        jobs = set[Key]()
        with self._lock:
            for key, resource in list(self._objects.items()):
                if key not in listed and _version(resource) <= reached:
                    jobs.add(self._drop(key))
            for key, resource in listed.items():
                if key not in self._objects or _version(self._objects[key]) < _version(resource):
                    jobs.add(self._put(key, resource))
            self._reached = max(self._reached, reached)
            self._gone.clear()
            self.is_absent = False
        self._listed.set()
        self._notify(jobs)

    def heard(self, kind: str, resource: Object) -> None:
        """Apply one watch event: ``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``."""
        jobs = set[Key]()
        with self._lock:
            self._reached = max(self._reached, _version(resource))
            if kind == "BOOKMARK":
                return
            key, uid = _key(resource), resource["metadata"].get("uid")
            held = self._objects.get(key)
            if kind == "DELETED":
                self._gone.discard(str(uid))
                if held is not None and held["metadata"].get("uid") == uid:
                    jobs.add(self._drop(key))
            elif uid not in self._gone and (held is None or _version(held) < _version(resource)):
                jobs.add(self._put(key, resource))
        self._notify(jobs)

    def is_not_there(self) -> None:
        """Empty the index: the server does not know this kind of object."""
        with self._lock:
            jobs = {self._drop(key) for key in list(self._objects)}
            self.is_absent, self.is_followed = True, False
            self._listed.clear()
        self._notify(jobs)

    def answered(self, resource: Object) -> None:
        """Add the object from the response to an own write or to a read of this object."""
        with self._lock:
            key = _key(resource)
            held = self._objects.get(key)
            if held is None and _version(resource) <= self._reached:
                return  # the watch is newer: the object was deleted
            if held is None or _version(held) < _version(resource):
                self._put(key, resource)

    def leaves(self, namespace: str, name: str, uid: str) -> None:
        """Mark the object as terminating until the watch reports its state."""
        with self._lock:
            held = self._objects.get((namespace, name))
            if held is not None and held["metadata"].get("uid") == uid:
                now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                meta = {"deletionTimestamp": now, **held["metadata"]}
                self._objects[namespace, name] = {**held, "metadata": meta}

    def replace_of_job(self, namespace: str, job: str, items: Iterable[Object], revision: str) -> None:
        """Replace the objects of one job by the list at ``revision``, except newer ones."""
        reached = _number(revision)
        listed = {_key(resource): resource for resource in items}
        with self._lock:
            if reached < self._reached:
                return  # the watch is newer
            for name in list(self._of_job.get((namespace, job), ())):
                key = namespace, name
                if key not in listed and _version(self._objects[key]) <= reached:
                    self._gone.add(str(self._objects[key]["metadata"].get("uid")))
                    self._drop(key)
            for key, resource in listed.items():
                if key not in self._objects or _version(self._objects[key]) < _version(resource):
                    self._put(key, resource)

    def covers(self, job: Key, version: str) -> bool:
        """Return whether the job's objects are at least as new as this version of the job."""
        with self._lock:
            return self._covered.get(job) == version

    def cover(self, versions: Mapping[Key, str]) -> None:
        with self._lock:
            self._covered.update(versions)

    def uncover(self, job: Key) -> None:
        """Remove the record of a job that no longer exists."""
        with self._lock:
            self._covered.pop(job, None)

    def _put(self, key: Key, resource: Object) -> Key:
        if key in self._objects:
            self._drop(key)
        meta = {name: value for name, value in resource["metadata"].items() if name != "managedFields"}
        self._objects[key] = resource = {**resource, "metadata": meta}
        job = key[0], self._job_of(resource)
        self._of_job.setdefault(job, set()).add(key[1])
        return job

    def _drop(self, key: Key) -> Key:
        job = key[0], self._job_of(self._objects.pop(key))
        names = self._of_job[job]
        names.discard(key[1])
        if not names:
            del self._of_job[job]
        return job

    def _notify(self, jobs: Iterable[Key]) -> None:
        for job in jobs:
            self._changed(*job)


def _key(resource: Object) -> Key:
    meta = resource["metadata"]
    return meta.get("namespace", ""), meta["name"]


def _version(resource: Object) -> int:
    return _number(resource["metadata"]["resourceVersion"])


def _number(version: str) -> int:
    """Return a resource version as a number.

    Kubernetes guarantees that versions of one kind are comparable as numbers.
    """
    if not (version.isascii() and version.isdigit()):
        raise ApiServerUnreachableError(f"the version {version!r} of this API server's objects is not a number")
    return int(version)


_MIN_PAUSE_S = 0.2
_MAX_PAUSE_S = 30.0
_SHORT_WATCH_S = 1.0
_WATCH_DURATION_S = (240, 360)
"""Range of a watch's duration in seconds.

Random, because after a restart of the server all its clients reconnect at the same time.
"""


@dataclass(frozen=True)
class ResourceCollection:
    """A collection of objects to list and watch."""

    path: str
    selector: str = ""
    only_metadata: bool = False
    """Whether to read only metadata. Nodes need only labels, and their status changes constantly."""


class ListWatch(Protocol):
    """The methods of :class:`integration.kubernetes.api_client.ApiServerClient` that an informer needs."""

    def list_all(self, what: ResourceCollection) -> tuple[Sequence[Object], str]:
        """Return all objects and the revision of the list."""

    def watch(self, what: ResourceCollection, since: str, timeout_s: int) -> AbstractContextManager[Iterator[Object]]:
        """Yield the events after revision ``since``, for ``timeout_s`` seconds.

        Raise :class:`ExpiredError` if the server no longer has that revision.
        """


class WatchHandler(Protocol):
    """Receiver of lists and events, like :class:`integration.kubernetes.informer.ObjectIndex`."""

    is_followed: bool

    def replace_all(self, items: Sequence[Object], revision: str) -> None: ...

    def heard(self, kind: str, one: Object) -> None: ...

    def is_not_there(self) -> None: ...


class Informer:
    """Thread that updates ``follower`` until it is closed."""

    def __init__(
        self,
        source: ListWatch,
        what: ResourceCollection,
        follower: WatchHandler,
        *,
        before_list: Callable[[], Callable[[], None]] | None = None,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Create an informer.

        ``before_list`` is called before each list request, and its result after the list was applied.
        """
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
        """Stop the thread. A running request ends within the duration of a watch."""
        self._closed.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.step()

    def step(self) -> None:
        """Run one list, or one watch until it ends. Pause after an error."""
        try:
            if self._since is None:
                self._list()
            else:
                self._watch(self._since)
            return
        except ExpiredError:
            log.info("%s: the changes since the last watch have expired, listing all objects", self._what.path)
            self._since = None
        except ResourceNotFoundError:
            self._since = None
            self._follower.is_not_there()
        except ApiServerError as error:
            log.warning("cannot watch %s, retrying: %s", self._what.path, error)
        except Exception:  # top of a thread: an escaping exception would end the informer
            log.exception("cannot watch %s, retrying", self._what.path)
            self._since = None
        self._follower.is_followed = False
        self._pause()

    def _list(self) -> None:
        after_list = self._before_list() if self._before_list is not None else None
        items, revision = self._source.list_all(self._what)
        self._follower.replace_all(items, revision)
        self._since = revision
        self._follower.is_followed = True
        if after_list is not None:
            after_list()

    def _watch(self, since: str) -> None:
        seconds, began_s = random.randint(*_WATCH_DURATION_S), time.monotonic()
        with self._source.watch(self._what, since, seconds) as events:
            self._follower.is_followed = True
            for event in events:
                kind, resource = event["type"], event["object"]
                if kind == "ERROR":
                    raise _error(resource)
                self._follower.heard(kind, resource)
                self._since = resource["metadata"]["resourceVersion"]
                self._failed = 0
                if self._closed.is_set():
                    return
        if time.monotonic() - began_s < _SHORT_WATCH_S:
            self._pause()  # do not flood a server that ends every watch at once

    def _pause(self) -> None:
        pause_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2.0 ** min(self._failed, 10))
        self._failed += 1
        self._wait(pause_s * random.uniform(0.5, 1.0))


def _error(status: Object) -> ApiServerError:
    message = f"the watch ended with {status.get('code')}: {status.get('message', '')}"
    return ExpiredError(message) if status.get("code") == 410 else ApiServerError(message)
