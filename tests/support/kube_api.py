"""In-memory API server over HTTP, with watches, versions, preconditions and injected faults.

``tests/contract/test_kubernetes_api.py`` compares it with a real server. It knows no kinds: a path is a collection, and
every object put there is stored. Tests read and change it with its methods, like other clients of the server.
"""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import re
import select
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.support.fake_cluster import merge_patch

_LOOK_S = 0.05
_PATH = re.compile(
    r"(?P<root>/api/v1|/apis/[^/]+/[^/]+)(/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[a-z]+)"
    r"(/(?P<name>[^/]+))?(?P<status>/status)?"
)


class FakeApiServer:
    """One server, at ``url``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request except watches."""
        self.groups: dict[str, list[str]] = {}
        """Versions by API group, for clients that use discovery."""
        self.watches = 0
        """Number of watches begun."""
        self._changed = threading.Condition()
        self._version = 1
        self._oldest = 1
        """Oldest version that a watch can start from. Older ones get 410."""
        self._objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        self._failing: list[tuple[str, str, int, bool]] = []
        self._held = ""
        self._cut = 0
        self._ended = False
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                api._handle(self, json.loads(sent) if sent else {})

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeApiServer]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    # -- for the tests ------------------------------------------------------------------------------------------------

    def put(self, kind: str, one: Mapping[str, Any]) -> dict[str, Any]:
        """Create or replace an object as another client."""
        meta = one["metadata"]
        with self._changed:
            return copy.deepcopy(self._put(kind, meta.get("namespace", ""), dict(one)))

    def remove(self, kind: str, name: str, namespace: str = "default") -> None:
        with self._changed:
            self._remove(kind, namespace, name)

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        with self._changed:
            return copy.deepcopy(self._objects[kind, namespace, name])

    def list_all(self, kind: str) -> list[dict[str, Any]]:
        with self._changed:
            return copy.deepcopy([one for (found, _, _), one in sorted(self._objects.items()) if found == kind])

    def changes(self, kind: str, after: int) -> list[tuple[int, str, dict[str, Any]]]:
        """Return the events of a watch of ``kind`` after a version: version, type and object."""
        with self._changed:
            found = [one for one in self._events if one[0] > after and one[2] == kind]
            return [(version, word, copy.deepcopy(one)) for version, word, _, one in found]

    @property
    def version(self) -> int:
        with self._changed:
            return self._version

    def compact(self) -> None:
        """Cut all watches and expire their versions, so that clients must list again."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._cut += 1
            self._changed.notify_all()

    def cut_watches(self) -> None:
        with self._changed:
            self._cut += 1
            self._changed.notify_all()

    def hold_watches(self, kind: str = "", *, hold: bool = True) -> None:
        """Hold back the events of all watches, or of one kind, until called with ``hold=False``."""
        with self._changed:
            self._held = (kind or "all") if hold else ""
            self._changed.notify_all()

    def fail(self, method: str, path: str, code: int, *, after: bool = False) -> None:
        """Fail the next ``method`` request whose path contains ``path``, before or ``after`` it takes effect."""
        with self._changed:
            self._failing.append((method, path, code, after))

    def clear_failures(self) -> None:
        """Cancel the failures that :meth:`fail` requested."""
        with self._changed:
            self._failing.clear()

    def clear(self) -> None:
        """Remove all objects, failures and recorded requests."""
        with self._changed:
            self._objects.clear()
            self._failing.clear()
            self.asked.clear()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _handle(self, handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.close_connection = True
        parts = urlsplit(handler.path)
        query = dict(parse_qsl(parts.query))
        found = _PATH.fullmatch(parts.path)
        with self._changed:
            failing = next((one for one in self._failing if one[0] == handler.command and one[1] in handler.path), None)
            if failing is not None:
                self._failing.remove(failing)
        if "watch" not in query:
            with self._changed:
                self.asked.append((handler.command, parts.path))
        if failing is not None and not failing[3]:
            _reply(handler, failing[2], {"message": "failure injected before the request"})
            return
        group = parts.path.rpartition("/")[2]
        if group in self.groups and parts.path == f"/apis/{group}":
            _reply(handler, 200, {"versions": [{"version": one} for one in self.groups[group]]})
        elif found is None:
            _reply(handler, 404, {"message": "path not found"})
        elif "watch" in query:
            self._watch(handler, found, query)
        else:
            with self._changed:
                code, said = self._execute(handler.command, found, query, body)
                said = copy.deepcopy(said)
            if failing is not None:
                code, said = failing[2], {"message": "failure injected after the request"}
            _reply(handler, code, said)

    def _execute(
        self, method: str, path: re.Match[str], query: Mapping[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        kind, namespace, name = path["kind"], path["namespace"] or "", path["name"]
        key = kind, namespace, name or ""
        if method == "POST":
            meta = body["metadata"]
            meta.setdefault("namespace", namespace)
            made = meta.setdefault("name", f"{meta.get('generateName', '')}{self._version}")
            if (kind, namespace, made) in self._objects:
                return 409, {"message": f"{made} already exists"}
            return 201, self._put(kind, namespace, body)
        if name is None:
            return 200, {
                "metadata": {"resourceVersion": str(self._version)},
                "items": list(self._selected(kind, path["namespace"], query)),
            }
        there = self._objects.get(key)
        if there is None:
            return 404, {"message": f"{name} not found"}
        if method == "GET":
            return 200, there
        wanted = {**(body.get("preconditions") or {}), **({} if method == "DELETE" else body.get("metadata") or {})}
        for field in ("uid", "resourceVersion"):
            if wanted.get(field) is not None and wanted[field] != there["metadata"][field]:
                return 409, {"message": f"{field} is {there['metadata'][field]}, not {wanted[field]}"}
        if method == "PATCH":
            part = {"status": body.get("status")} if path["status"] else body
            changed = merge_patch(there, part)
            return 200, there if changed == there else self._put(kind, namespace, changed)
        if kind == "pods" and there["spec"].get("nodeName") and body.get("gracePeriodSeconds") != 0:
            leaving = merge_patch(there, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
            return 200, self._put(kind, namespace, leaving)
        self._remove(kind, namespace, name)
        return 200, there

    def _watch(self, handler: Any, path: re.Match[str], query: Mapping[str, str]) -> None:
        since, end = int(query["resourceVersion"]), time.monotonic() + float(query["timeoutSeconds"])
        with self._changed:
            self.watches += 1
            cut = self._cut
            expired = since < self._oldest

        def held() -> bool:
            return self._held in ("all", path["kind"])

        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Connection", "close")
        handler.end_headers()
        with contextlib.suppress(OSError):
            if expired:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": f"too old: {since}"}
                _chunk(handler, {"type": "ERROR", "object": gone})
            while not expired:
                with self._changed:
                    while self._cut == cut and not self._ended and (held() or self._version == since):
                        self._changed.wait(_LOOK_S)
                        if _has_disconnected(handler):
                            return
                        if time.monotonic() > end:
                            break
                    if self._cut != cut or self._ended or time.monotonic() > end:
                        break
                    events = [
                        (word, one) for version, word, kind, one in self._events
                        if version > since and kind == path["kind"] and _matches(one, path["namespace"], query)
                    ]  # fmt: skip
                    since = self._version
                for word, one in events:
                    _chunk(handler, {"type": word, "object": one})
                if not events:
                    _chunk(handler, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(since)}}})
            handler.wfile.write(b"0\r\n\r\n")

    # -- internals -----------------------------------------------------------------------------------------------------

    def _selected(self, kind: str, namespace: str | None, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        for (found, _, _), one in sorted(self._objects.items()):
            if found == kind and _matches(one, namespace, query):
                yield one

    def _put(self, kind: str, namespace: str, one: dict[str, Any]) -> dict[str, Any]:
        key = kind, namespace, one["metadata"]["name"]
        self._version += 1
        there = self._objects.get(key)
        kept = there["metadata"]["uid"] if there is not None else f"uid-{self._version}"
        one = copy.deepcopy(one)
        one["metadata"] |= {"uid": one["metadata"].get("uid") or kept, "resourceVersion": str(self._version)}
        self._objects[key] = one
        self._add_event("ADDED" if there is None else "MODIFIED", kind, one)
        return one

    def _remove(self, kind: str, namespace: str, name: str) -> None:
        one = self._objects.pop((kind, namespace, name))
        self._version += 1
        self._add_event("DELETED", kind, merge_patch(one, {"metadata": {"resourceVersion": str(self._version)}}))

    def _add_event(self, word: str, kind: str, one: dict[str, Any]) -> None:
        self._events.append((self._version, word, kind, copy.deepcopy(one)))
        self._changed.notify_all()


def _matches(one: Mapping[str, Any], namespace: str | None, query: Mapping[str, str]) -> bool:
    if namespace is not None and one["metadata"].get("namespace") != namespace:
        return False
    name, equals, value = query.get("labelSelector", "").partition("=")
    labels = one["metadata"].get("labels") or {}
    return not name or (labels.get(name) == value if equals else name in labels)


def _has_disconnected(handler: Any) -> bool:
    """Whether the watching client has closed its connection. It never sends anything else."""
    return bool(select.select([handler.connection], [], [], 0)[0])


def _chunk(handler: Any, event: Mapping[str, Any]) -> None:
    line = json.dumps(event).encode() + b"\n"
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
    handler.wfile.flush()


def _reply(handler: Any, code: int, said: Mapping[str, Any]) -> None:
    data = json.dumps(said).encode()
    handler.send_response(code)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(data)


class FakeKubelets:
    """Fake kubelets: each sync binds unbound pods and removes terminating ones."""

    def __init__(self, api: FakeApiServer) -> None:
        self._api = api
        self._bound = 0

    def sync_pods(self) -> None:
        for pod in self._api.list_all("pods"):
            if pod["metadata"].get("deletionTimestamp"):
                self._api.remove("pods", pod["metadata"]["name"])
            elif not pod["spec"].get("nodeName"):
                self._bound += 1
                pod["spec"]["nodeName"] = f"n{self._bound}"
                pod["status"] = {"phase": "Running", "podIP": f"10.0.{self._bound // 250}.{self._bound % 250}"}
                self._api.put("pods", pod)


def official_client(url: str) -> Any:
    """Return the official client, for :class:`integration.kubernetes.api_client.ApiServerClient`."""
    from kubernetes import client

    configuration = client.Configuration()
    configuration.host = url
    configuration.retries = False
    configuration.proxy = None
    return client.ApiClient(configuration)
