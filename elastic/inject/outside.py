"""A supervisor's half: what can be done to a rank, or to a whole node, whatever the rank is doing."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.control.seats import Seats
from elastic.inject import deeds
from elastic.inject.plan import Injection, Kind, Place
from elastic.inject.record import Record, told
from elastic.inject.telling import tell

log = logging.getLogger(__name__)


def strike(
    injection: Injection, seats: Seats, running: Mapping[str, Any], *, run: Path, environ: Mapping[str, str]
) -> bool:
    """Have it happen to the rank of this node that it is meant for. False while that one is just being replaced."""
    for process in seats.seated():
        seat = process.seat or 0
        place = Place(seats.rank_of(seat), seats.node, seat)
        if not injection.is_at(place) or process.token not in running:
            continue
        happens = told(injection, place)
        if not Record(run).claim(happens):
            return True
        log.warning("injected from outside at rank %d: %s", place.rank, injection)
        tell(happens)
        if injection.kind is Kind.PARTITION:
            seats.cut(injection.lasts_s)
        elif injection.kind is Kind.NODE:
            deeds.lose_node(os.getpid(), environ)
        elif injection.kind is Kind.AGENT:
            deeds.lose_agent(environ)
        else:
            running[process.token].signal(getattr(signal, injection.kind.name))
        return True
    return False
