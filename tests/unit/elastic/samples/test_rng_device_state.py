"""A rank's device generator state is saved and restored in a new process."""

from __future__ import annotations

import torch

from elastic.samples.rng import RNGState
from tieredckpt.tensors.device import CpuBackend, use_device_backend


class Drawing(CpuBackend):
    """A device whose generator state is as small as a GPU's; the CPU's is too large."""

    def __init__(self, drawn: int, *, is_used: bool = True) -> None:
        self.state, self.is_used = torch.full((16,), drawn, dtype=torch.uint8), is_used

    def is_initialized(self):
        return self.is_used

    def default_generator(self):
        return self

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state.clone()


def test_a_device_s_generator_is_saved_and_set_again():
    with use_device_backend(Drawing(7)):
        saved = RNGState().state_dict()
    with use_device_backend(Drawing(0, is_used=False)) as device:
        RNGState().load_state_dict(saved)
        assert device.state.tolist() == [7] * 16


def test_device_rng_is_neither_saved_nor_set_without_a_device():
    saved = RNGState().state_dict()
    with use_device_backend(Drawing(3)) as device:
        RNGState().load_state_dict(saved)
        assert device.state.tolist() == [3] * 16
