"""Answers of the API server and the controller's reaction, over HTTP with a scripted server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from integration.kubernetes.api_client import ApiServerClient
from integration.kubernetes.errors import (
    ApiServerError,
    ApiServerRefusedError,
    ApiServerUnreachableError,
    ExpiredError,
    ResourceConflictError,
    ResourceNotFoundError,
)
from tests.support.kube_objects import job_object, pod_object


class Told:
    """A server that answers with ``status`` and ``body``; a status of 0 closes the connection."""

    def __init__(self) -> None:
        self.status, self.body = 200, "{}"
        self.asked: list[tuple[str, str, str | None, Any]] = []
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                kind = self.headers.get("Content-Type")
                told.asked.append((self.command, self.path, kind, json.loads(sent) if sent else None))
                if not told.status:
                    self.close_connection = True
                    return
                self.send_response(told.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(told.body)))
                self.end_headers()
                self.wfile.write(told.body.encode())

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    thread = threading.Thread(target=told.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield told
    told.server.shutdown()
    thread.join()
    told.server.server_close()


@pytest.fixture
def cluster(told: Told) -> Iterator[ApiServerClient]:
    client = pytest.importorskip("kubernetes.client")
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{told.server.server_port}"
    configuration.retries = False
    configuration.proxy = None
    with client.ApiClient(configuration) as connection:
        yield ApiServerClient(connection)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, ResourceNotFoundError),
        (409, ResourceConflictError),
        (410, ExpiredError),
        (403, ApiServerRefusedError),
        (422, ApiServerRefusedError),
        (429, ApiServerUnreachableError),
        (500, ApiServerUnreachableError),
        (503, ApiServerUnreachableError),
        (0, ApiServerUnreachableError),
    ],
)
def test_each_status_code_maps_to_an_error(
    told: Told, cluster: ApiServerClient, status: int, error: type[ApiServerError]
) -> None:
    told.status, told.body = status, '{"message": "in its own words"}'
    with pytest.raises(ApiServerError) as raised:
        cluster.get_job("default", "llama")
    assert type(raised.value) is error
    if status:
        assert "in its own words" in str(raised.value)


def test_unreachable_server_is_reported(told: Told, cluster: ApiServerClient) -> None:
    cluster._client.configuration.host = "http://127.0.0.1:1"
    with pytest.raises(ApiServerUnreachableError):
        cluster.list_pods("default", "llama")


def test_status_update_requires_the_version_read_before(told: Told, cluster: ApiServerClient) -> None:
    cluster.update_status(job_object(), {"restartCount": 1})
    ((method, path, kind, body),) = told.asked
    assert (method, kind) == ("PATCH", "application/merge-patch+json")
    assert path == "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs/llama/status"
    assert body == {"metadata": {"resourceVersion": "1"}, "status": {"restartCount": 1}}


def test_only_this_very_pod_is_deleted(told: Told, cluster: ApiServerClient) -> None:
    pod = pod_object(1)
    cluster.delete_pod(pod, grace_s=1)
    ((method, path, _, body),) = told.asked
    assert (method, path) == ("DELETE", "/api/v1/namespaces/default/pods/llama-workers-1")
    assert body["preconditions"] == {"uid": pod["metadata"]["uid"]}
    assert body["gracePeriodSeconds"] == 1


@pytest.mark.parametrize("status", [404, 409])
def test_deleting_a_missing_or_replaced_pod_succeeds(told: Told, cluster: ApiServerClient, status: int) -> None:
    told.status = status
    cluster.delete_pod(pod_object(1))


def test_listed_pods_belong_to_the_job(told: Told, cluster: ApiServerClient) -> None:
    told.body = '{"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}}]}'
    assert cluster.list_pods("default", "llama") == [{"metadata": {"name": "a"}}]
    assert told.asked[0][1] == "/api/v1/namespaces/default/pods?labelSelector=HPJob%3Dllama&limit=500"


def test_an_event_is_about_the_job(told: Told, cluster: ApiServerClient) -> None:
    cluster.post_event(job_object(), "NodeFault", "x" * 5000, warning=True)
    event = told.asked[0][3]
    assert (event["involvedObject"]["kind"], event["involvedObject"]["uid"]) == ("HyperPodPyTorchJob", "uid-of-llama")
    assert event["type"] == "Warning"
    assert len(event["message"]) < 1024, "longer ones are refused"
