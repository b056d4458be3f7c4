"""Export of traces with the OpenTelemetry SDK, which reads the variables ``OTEL_*``."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from tieredckpt.goodput.traces import Trace

log = logging.getLogger(__name__)

_SPANS_PER_REQUEST = 512


class TraceExporter:
    """Sends each trace once to an OTLP endpoint."""

    def __init__(self) -> None:
        self._ids, self._recorded, self._exporter = _GivenIds(), InMemorySpanExporter(), OTLPSpanExporter()
        resource = Resource.create({SERVICE_NAME: "tieredckpt"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._recorded))
        self._tracer = provider.get_tracer("tieredckpt")
        self._sent: set[int] = set()
        self.sent_spans = 0

    def send(self, traces: Iterable[Trace]) -> bool:
        """Send the traces that were not sent before. Return whether the endpoint accepted them all."""
        recorded: set[int] = set()
        for trace in traces:
            if trace.trace_id in self._sent:
                continue
            self._record(trace)
            recorded.add(trace.trace_id)
            if len(self._recorded.get_finished_spans()) >= _SPANS_PER_REQUEST:
                if not self._send_recorded(recorded):
                    return False
                recorded.clear()
        return self._send_recorded(recorded)

    def _record(self, trace: Trace) -> None:
        started: dict[int, Span] = {}
        for one in trace.spans:
            self._ids.trace_id, self._ids.span_id = trace.trace_id, one.span_id
            context = set_span_in_context(started[one.parent_id]) if one.parent_id else None
            span = self._tracer.start_span(one.name, context, attributes=one.attributes, start_time=one.start_us * 1000)
            if one.error:
                span.set_status(Status(StatusCode.ERROR, one.error))
            span.end(one.end_us * 1000)
            started[one.span_id] = span

    def _send_recorded(self, traces: set[int]) -> bool:
        spans = self._recorded.get_finished_spans()
        self._recorded.clear()
        try:
            if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
                return False
        except OSError as error:  # before 1.40 the exporter raises the connection's error
            log.warning("the spans cannot be sent: %s", error)
            return False
        self._sent |= traces
        self.sent_spans += len(spans)
        return True


class _GivenIds(IdGenerator):
    """IDs of the span that starts next."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id
