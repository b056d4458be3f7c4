"""Training loop: data, exact gradients, optimizer, learning rate and checkpoints, in order.

::

    loop = elastic.Loop(world, model, optimizer, dataset, global_batch=24, microbatch=2, checkpoint="tiered://example")
    for step in loop.until(1000):
        for x, y in step:                                         # this rank's microbatches, on its device
            step.backward(loss_sum(model(x), y), weight=len(x))
        print(step.number, step.loss)

A step ends at the end of the loop's body, or when the body reads its loss. Then the loop sums and clips the
gradients of all ranks, steps the optimizer and the schedule, commits the samples, and saves the state. In this order, a
fault at any point neither loses nor repeats a sample.

The loop composes :meth:`World.steps <elastic.World.steps>`, :class:`elastic.ElasticDataLoader`,
:class:`elastic.ExactGradients`, :class:`elastic.seeded`, :class:`elastic.LRScaler` and
:class:`tieredckpt.Checkpointer`. A script that needs another order uses these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map_only

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.batch_scaling.lr_rules import LRRule, Rewarmup
from elastic.batch_scaling.lr_scaler import LRScaler
from elastic.errors import PolicyError, StepOrderError
from elastic.gradients.exact_gradients import ExactGradients, StepTotal
from elastic.gradients.reduction import MicrobatchPass
from elastic.samples.data_loader import DataStep, ElasticDataLoader
from elastic.samples.rng import seeded
from elastic.workers.world_handle import World
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.null_checkpointer import NullCheckpointer

_OWN_ENTRIES = ("model", "optim", "data", "schedule", "lr")
_OWN_OPTIONS = ("epochs", "epoch_end")


class Loop:
    """Training loop of one world: it restores on construction, and saves at the end of each step."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        global_batch: int,
        microbatch: int,
        checkpoint: str | os.PathLike[str] | Checkpointer | NullCheckpointer | None = None,
        every: int | None = None,
        durable: str | None = None,
        durable_every: int | None = None,
        state: Mapping[str, Any] | None = None,
        clip: float | None = None,
        schedule: LRScheduler | None = None,
        lr_rule: LRRule | None = None,
        rewarm: Rewarmup | None = None,
        seed: int = 0,
        tree: bool = True,
        **loader: Any,
    ) -> None:
        """Restore the newest step of ``checkpoint``; all ranks call this with the same arguments.

        ``model`` is a plain module, or one wrapped by DDP or ``fully_shard``. ``global_batch`` is the number of
        samples of a step, and ``microbatch`` that of a forward pass. Neither depends on the world, and a rank may have
        no microbatch in a step.

        ``checkpoint`` is the target of a :class:`tieredckpt.Checkpointer` with ``every``, ``durable`` and
        ``durable_every``. It can also be a checkpointer, which the caller closes: its ``wait()`` or ``close()`` seals
        the last step. ``None`` saves nothing. ``state`` has further entries to save and restore, for example
        ``{"random": elastic.RNGState()}``.

        ``clip`` is the maximum norm of the gradients. ``schedule`` steps once per step. ``lr_rule`` and ``rewarm`` are
        those of :class:`elastic.LRScaler`. ``seed`` determines the order of the samples and the random numbers of each
        microbatch. With ``tree``, losses and parameters are bitwise independent of the number of ranks. All other
        arguments are those of :class:`elastic.ElasticDataLoader`, for example ``num_workers``.

        Raises :class:`~elastic.errors.PolicyError` for arguments that contradict each other, and every error of
        :meth:`tieredckpt.Checkpointer.restore`.
        """
        _check_arguments(checkpoint, state, loader, every=every, durable=durable, durable_every=durable_every)
        self._world = world
        self._optimizer = optimizer
        self._dataset_seed = seed
        self._clip = clip
        self._schedule = schedule
        self._plan = BatchPlan(global_batch, world.size, microbatch=microbatch, allow_idle=True).for_rank(world.rank)
        self._open = ExitStack()
        self._is_closed = False
        try:
            self._data = self._open.enter_context(ElasticDataLoader(dataset, self._plan, seed=seed, **loader))
            self._gradients = ExactGradients(model, tree=tree)
            self._state: dict[str, Any] = {"model": model, "optim": optimizer, "data": self._data, **(state or {})}
            if schedule is not None:
                self._state["schedule"] = schedule
            if lr_rule is not None:
                self._state["lr"] = self._open.enter_context(
                    LRScaler(optimizer, lr_rule, global_batch=global_batch, world_size=world.size, rewarm=rewarm)
                )
            if checkpoint is None:
                self._checkpointer: Checkpointer | NullCheckpointer = NullCheckpointer()
            elif isinstance(checkpoint, Checkpointer | NullCheckpointer):
                self._checkpointer = checkpoint
            else:
                self._checkpointer = self._open.enter_context(
                    Checkpointer(checkpoint, every=every, durable=durable, durable_every=durable_every)
                )
            self.first = self._checkpointer.restore(self._state) + 1
            """The first step that :meth:`until` does; 0 if nothing was restored."""
        except BaseException:
            self._open.close()
            raise
        world.add_cleanup(self.close)

    @property
    def checkpointer(self) -> Checkpointer | NullCheckpointer:
        """The checkpointer of this loop, for example for ``last_restore``."""
        return self._checkpointer

    def until(self, total: int) -> Iterator[LoopStep]:
        """Yield each step from :attr:`first` up to ``total`` steps, and end it after the loop's body.

        The last step is saved regardless of ``every``, and uploaded if a durable tier exists. When the world is about
        to change, all ranks stop after the same step; its state is sealed, and :class:`WorldChanged` leaves the train
        function. ``break`` drops the current step, unless its loss was read before. The loop closes at the end: another
        call raises :class:`~elastic.errors.StepOrderError`.
        """
        if self._is_closed:
            raise StepOrderError("this Loop is closed: construct another one to do more steps")
        try:
            for number in self._world.steps(self.first, total, checkpoint=(self._checkpointer, self._state)):
                step = LoopStep(self, number, is_last=number + 1 == total)
                yield step
                step.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Close the data workers and the checkpointer that this loop made. Idempotent; the world calls it too."""
        self._is_closed = True
        self._open.close()

    def _batch_of_idle_rank(self) -> Any:
        """Return samples for the empty passes of a rank without a microbatch; they have no weight."""
        return self._data.collate_samples(
            range(min(self._plan.batch_plan.microbatch_size, self._data.schedule.order.samples))
        )

    def _save(self, step: int, *, is_last: bool) -> None:
        ckpt = self._checkpointer
        durable = is_last and isinstance(ckpt, Checkpointer) and bool(ckpt.settings.durable.url)
        ckpt.save(self._state, step, force=is_last, durable=durable)


class LoopStep:
    """One step of a :class:`Loop`.

    The caller iterates over its microbatches and calls :meth:`backward` for each of them.
    """

    def __init__(self, loop: Loop, number: int, *, is_last: bool) -> None:
        self.number = number
        """Number of this step, counted from 0 over all runs of the job."""
        self._loop = loop
        self._is_last = is_last
        self._data: DataStep | None = None
        self._pass: MicrobatchPass | None = None
        self._has_all_gradients = False
        self._total: StepTotal | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's microbatches, on its device and with the random generators set for each of them."""
        if self._data is not None:
            raise StepOrderError(f"the microbatches of step {self.number} were iterated before")
        loop = self._loop
        self._data = data = next(iter(loop._data))
        device = loop._world.device
        unread = iter(data)
        position, batch = -1, None
        if not len(data):
            position, batch = 0, loop._batch_of_idle_rank()
        for one in loop._gradients.step(loop._plan):
            while position < one.position:
                position, batch = position + 1, next(unread).data
            self._pass = one
            with seeded(loop._dataset_seed, self.number, one.id):
                yield tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
        self._pass = None
        self._has_all_gradients = True

    def backward(
        self, loss: torch.Tensor, *, weight: torch.Tensor | float, reduction: Literal["sum", "mean"] = "sum"
    ) -> None:
        """Add the gradients of ``loss``: a sum or a mean over ``weight`` samples or tokens of this microbatch.

        The step's loss and gradients are those of the mean over all samples of all ranks. Call it once per microbatch.
        """
        if self._pass is None:
            raise StepOrderError(f"backward() of step {self.number} was called outside of its loop over microbatches")
        self._pass.backward(loss * weight if reduction == "mean" else loss, weight=weight)

    def finish(self) -> StepTotal:
        """End this step on all ranks, unless it has ended, and return its loss, weight and gradient norm.

        Every rank ends each step, at the latest after the loop's body. Change entries of ``state`` before this call,
        which saves them. Raises :class:`~elastic.errors.StepOrderError` before the last microbatch.
        """
        if self._total is not None:
            return self._total
        if self._data is None or not self._has_all_gradients:
            raise StepOrderError(
                f"step {self.number} ended before all its microbatches had a backward(): iterate over the step without "
                "a break, and read its loss after that"
            )
        loop = self._loop
        total = loop._gradients.finish(clip=loop._clip)
        loop._optimizer.step()
        if isinstance(loop._schedule, ReduceLROnPlateau):
            loop._schedule.step(total.loss)
        elif loop._schedule is not None:
            loop._schedule.step()
        self._data.commit()
        loop._world.report(loss=total.loss, samples=self._data.samples)
        loop._save(self.number, is_last=self._is_last)
        self._total = total
        return total

    @property
    def loss(self) -> float:
        """Mean loss over the whole step, the same on every rank. Reading it ends the step (:meth:`finish`)."""
        return self.finish().loss

    @property
    def data(self) -> DataStep:
        """This rank's share of the samples, available once the caller iterates over the microbatches."""
        if self._data is None:
            raise StepOrderError(f"the microbatches of step {self.number} were not iterated yet")
        return self._data


def _check_arguments(
    checkpoint: object, state: Mapping[str, Any] | None, loader: Mapping[str, Any], **saving: object
) -> None:
    """Raise :class:`PolicyError` for arguments that would be ignored or would break the order of steps."""
    taken = [name for name in _OWN_ENTRIES if name in (state or {})]
    if taken:
        raise PolicyError(f"state has {', '.join(map(repr, taken))}: Loop saves these entries itself, use other names")
    given = [f"{name}=" for name, value in saving.items() if value is not None]
    if given and not isinstance(checkpoint, str | os.PathLike):
        raise PolicyError(f"{', '.join(given)} need checkpoint= to be a target, such as 'tiered://example'")
    fixed = [f"{name}=" for name in _OWN_OPTIONS if name in loader]
    if fixed:
        raise PolicyError(
            f"{', '.join(fixed)} cannot be set here: every step of a Loop has a whole global batch. "
            "Compute the number of steps for until()"
        )
