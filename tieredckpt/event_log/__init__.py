"""The event log of a run: one file of JSON lines per process. No torch."""

from tieredckpt.event_log.log_reader import EventLogContents, read_event_log
from tieredckpt.event_log.log_writer import (
    EVENT_LOG_ENV,
    EventLog,
    EventLogWriter,
    NullEventLog,
    event_log_from_environ,
)

__all__ = [
    "EVENT_LOG_ENV",
    "EventLog",
    "EventLogContents",
    "EventLogWriter",
    "NullEventLog",
    "event_log_from_environ",
    "read_event_log",
]
