"""Kubelets and agents of many small jobs in one process: bound pods run at once and obey requests.

Every pod has its own address in 127.0.0.0/8, all with the same port. Nothing else of a node is simulated.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import selectors
import threading
from collections.abc import Iterator
from typing import Any

from integration.kubernetes.api_client import ApiServerClient, pods_in
from integration.kubernetes.errors import ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.informer import Informer, ObjectIndex
from tests.support.ports import free_port

_LOOK_S = 0.1


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class ManyAgents:
    """Process-level agents. ``cluster`` needs administrator rights."""

    def __init__(self, cluster: ApiServerClient) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._agents: dict[str, dict[str, Any]] = {}
        self._addresses: dict[str, str] = {}
        self._due: set[str] = set()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self.calls = 0
        self.failure: BaseException | None = None
        self._pods = ObjectIndex(lambda one: str(one["metadata"]["name"]), self._pod_changed)
        agents = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                said = agents._reply_to(self.connection.getsockname()[0], self.path, json.loads(body) if body else {})
                data = json.dumps(said).encode()
                self.send_response(200 if said else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None: ...

        self._handler = Handler
        self._servers: list[_Server] = []
        self._calling = selectors.DefaultSelector()
        self.port = free_port()

    @contextlib.contextmanager
    def running(self) -> Iterator[ManyAgents]:
        watch = Informer(self._cluster, pods_in(""), self._pods)
        threads = [threading.Thread(target=self._run), threading.Thread(target=self._serve)]
        for thread in threads:
            thread.start()
        watch.start()
        try:
            yield self
        finally:
            watch.close()
            self._ending.set()
            self._wake.set()
            for thread in threads:
                thread.join()
            for server in self._servers:
                server.server_close()
            self._calling.close()

    # -- kubelets -----------------------------------------------------------------------------------------------------

    def _pod_changed(self, _: str, name: str) -> None:
        with self._lock:
            self._due.add(name)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._wake.wait()
                self._wake.clear()
                self._sync_due()
        except BaseException as failure:  # for the test to raise
            self.failure = failure

    def _sync_due(self) -> None:
        with self._lock:
            due, self._due = self._due, set()
        for name in sorted(due):
            pod = self._pods.get("default", name)
            if pod is not None:
                with contextlib.suppress(ResourceNotFoundError, ResourceConflictError):
                    self._sync_pod(dict(pod))

    def _sync_pod(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        if meta.get("deletionTimestamp"):
            self._cluster.delete_pod(pod, grace_s=0)
        elif pod["spec"].get("nodeName") and meta["uid"] not in self._addresses:
            number = len(self._addresses) + 1
            self._addresses[meta["uid"]] = address = f"127.77.{number // 250}.{number % 250 + 1}"
            with self._lock:
                self._agents[address] = {"status": "ready"}
            self._listen(address)
            running = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1"}
            path = f"/api/v1/namespaces/default/pods/{meta['name']}/status"
            self._cluster.request("PATCH", path, {"metadata": {"uid": meta["uid"]}, "status": running})

    def _listen(self, address: str) -> None:
        server = _Server((address, self.port), self._handler)
        self._servers.append(server)
        self._calling.register(server, selectors.EVENT_READ, server)

    def _serve(self) -> None:
        while not self._ending.is_set():
            for key, _ in self._calling.select(_LOOK_S):
                key.data.handle_request()

    # -- agents -------------------------------------------------------------------------------------------------------

    def _reply_to(self, address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.calls += 1
            agent = self._agents.get(address)
            if agent is None:
                return {}
            if path == "/start" and agent["status"] == "ready":
                agent |= {"status": "running", "ipversion": body["ipVersion"], "assigned_rank": str(body["rank"])}
            elif path == "/stop" and agent["status"] != "ready":
                agent["status"] = "ready"
            return {"transitions": {}, "spare": "False", **agent}
