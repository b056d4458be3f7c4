"""The memory service's numbers: for ``/metrics`` in Prometheus' words, for ``/status`` as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tieredckpt.agent.memory_service.service import MemoryService

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_REQUESTS = ("ShowNamespace", "CreateNamespace", "DeleteNamespace", "Put", "Get", "Remove", "Latest", "Reset")


class Reporting:
    """What is told of one node's memory service."""

    def __init__(self, service: MemoryService, address: str) -> None:
        self._service = service
        self._address = address

    def status(self) -> dict[str, Any]:
        look = self._service.holdings.look()
        return {
            "address": self._address,
            "namespaces": {
                name: {
                    "num_ranks": one.num_ranks,
                    "steps_retained": one.steps_retained,
                    "whole_steps": look.whole(name, one),
                    "steps": sorted(look.view.of(name), reverse=True),
                    "size_bytes": sum(s.size_bytes for of in look.view.of(name).values() for s in of.values()),
                }
                for name, one in sorted(look.registry.all_living.items())
            },
            "not_asked": dict(look.silent),
            "counted": dict(self._service.counted),
            "given_up": self._service.holdings.given_up,
        }

    def collect(self) -> Iterator[Metric]:
        """What this node itself knows: a scrape asks no other node."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counted, holdings = self._service.counted, self._service.holdings
        here = holdings.here()
        registry = holdings.spreading.known()
        for name, text, value in (
            ("namespaces", "Namespaces of the memory service.", len(registry.all_living)),
            ("shards", "Shards of the memory service on this node, copies included.", len(here)),
            ("shard_bytes", "Their bytes.", sum(fact.size_bytes for fact in here)),
        ):
            yield GaugeMetricFamily(f"tieredckpt_memory_service_{name}", text, value=value)
        requests = CounterMetricFamily("tieredckpt_memory_service_requests", "Requests by kind.", labels=["kind"])
        for kind in _REQUESTS:
            requests.add_metric([kind], counted[kind])
        yield requests
        for name, text, value in (
            ("refused", "Requests that were not done.", counted["refused"]),
            ("put_bytes", "Bytes taken in from clients.", counted["put_bytes"]),
            ("get_bytes", "Bytes handed to clients.", counted["get_bytes"]),
            ("gets_elsewhere", "Shards that came from another node.", counted["get_elsewhere"]),
            ("given_up", "Shards that were not kept any more.", holdings.given_up),
        ):
            yield CounterMetricFamily(f"tieredckpt_memory_service_{name}", text, value=value)
