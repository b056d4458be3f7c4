"""LRScaler: an optimizer's hyperparameters, scaled only during its step.

Between steps they have the values of the schedule. So any scheduler works unchanged, even if it derives each value from
the previous one. Nothing is multiplied twice or divided again.
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
    """Scaler of one optimizer's learning rate, and of betas and epsilon with ``AdamSqrtLRRule``.

    ``param_groups`` and the scheduler's ``get_last_lr()`` show the schedule; :attr:`learning_rates` has the values of a
    step. A checkpoint needs this object's state in addition to the states of the optimizer and the scheduler. After a
    load into another batch or world, the factor moves from the saved one to the current one.
    """

    def __init__(
        self, optimizer: Optimizer, rule: LRRule, *, global_batch: int, world_size: int, rewarm: Rewarmup | None = None
    ) -> None:
        if any(isinstance(getattr(hook, "__self__", None), LRScaler) for hook in _hooks(optimizer)):
            raise PolicyError("this optimizer's learning rate is scaled already: close the other LRScaler first")
        self._optimizer = optimizer
        self._rule = rule
        self._rewarm = rewarm or Rewarmup()
        self._scaled_groups: list[_ScaledGroup] | None = None
        self._scale = self._checked(rule.scale(global_batch, world_size))
        self._ramp = WarmupRamp(self._scale.lr)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(self._restore),
            optimizer.register_load_state_dict_post_hook(self._drop_saved_values),
        ]
        # A scheduler that runs as such a hook must see its own learning rate.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]

    def resize(self, global_batch: int, world_size: int) -> None:
        """Use another batch or world from the next step. Raises :class:`PolicyError` without a change."""
        self._scale = self._checked(self._rule.scale(global_batch, world_size))
        self._ramp = self._ramp.towards(self._scale.lr, self._rewarm)

    @property
    def factor(self) -> float:
        """Factor of the next step's learning rates."""
        return self._ramp.factor

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the next step, one per parameter group."""
        factor = self.factor if self._scaled_groups is None else 1.0
        return [float(group["lr"]) * factor for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return self._ramp.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ramp = WarmupRamp.from_state_dict(state).towards(self._scale.lr, self._rewarm)

    def close(self) -> None:
        """Remove the hooks and restore the optimizer. Idempotent."""
        self._restore(self._optimizer)
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
        self._restore(self._optimizer)
        for group in self._optimizer.param_groups:
            _ScaledGroup(group, scale.lr, scale.kappa)
        return scale

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        self._restore(optimizer)  # after a step that raised, or in a step that calls the step it overrides
        groups = [_ScaledGroup(group, self.factor, self._scale.kappa) for group in optimizer.param_groups]
        self._scaled_groups = groups
        for one in groups:
            one.apply()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if self._scaled_groups is None:
            return
        self._restore(optimizer)
        # torch.distributed.checkpoint creates the optimizer's state by a step with learning rate 0, which does not
        # count.
        if self._ramp.is_warming_up and any(float(group["lr"]) for group in optimizer.param_groups):
            self._ramp = self._ramp.next()

    def _restore(self, _: Optimizer) -> None:
        for one in self._scaled_groups or ():
            one.restore()
        self._scaled_groups = None

    def _drop_saved_values(self, _: Optimizer) -> None:
        """Drop the saved values: the optimizer has loaded other ones, during a step that did not end."""
        self._scaled_groups = None


class _ScaledGroup:
    """Hyperparameters of one parameter group: the values of the schedule, and those of a step."""

    def __init__(self, group: dict[str, Any], factor: float, kappa: float) -> None:
        self._group = group
        self._original: dict[str, Any] = {}
        self._scaled: dict[str, Any] = {}
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
        self._original[name] = plain.clone() if isinstance(plain, Tensor) else plain
        self._scaled[name] = value

    def apply(self) -> None:
        self._write(self._scaled)

    def restore(self) -> None:
        self._write(self._original)

    def _write(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(self._group[name], Tensor):
                self._group[name].copy_(value)  # compiled and captured steps refer to this tensor
            else:
                self._group[name] = value


def _hooks(optimizer: Optimizer) -> list[Any]:
    return list(optimizer._optimizer_step_pre_hooks.values())
