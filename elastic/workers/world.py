"""What the train function is given: its place in this world, and the steps at whose boundaries the world may end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, SupportsFloat

from elastic.control.plane import Assignment, ControlPlane, Notice, Progress, Want
from elastic.errors import ElasticError, PolicyError, WorldChanged
from elastic.workers.finalizers import Call, Finalizers
from elastic.workers.gate import Gate, Way
from elastic.workers.losses import Losses
from elastic.workers.recording import Recording, recording
from tieredckpt.errors import TieredCheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from tieredckpt.checkpointer import Checkpointer
    from tieredckpt.live.keeping import Hydration
    from tieredckpt.null import NullCheckpointer

log = logging.getLogger(__name__)

Seal = Callable[[int], object]
"""Makes sure that the state after a step is safe; returns when it is."""
State = dict[str, Any]
_PATIENCE_S = 600.0
_KEPT_BACK = 0.2
"""Of the time left, what is kept for everything that comes after sealing."""


class World:
    """The ranks that train together now. Its groups are initialised; they end when the train function is left.

    ::

        with Checkpointer("tiered://job") as ckpt:
            for step in world.steps(ckpt.restore(state) + 1, total, checkpoint=(ckpt, state)):
                train_one_step()
                ckpt.save(state, step)
    """

    def __init__(
        self,
        assignment: Assignment,
        plane: ControlPlane,
        gate: Gate,
        *,
        record: Recording | None = None,
        losses: Losses | None = None,
    ) -> None:
        self._place = assignment
        self._record = record or recording()
        self._plane = plane
        self._gate = gate
        self._losses = losses or Losses("fault", 1, 0)
        self._finalizers = Finalizers()
        self._calls = 0
        self._steps_taken = False
        self._done = -1
        """How many steps are completed, once one was in this world: what comes before that is no step."""
        self.completed = 0
        """Steps completed, as far as :meth:`steps` was told."""
        self.ended: Notice | None = None
        """Why all ranks stopped at a common step; ``None`` while they have not."""
        self.is_sealed = False
        """Whether the step they stopped after is safe."""
        self.hydration: Hydration | None = None
        """After a fault: where the state comes from, ``live`` or ``snapshot``, and which step had been reached."""

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def size(self) -> int:
        return self._place.world_size

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def local_rank(self) -> int:
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        return self._place.local_world_size

    @property
    def node_rank(self) -> int:
        return self._place.node_rank

    @property
    def node_count(self) -> int:
        return self._place.node_count

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        import torch

        from tieredckpt.device import accelerator

        device = accelerator()
        if not device.count():
            return torch.device("cpu")
        return torch.device(device.type, self.local_rank % device.count())

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def step(self) -> int:
        """The step that is being done, as far as it is known here; -1 before the first."""
        return self.completed if self._steps_taken else self._calls - 1

    @property
    def restarts(self) -> int:
        """How many worlds ended by a fault so far."""
        return self._place.restarts

    @property
    def reason(self) -> str:
        """Why there is a new world; for people."""
        return self._place.reason

    def mesh(
        self, shape: Sequence[int] | None = None, names: Sequence[str] = ("dp",), *, device_type: str | None = None
    ) -> DeviceMesh:
        """A device mesh over all ranks. One entry of ``shape`` may be -1: what is left. Default: one dimension."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(
            device_type or self.device.type, fitted(self.size, shape or (-1,)), mesh_dim_names=tuple(names)
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def steps(
        self,
        first: int,
        total: int | None = None,
        *,
        checkpoint: tuple[Checkpointer | NullCheckpointer, State | Callable[[], State]] | None = None,
        seal: Seal | None = None,
    ) -> Iterator[int]:
        """The steps from ``first`` up to ``total``, or until this world ends.

        Between two steps costs a look at memory. When another world is wanted all ranks go on to the same step; then
        what it left is sealed, by ``checkpoint`` (and what its state is then) or by ``seal(step)``, and
        :class:`WorldChanged` leaves the train function through its ``with`` blocks.
        """
        if checkpoint is not None and seal is not None:
            raise PolicyError("steps(checkpoint=, seal=): one of the two seals, not both")
        if checkpoint is not None:
            seal = self._sealing(*checkpoint)
        self.completed = first
        while True:
            way = self._gate.enter(self.completed)
            if way is Way.LEAVE:
                raise WorldChanged(self._gate.why_broken)
            if total is not None and self.completed >= total:
                self._say(free=True)
                return
            if way is Way.STOP:
                self._stop(seal)
            self._steps_taken = True
            self._record.begins(self.completed)
            yield self.completed
            self._record.stepped(self.completed)
            if checkpoint is not None:
                _note(*checkpoint, self.completed)
            self.completed += 1
            self._done = self.completed
            self._say()

    def _say(self, *, free: bool = False) -> None:
        self._plane.progress(Progress(self._done, newest_sealed(), free))

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """In this block, an evaluation say, no rank is expected to get on: however long it takes, it does not hang."""
        self._say(free=True)
        try:
            yield
        finally:
            self._say()

    def check(self, loss: float | torch.Tensor, *, step: int | None = None, what: str = "the loss") -> bool:
        """Whether the gradients of this step may be used; asked after ``backward`` and before the optimizer steps.

        In a world that is known to be broken by then it raises, as a boundary between two steps does: what an aborted
        collective left in the gradients is not used. A loss that is not finite is what
        :class:`elastic.workers.loop.Policy` makes of it: a fault, by which all ranks drop the step and try it again,
        and in the end the job's, or a step that all ranks leave out: then all of them get False, and go on to the next
        step. ``step`` is the one of :meth:`steps`, where it is not given. The loss is read from its device, which takes
        as long as the device does.
        """
        return self._losses.check(max(0, self.step) if step is None else step, loss, what, ask=self.refuse_broken)

    def refuse_broken(self) -> None:
        """Raises :class:`WorldChanged` once this world is known to be broken: before anything of it is aborted."""
        if self._gate.why_broken is not None:
            raise WorldChanged(self._gate.why_broken)

    def on_leave(self, call: Call) -> Call:
        """Have ``call`` called when this world is left, whichever way; what was added last is called first.

        The process groups are still there, and may be broken.
        """
        return self._finalizers.add(call)

    def left(self) -> None:
        """The train function has been left: what it wanted to be called is."""
        self._finalizers.run()
        with suppress(ElasticError):  # nobody is there to be told
            self._say()

    def event_detected(self) -> bool:
        """Called once a step by all ranks: whether to save and leave, with the same answer for all of them.

        For loops that count steps themselves. Who gets True saves and returns from the train function.
        """
        if self.ended is not None:
            return True
        if self._calls > 0:
            self._record.stepped(self._record.next_step + self._calls - 1)
            self._done = self._calls
            self._say()
        way = self._gate.enter(self._calls)
        if way is Way.LEAVE:
            raise WorldChanged(self._gate.why_broken)
        if way is Way.ON:
            self._record.begins(self._record.next_step + self._calls)
            self._calls += 1
            return False
        self._record.stops()
        self.completed = self._calls
        self.ended = self._notice()
        return True

    def report(
        self, *, loss: SupportsFloat | None = None, tokens: int | None = None, samples: int | None = None
    ) -> None:
        """What is to be known of the step that runs, in the run's ledger. Tokens and samples are those of all ranks.

        Only the first rank's words count; on all others, and where there is no ledger, ``loss`` is not even looked at.
        """
        self._record.reports(loss, tokens, samples)

    def is_broken(self, within_s: float) -> bool:
        """Whether it is known by then that this world has lost a rank."""
        return self._gate.wait_broken(within_s)

    @property
    def seconds_left(self) -> float | None:
        """Until who has not stopped is stopped; ``None`` when nothing is wanted, or not in a hurry."""
        notice = self._plane.notice()
        return None if notice is None else notice.deadline_s

    def _stop(self, seal: Seal | None) -> None:
        self._record.stops()
        notice = self._notice()
        try:
            if self.completed > 0 and seal is not None:
                seal(self.completed - 1)
        except TieredCheckpointError as error:
            # An older step is whole: better to lose some than to keep a world that is to end.
            log.error("step %d could not be sealed before this world ended: %s", self.completed - 1, error)
            self.ended = notice
        else:
            self.ended = notice
            self.say_sealed()
        raise WorldChanged(notice.reason)

    def say_sealed(self) -> None:
        """Tell who runs the job that this rank may be asked to go from here on."""
        try:
            self._plane.sealed(self.completed)
            self.is_sealed = True
            self._record.sealed()
        except ElasticError as error:  # what comes next is the same
            log.warning("it was not heard that the state after %d steps is sealed: %s", self.completed, error)

    def _notice(self) -> Notice:
        return self._plane.notice() or Notice(self.epoch, Want.RESIZE, "asked to stop")

    def _sealing(self, ckpt: Checkpointer | NullCheckpointer, state: State | Callable[[], State]) -> Seal:
        def seal(step: int) -> None:
            notice = self._notice()
            left = notice.deadline_s
            patience_s = _PATIENCE_S if left is None else max(0.0, left * (1 - _KEPT_BACK))
            ckpt.seal(
                state() if callable(state) else state, step, durable=notice.want is Want.STOP, timeout_s=patience_s
            )

        return seal


def newest_sealed() -> int:
    """The newest step that this process has sealed, in any job; -1 for none."""
    session: Any = sys.modules.get("tieredckpt.session")
    return -1 if session is None else session.newest_sealed()


def _note(ckpt: Checkpointer | NullCheckpointer, state: State | Callable[[], State], step: int) -> None:
    """Also where the train function saves seldom. What is made by calling is noted by who saves, alone."""
    if not callable(state):
        ckpt.note(state, step)


def fitted(size: int, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with its -1 replaced so that it has ``size`` places."""
    known = 1
    for one in shape:
        known *= one if one != -1 else 1
    open_places = [at for at, one in enumerate(shape) if one == -1]
    if len(open_places) > 1 or known < 1 or any(one < 1 and one != -1 for one in shape):
        raise PolicyError(f"mesh {tuple(shape)}: sizes are at least 1, and at most one of them is -1")
    if size % known or (not open_places and known != size):
        raise PolicyError(f"mesh {tuple(shape)} does not fit {size} ranks")
    return tuple(size // known if one == -1 else one for one in shape)
