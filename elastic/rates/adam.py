"""Adam and RMSprop for another batch: the square root rule of their SDE (Malladi et al. 2022). Pure.

For a batch κ times as large the optimizer goes on as it did, per sample, with::

    learning rate · √κ      1 - β → κ · (1 - β)      ε / √κ

The rule holds where gradients are mostly noise. It says nothing about decoupled weight decay, which is left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.errors import PolicyError

_ROUNDING = 1e-12


@dataclass(frozen=True)
class AdamScaling:
    """Adam's numbers for one batch."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def at(self, kappa: float) -> AdamScaling:
        """The same for a batch ``kappa`` times as large; or PolicyError that says how large it may be."""
        root = math.sqrt(checked(kappa))
        return AdamScaling(
            self.lr * root,
            scaled_beta("beta1", self.beta1, kappa),
            scaled_beta("beta2", self.beta2, kappa),
            self.eps / root,
        )


def checked(kappa: float) -> float:
    if not (math.isfinite(kappa) and kappa > 0):
        raise PolicyError(f"kappa is {kappa!r}: a batch is more than 0 times another")
    return kappa


def scaled_beta(name: str, beta: float, kappa: float) -> float:
    """``1 - κ(1 - β)``, where that is not below 0: an average cannot be shorter than one step."""
    if kappa == 1:
        return beta
    scaled = 1 - kappa * (1 - beta)
    if scaled < -_ROUNDING:
        raise PolicyError(
            f"{name} is {beta}, which the square root rule makes {scaled:.3g} for a batch {kappa:g} times as large: it "
            f"holds up to {1 / (1 - beta):.4g} times. Use a larger {name}, a smaller batch, or another rule"
        )
    return max(0.0, scaled)
