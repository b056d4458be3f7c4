"""The accelerators of this process, and the name of the first one."""

from __future__ import annotations

import torch

from tieredckpt.tensors.device import AcceleratorBackend, accelerator


def is_real() -> bool:
    """Whether this process has an accelerator."""
    device = accelerator()
    return isinstance(device, AcceleratorBackend) and device.device_count() > 0


def device_kind() -> str:
    """Return the kind of this process's accelerator as torch names it; "cpu" without one."""
    return accelerator().type if is_real() else "cpu"


def device_names() -> list[str]:
    """Return ``cuda:0`` and the others; an empty list without an accelerator."""
    device = accelerator()
    return [f"{device.type}:{index}" for index in range(device.device_count())] if is_real() else []


def model_name() -> str:
    """Return the product name of the first accelerator; empty without one."""
    if not is_real():
        return ""
    module = torch.get_device_module(accelerator().type)
    return str(module.get_device_name(0)) if hasattr(module, "get_device_name") else accelerator().type


def where() -> str:
    """Return the place that figures of this process name."""
    return f"{', '.join(device_names())} ({model_name()})" if is_real() else "CPU, no accelerator"
