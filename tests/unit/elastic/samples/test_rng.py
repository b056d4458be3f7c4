# ruff: noqa: NPY002 - what people have in their datasets
import random

import numpy as np
import pytest
import torch

from elastic.samples import rng
from elastic.samples.rng import microbatch_generator, preserved_rng, sample_key, seeded
from tieredckpt.tensors.device import CpuBackend, accelerator, use_device_backend


def drawn(count=3):
    return (
        torch.rand(count).tolist(),
        torch.randn(count).tolist(),
        [random.random() for _ in range(count)],
        [random.gauss(0, 1) for _ in range(count)],
        np.random.rand(count).tolist(),
        np.random.randn(count).tolist(),
        np.random.randint(1 << 30, size=count).tolist(),
    )


def inside(*key):
    with seeded(*key):
        return drawn()


@pytest.fixture(autouse=True)
def _generators():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_draws_depend_only_on_the_key():
    found = inside(1, 2, 3)
    drawn(7)
    assert inside(1, 2, 3) == found


@pytest.mark.parametrize("key", [(2, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 0), (1, 23, 0), (-1, 2, 3), (1, 3, 2)])
def test_every_part_of_the_key_counts(key):
    assert all(one != other for one, other in zip(inside(*key), inside(1, 2, 3), strict=True))


def test_dropout_is_the_same_on_any_rank():
    layer = torch.nn.Dropout(0.5)
    batch = torch.ones(4, 100)
    with seeded(0, 7, 16):
        first = layer(batch)
    torch.rand(5)
    with seeded(0, 7, 16):
        assert torch.equal(layer(batch), first)
    with seeded(0, 7, 24):
        assert not torch.equal(layer(batch), first)


@pytest.mark.parametrize("leave", ["normally", "by an error"])
def test_generators_continue_after_the_block(leave):
    expected = (drawn(2), drawn(4))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert drawn(2) == expected[0]
    if leave == "normally":
        inside(1, 2, 3)
    else:
        with pytest.raises(KeyError), seeded(1, 2, 3):
            raise KeyError(drawn())
    assert drawn(4) == expected[1]


def test_of_a_pair_of_normal_numbers_of_numpy_the_second_is_forgotten():
    whole = np.random.randn(4)
    np.random.seed(1)
    assert np.random.randn(1) == whole[:1]
    inside(1, 2, 3)
    assert np.random.randn(2).tolist() == whole[2:].tolist()


def test_blocks_may_be_in_blocks():
    with seeded(1, 2, 3):
        whole = drawn(2), drawn(2)
    with seeded(1, 2, 3):
        first = drawn(2)
        with seeded(4, 5, 6):
            inner = drawn()
        assert (first, drawn(2)) == whole
    assert inner == inside(4, 5, 6)


def test_generator_changes_stay_inside_the_block():
    expected = drawn(4)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with preserved_rng():
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
    assert drawn(4) == expected


def test_current_device_rng_is_set_and_restored():
    devices = torch.Generator(), torch.Generator()  # these stand in for two devices

    class Two(CpuBackend):
        def is_initialized(self):
            return True

        def default_generator(self):
            return devices[1]

    with use_device_backend(Two()):
        _is_set_and_put_back(devices)


def _is_set_and_put_back(devices):
    before = [one.get_state() for one in devices]
    found = []
    for _ in range(2):
        with seeded(1, 2, 3):
            assert torch.equal(devices[0].get_state(), before[0])
            found.append(torch.rand(3, generator=devices[1]).tolist())
            found.append(torch.rand(3).tolist())
    assert found[:2] == found[2:]
    assert all(torch.equal(one.get_state(), state) for one, state in zip(devices, before, strict=True))


@pytest.mark.skipif(not accelerator().device_count(), reason="no accelerator")
def test_dropout_on_a_device_is_the_same_on_any_rank():
    place = accelerator().current()
    torch.rand(1, device=place)
    state = accelerator().default_generator().get_state()
    batch, layer, found = torch.ones(1000, device=place), torch.nn.Dropout(0.5), []
    for _ in range(2):
        with seeded(1, 2, 3):
            found.append(layer(batch))
    assert torch.equal(*found)
    assert torch.equal(accelerator().default_generator().get_state(), state)


def test_microbatch_generator_leaves_the_global_rng_alone():
    before = torch.get_rng_state()
    one, same, other = microbatch_generator(1, 2, 3), microbatch_generator(1, 2, 3), microbatch_generator(1, 2, 4)
    first = torch.rand(5, generator=one)
    assert torch.equal(first, torch.rand(5, generator=same))
    assert not torch.equal(first, torch.rand(5, generator=other))
    assert torch.equal(torch.get_rng_state(), before)


def test_microbatches_and_samples_have_numbers_of_their_own():
    with preserved_rng():
        rng.seed_generators(sample_key(1, 2, 3))
        sample = drawn()
    assert all(one != other for one, other in zip(sample, inside(1, 2, 3), strict=True))
