"""``tieredckpt goodput --otlp`` with a receiver of OTLP on loopback."""

import os
import socket
import time

import pytest

from tests.support.event_logs import START, EventLogBuilder
from tests.support.otlp_receiver import otlp_receiver
from tests.support.synthetic_event_logs import SyntheticJob
from tieredckpt.cli import goodput
from tieredckpt.event_log import EventLogWriter
from tieredckpt.event_log.event_types import ProcessEnded, SaveEvent
from tieredckpt.goodput.traces import job_traces

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def without_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def receiver(monkeypatch):
    with otlp_receiver() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        yield server


@pytest.fixture
def write_log(tmp_path):
    """Return a function that appends events to an event log and returns its folder."""
    writer = EventLogWriter(tmp_path / "event-log")

    def write(events):
        for event in events:
            writer.write(event)
        return tmp_path / "event-log"

    yield write
    writer.close()


def received(span):
    return (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name)


def expected(events):
    return [
        (f"{trace.trace_id:032x}", f"{one.span_id:016x}", f"{one.parent_id:016x}" if one.parent_id else "", one.name)
        for trace in job_traces(events)
        for one in trace.spans
    ]


def test_every_span_is_received_with_its_times_and_attributes(cli, receiver, write_log):
    told = SyntheticJob(steps=300, faults=3, resizes=1).events
    said = cli("goodput", write_log(told), "--otlp")
    assert (said.code, said.err) == (0, f"sent {len(receiver.spans)} spans\n")
    assert said.out.startswith("llama-8b finished")
    assert [received(one) for one in receiver.spans] == expected(told)
    assert {path for path, _, _ in receiver.requests} == {"/v1/traces"}
    assert 1 < len(receiver.requests) < 5
    sent = [one for trace in job_traces(told) for one in trace.spans]
    for span, one in zip(receiver.spans, sent, strict=True):
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (one.start_us * 1000, one.end_us * 1000)
        assert {each.key: each.value.string_value or each.value.int_value for each in span.attributes} == one.attributes
        assert (span.status.code, span.status.message) == ((2, one.error) if one.error else (0, ""))


def test_second_export_sends_the_same_spans(cli, receiver, write_log):
    place = write_log(EventLogBuilder().process_began(0).steps(0, 2, at=1).save(1, at=3, took=0.1).events)
    assert cli("goodput", place, "--otlp").code == cli("goodput", place, "--otlp", "--json").code == 0
    first, second = receiver.requests
    assert first[2] == second[2]
    assert [one.name for one in receiver.spans] == ["startup", "save", "save rank"] * 2


def test_standard_variables_apply(cli, receiver, write_log, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/own/path")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=research")
    place = write_log(EventLogBuilder().save(1, at=3, took=0.1).events)
    assert cli("goodput", place, "--otlp").code == 0
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llama")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    assert cli("goodput", place, "--otlp").code == 0
    default, named = receiver.resources
    assert default["service.name"] == "tieredckpt"
    assert (named["service.name"], named["deployment.environment.name"]) == ("llama", "test")
    assert {(path, headers["x-tenant"]) for path, headers, _ in receiver.requests} == {("/own/path", "research")}


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_SAMPLER", "always_off"), ("", "")]
)
def test_nothing_is_sent_unless_traces_are_enabled(cli, receiver, write_log, monkeypatch, name, value):
    place = write_log(EventLogBuilder().save(1, at=3, took=0.1).events)
    if name:
        monkeypatch.setenv(name, value)
        assert cli("goodput", place, "--otlp").err == "sent 0 spans\n"
    else:
        assert cli("goodput", place).err == ""
    assert receiver.requests == []


def test_sampler_drops_whole_traces(cli, receiver, write_log, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    told = SyntheticJob(steps=100, faults=0, resizes=0).events
    assert cli("goodput", write_log(told), "--otlp").code == 0
    sent = {trace for trace, *_ in map(received, receiver.spans)}
    assert 20 < len(sent) < 80
    assert [received(one) for one in receiver.spans] == [one for one in expected(told) if one[0] in sent]


def test_unreachable_receiver_is_an_error_after_the_report(cli, write_log, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    place = write_log(EventLogBuilder().save(1, at=3, took=0.1).events)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    said = cli("goodput", place, "--otlp", "--json")
    assert (said.code, said.json["live"]) == (1, True)
    assert said.err.splitlines()[-1] == "some spans were not sent: check $OTEL_EXPORTER_OTLP_ENDPOINT"


def test_watch_sends_each_trace_once_and_retries(cli, receiver, write_log, monkeypatch):
    """Between two readings of the log, the test changes the receiver and appends to the log."""
    now = time.time() - START
    told = EventLogBuilder().process_began(0).save(1, at=3, took=0.1).save(2, at=now, took=0.1)
    place, seen = write_log(told.events), []
    receiver.status = 400

    def next_reading(_):
        seen.append([one.name for one in receiver.spans])
        receiver.status = 200
        if len(seen) == 3:
            ended = ProcessEnded(START + now + 1, who="coordinator", how="finished")
            write_log([SaveEvent(1, 2, "staged", START + now, 0.2, 0), ended])

    monkeypatch.setattr(goodput.time, "sleep", next_reading)
    said = cli("goodput", place, "--otlp", "--watch")
    assert (said.code, said.out.startswith("job finished")) == (0, True)
    assert seen == [[], ["save", "save rank"], ["save", "save rank"]]
    assert [one.name for one in receiver.spans] == ["save", "save rank", "startup", "save", "save rank", "save rank"]
