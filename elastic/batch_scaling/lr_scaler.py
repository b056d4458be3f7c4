"""LRScaler: an optimizer's hyperparameters, scaled only during its step.

Between steps they are what schedules made them, so that any scheduler goes on as if nobody else were there, also those
that derive each value from the one before. Nothing is multiplied twice, and nothing has to be divided again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elastic.batch_scaling.lr_rules import LRRule, LRScale, Rewarmup, WarmupRamp, scaled_beta, validated_kappa
from elastic.errors import PolicyError


class LRScaler:
    """Scales one optimizer's learning rate (with :class:`~elastic.batch_scaling.lr_rules.AdamSqrtLRRule` betas and
    epsilon too).

    ``param_groups`` and the scheduler's ``get_last_lr()`` keep showing the schedule; :attr:`learning_rates` is what
    a step uses. A checkpoint needs this object's state beside the optimizer's and the scheduler's. Made for another
    batch or world than the state that is loaded, it goes on from there to where it is now.
    """

    def __init__(
        self, optimizer: Optimizer, rule: LRRule, *, global_batch: int, world_size: int, rewarm: Rewarmup | None = None
    ) -> None:
        if any(isinstance(getattr(hook, "__self__", None), LRScaler) for hook in _hooks(optimizer)):
            raise PolicyError("this optimizer's learning rate is scaled already: close the other LRScaler first")
        self._optimizer = optimizer
        self._rule = rule
        self._rewarm = rewarm or Rewarmup()
        self._held: list[_Held] | None = None
        self._scale = self._checked(rule.scale(global_batch, world_size))
        self._ramp = WarmupRamp(self._scale.lr)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(self._put_back),
            optimizer.register_load_state_dict_post_hook(self._forget),
        ]
        # A scheduler that runs as such a hook itself is to see its own learning rate.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]

    def resize(self, global_batch: int, world_size: int) -> None:
        """From the next step on there is another batch or world; or PolicyError, and nothing has changed."""
        self._scale = self._checked(self._rule.scale(global_batch, world_size))
        self._ramp = self._ramp.towards(self._scale.lr, self._rewarm)

    @property
    def factor(self) -> float:
        """What the next step's learning rates are multiplied by."""
        return self._ramp.factor

    @property
    def learning_rates(self) -> list[float]:
        """What the next step uses, for each parameter group."""
        factor = self.factor if self._held is None else 1.0
        return [float(group["lr"]) * factor for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return self._ramp.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ramp = WarmupRamp.from_state_dict(state).towards(self._scale.lr, self._rewarm)

    def close(self) -> None:
        """Leave the optimizer as if this had never been. Idempotent."""
        self._put_back(self._optimizer)
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> LRScaler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, scale: LRScale) -> LRScale:
        if not (math.isfinite(scale.lr) and scale.lr >= 0):
            raise PolicyError(f"the rule multiplies the learning rate by {scale.lr!r}: it must be a number, 0 or more")
        self._put_back(self._optimizer)
        for group in self._optimizer.param_groups:
            _Held(group, scale.lr, scale.kappa)
        return scale

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        self._put_back(optimizer)  # a step that raised, or one that calls the step it overrides
        held = [_Held(group, self.factor, self._scale.kappa) for group in optimizer.param_groups]
        self._held = held
        for one in held:
            one.change()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if self._held is None:
            return
        self._put_back(optimizer)
        # With a learning rate of 0 torch makes an optimizer's state (torch.distributed.checkpoint); that is no step.
        if self._ramp.is_warming_up and any(float(group["lr"]) for group in optimizer.param_groups):
            self._ramp = self._ramp.next()

    def _put_back(self, _: Optimizer) -> None:
        for one in self._held or ():
            one.put_back()
        self._held = None

    def _forget(self, _: Optimizer) -> None:
        """What was held is of a step that did not end, and the optimizer has other values now."""
        self._held = None


class _Held:
    """One parameter group's numbers as the schedule has them, and those of a step."""

    def __init__(self, group: dict[str, Any], factor: float, kappa: float) -> None:
        self._group = group
        self._plain: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        if factor != 1:
            self._set("lr", group["lr"] * factor)
        if validated_kappa(kappa) != 1:
            if "eps" not in group or not ("betas" in group or "alpha" in group):
                raise PolicyError(
                    "AdamSqrtLRRule scales betas and eps, this optimizer has none: use SqrtLRRule or LinearLRRule"
                )
            if "betas" in group:
                pairs = enumerate(group["betas"], start=1)
                self._set("betas", tuple(scaled_beta(f"beta{n}", beta, kappa) for n, beta in pairs))
            else:
                self._set("alpha", scaled_beta("alpha", group["alpha"], kappa))
            self._set("eps", group["eps"] / kappa**0.5)

    def _set(self, name: str, value: Any) -> None:
        plain = self._group[name]
        self._plain[name] = plain.clone() if isinstance(plain, Tensor) else plain
        self._new[name] = value

    def change(self) -> None:
        self._write(self._new)

    def put_back(self) -> None:
        self._write(self._plain)

    def _write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(self._group[name], Tensor):
                self._group[name].copy_(value)  # compiled and captured steps know this tensor, and no other
            else:
                self._group[name] = value


def _hooks(optimizer: Optimizer) -> list[Any]:
    return list(optimizer._optimizer_step_pre_hooks.values())
