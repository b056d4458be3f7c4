"""Exit statuses of stopped processes, and when an elastic event is detected."""

from __future__ import annotations

import signal

import pytest

from integration.hyperpod import elastic_events
from integration.hyperpod.elastic_agent.stop_signal import GroupSignalListener
from integration.hyperpod.elastic_events import NOT_RELEASED, ExitAfterStop, elastic_event_detected


def test_process_without_a_stop_exits_normally():
    assert ExitAfterStop(GroupSignalListener(), 0.0).status() is None


def test_stopped_process_exits_cleanly_only_after_its_agent_asked():
    asked = GroupSignalListener()
    leaving = ExitAfterStop(asked, 0.0)
    leaving.stopped = True
    assert leaving.status() == NOT_RELEASED != 0
    asked.received.set()
    assert leaving.status() is None


def test_import_without_an_agent_has_no_effect():
    assert elastic_events._leaving == []
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("mode", ["", "disabled", "wrong"])
def test_no_event_is_detected_without_signal_coordination(monkeypatch, mode):
    monkeypatch.setenv("HYPERPOD_SIGNAL_COORDINATION", mode)
    assert not elastic_event_detected()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_other_signals_are_not_elastic_events(monkeypatch):
    monkeypatch.setenv("HYPERPOD_SIGNAL_COORDINATION", "distributed")
    assert not elastic_event_detected(signal.SIGUSR2)
