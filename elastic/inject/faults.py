"""Several faults, said one after the other. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from elastic.inject import reading, scattering
from elastic.inject.plan import Injection, Kind, Phase, checked


class Faults:
    """What is to happen to a job. Never changed in place: each call answers with a longer one.

    ::

        Faults().at(step=30, rank=1).sigkill().at(step=40, node="n0", phase="seal").node()
        Faults().at(step=30, rank=1).sigkill().then(phase="recovery", rank=0).exception()
        Faults(seed=7).scattered(100, ranks=4, first=10, gap=3)
    """

    def __init__(self, seed: int = 0, injections: tuple[Injection, ...] = ()) -> None:
        self.seed = seed
        self.injections = checked(injections)

    def at(self, **when: Any) -> Spot:
        """A moment and a place: ``step``, ``phase``, ``after_s``; ``rank``, ``node``, ``local_rank``."""
        return Spot(self, when)

    def then(self, **when: Any) -> Spot:
        """The same, and not before the last one that was said has happened."""
        return Spot(self, {"then": self.injections[-1].name, **when} if self.injections else when)

    def scattered(self, count: int, **how: Any) -> Faults:
        """As many more, drawn by the seed: see :func:`elastic.inject.scattering.scattered`."""
        return Faults(self.seed, self.injections + scattering.scattered(self.seed, count, **how))

    def encode(self) -> str:
        return msgspec.json.encode(self.injections).decode()

    def environ(self) -> dict[str, str]:
        """What to put into the environment of ``elastic run``. Very many do not fit there: write them to a file."""
        return {reading.INJECT: self.encode()}


class Spot:
    """A moment and a place at which something is to happen."""

    def __init__(self, faults: Faults, when: dict[str, Any]) -> None:
        self._faults = faults
        self._when = when

    def be(self, kind: Kind, **more: Any) -> Faults:
        values = {**self._when, **more}
        if "phase" in values and not isinstance(values["phase"], Phase):
            values["phase"] = reading.phase_of(values["phase"])
        one = Injection(kind=kind, **values)
        return Faults(self._faults.seed, (*self._faults.injections, one))

    def sigkill(self) -> Faults:
        return self.be(Kind.SIGKILL)

    def sigstop(self) -> Faults:
        return self.be(Kind.SIGSTOP)

    def exception(self) -> Faults:
        return self.be(Kind.EXCEPTION)

    def segfault(self) -> Faults:
        return self.be(Kind.SEGFAULT)

    def gil(self) -> Faults:
        return self.be(Kind.GIL)

    def hang(self) -> Faults:
        return self.be(Kind.HANG)

    def oom(self) -> Faults:
        return self.be(Kind.OOM)

    def node(self) -> Faults:
        return self.be(Kind.NODE)

    def agent(self) -> Faults:
        return self.be(Kind.AGENT)

    def slow(self, seconds: float | None = None, times: int | None = None) -> Faults:
        return self.be(Kind.SLOW, seconds=seconds, times=times)

    def partition(self, seconds: float | None = None) -> Faults:
        return self.be(Kind.PARTITION, seconds=seconds)

    def nan(self) -> Faults:
        return self.be(Kind.NAN)
