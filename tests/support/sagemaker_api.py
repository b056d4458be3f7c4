"""Local SageMaker endpoint with one cluster that validates requests against AWS's own model.

Requests are checked with botocore's service model: names, types, enumerations, lengths, ranges and patterns. It also
rejects an update with neither instance groups nor node recovery, which AWS rejects but the model allows.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ARN = "arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghijkl"
_KINDS = {"string": str, "integer": int, "boolean": bool, "structure": dict, "list": list, "map": dict}


@functools.cache
def service_model():
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"))


def schema_errors(value, shape, at=""):
    """Return all violations of AWS's model in a request or a response."""
    if not isinstance(value, _KINDS.get(shape.type_name, object)):
        return [f"{at}: {type(value).__name__} is no {shape.type_name}"]
    if shape.type_name == "structure":
        lacking = [f"{at}.{name}: is required" for name in shape.required_members if name not in value]
        unknown = [f"{at}.{name}: is not known" for name in value if name not in shape.members]
        inner = [
            schema_errors(value[name], member, f"{at}.{name}")
            for name, member in shape.members.items()
            if name in value
        ]
        return [*lacking, *unknown, *(one for found in inner for one in found)]
    if shape.type_name == "list":
        return [one for n, item in enumerate(value) for one in schema_errors(item, shape.member, f"{at}[{n}]")]
    told = shape.metadata
    size = value if shape.type_name == "integer" else len(value) if isinstance(value, str) else None
    wrong = [
        size is not None and not told.get("min", size) <= size <= told.get("max", size) and "size",
        "enum" in told and value not in told["enum"] and f"none of {told['enum']}",
        "pattern" in told and isinstance(value, str) and not re.fullmatch(told["pattern"], value) and "pattern",
    ]
    return [f"{at}: {value!r}: {why}" for why in wrong if why]


class FakeSageMaker:
    """One cluster and the requests it received."""

    def __init__(self, **described):
        self.cluster = {
            "ClusterArn": ARN,
            "ClusterName": "ml",
            "ClusterStatus": "InService",
            "NodeRecovery": "Automatic",
            "InstanceGroups": [{"InstanceGroupName": "workers", "CurrentCount": 4, "TargetCount": 4}],
            **described,
        }
        self.requests = []
        self.refusal = None
        """Response to all further calls, if set: status, code, message."""
        self.updating = []
        """Statuses that an update goes through before InService."""
        self.keeps = True
        """Whether updates succeed; if not, the cluster rolls them back at the end."""
        self._before = None

    def answer(self, operation, request):
        self.requests.append((operation, request))
        if self.refusal is not None:
            return self.refusal
        wrong = schema_errors(request, service_model().operation_model(operation).input_shape)
        if wrong:
            return 400, "ValidationException", "; ".join(wrong)
        if request["ClusterName"] not in (self.cluster["ClusterName"], ARN):
            return 400, "ResourceNotFound", f"Cluster {request['ClusterName']} not found"
        return getattr(self, operation)(request)

    def DescribeCluster(self, _):
        if self.updating:
            self.cluster["ClusterStatus"] = self.updating.pop(0)
        elif self._before is not None:
            if not self.keeps:
                self.cluster.update(self._before)
            self._before = None
            self.cluster["ClusterStatus"] = "InService"
        answer = {name: value for name, value in self.cluster.items() if value is not None}
        assert schema_errors(answer, service_model().operation_model("DescribeCluster").output_shape) == []
        return 200, answer, ""

    def UpdateCluster(self, request):
        if self.cluster["ClusterStatus"] != "InService":
            return 400, "ConflictException", f"Cluster is {self.cluster['ClusterStatus']}"
        if not {"InstanceGroups", "NodeRecovery"} & request.keys():
            return 400, "ValidationException", "InstanceGroups or NodeRecovery must be provided"
        self._before = {"TieredStorageConfig": self.cluster.get("TieredStorageConfig")}
        self.cluster.update({name: value for name, value in request.items() if name != "ClusterName"})
        return 200, {"ClusterArn": ARN}, ""


@contextmanager
def serve(sagemaker):
    """Serve the API and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            operation = self.headers["X-Amz-Target"].removeprefix("SageMaker.")
            status, said, message = sagemaker.answer(operation, body)
            answer = json.dumps(said if status == 200 else {"__type": said, "message": message}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
