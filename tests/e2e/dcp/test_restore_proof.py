"""A restore compares the live state with the saved state and detects every difference."""

import copy
import itertools
import logging
import random
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from peerstore.shard_records import CHUNK_BYTES
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tests.support.models import build_model, full_state, get_state, set_state, train_steps
from tests.support.oldest_torch import replicas_on_gloo
from tests.support.stores import pinned_file
from tieredckpt import Checkpointer, TieredReader
from tieredckpt.errors import CheckpointDamagedError, RestoreProofError
from tieredckpt.restore.verified_copy import ShardFile, read_shard
from tieredckpt.restore.verified_reads import PinnedShards
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings
from tieredckpt.tensors.slot_copy import Copier, memory_at_address

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://proof"


def saved(state, step=1):
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        ckpt.save(state, step).wait()


def restored(state, **how):
    with Checkpointer(JOB, on_sigterm="ignore", proof=how.pop("proof", None)) as ckpt:
        ckpt.restore(state, **how)
        return ckpt.last_restore.proof


def unnoticed(state):
    """Check that the same restore without the proof raises no error."""
    assert restored(copy.deepcopy(state), proof=False) is None


class Told:
    """A ``Stateful`` that returns a copy of its values, and loads a state with ``takes``."""

    def __init__(self, values, takes=lambda own, state: own.update(state)):
        self.values = values
        self.takes = takes

    def state_dict(self):
        return copy.deepcopy(self.values)

    def load_state_dict(self, state):
        self.takes(self.values, state)


def trained(seed, steps=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(steps):
        model(torch.randn(8, 40)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {"model": model, "optim": optimizer, "schedule": schedule, "cursor": {"seen": 16 * steps}}


# -- states that are restored correctly ----------------------------------------------------------------------------


def test_restore_reports_how_much_was_compared(agent_dir, caplog):
    state = trained(1)
    saved(state)
    fresh = trained(2, steps=0)
    with caplog.at_level(logging.INFO):
        proof = restored(fresh)
    everything = [*state["model"].state_dict().values()]
    everything += [one for moments in state["optim"].state.values() for one in moments.values()]
    assert proof.size_bytes == sum(one.nbytes for one in everything)
    assert proof.objects > 5
    assert not proof.not_compared
    assert 0 < proof.share < 1
    (line,) = [r.getMessage() for r in caplog.records if "restored step 1" in r.getMessage()]
    assert f"{proof.objects} objects of the live state are what was saved" in line
    assert "of the restore)" in line
    assert_same_bits(state["model"].state_dict(), fresh["model"].state_dict())


FORMS = {
    "plain": lambda t: t,
    "strided": lambda t: t.t().contiguous().t(),
    "half": lambda t: t.bfloat16(),
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "sparse": lambda t: t.relu().to_sparse(),
    "rows": lambda t: t.relu().to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("size", [1, 1000, 3 * CHUNK_BYTES + 17])
def test_tensors_of_all_sizes_and_layouts_are_verified(agent_dir, size):
    forms = {k: v for k, v in FORMS.items() if size < CHUNK_BYTES or k in ("plain", "strided", "half")}
    state = {f"{name}{n}": form(torch.randn(n + 1, size)) for name, form in forms.items() for n in range(2)}
    state |= {"none": torch.zeros(0, 3), "one": torch.tensor(3.0)}
    saved(state)
    found = zeros_like_state(state)
    proof = restored(found)
    assert_same_bits(state, found)
    assert proof.size_bytes == sum(one.numel() * one.itemsize for one in state.values())
    assert not proof.not_compared


def test_tied_weights_pass_the_restore_proof(agent_dir):
    weight = torch.randn(100, 30)
    saved({"embed": weight, "head": weight})
    fresh = torch.zeros(100, 30)
    assert restored({"embed": fresh, "head": fresh}).size_bytes == 2 * weight.nbytes


def test_optimizer_state_converted_to_another_dtype_is_verified(agent_dir):
    exact = torch.randn(1000)
    saved({"moment": Told({"m": exact})})
    live = Told({"m": torch.zeros(1000)}, lambda own, state: own.update(m=state["m"].bfloat16()))
    assert restored({"moment": live}).size_bytes == 2000
    live = Told({"m": torch.zeros(1000)}, lambda own, state: own.update(m=-state["m"].bfloat16()))
    with pytest.raises(RestoreProofError, match=r"moment\.m .*bfloat16"):
        restored({"moment": live})


@pytest.mark.parametrize("lost", [False, True])
def test_durable_restore_is_compared_with_the_saved_checksums(agent_dir, tmp_path, lost):
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/durable"))
    job.save(0)
    if lost:
        job.lose_memory()
    state = zeros_like_state(state_at(0))
    with job.checkpointer() as ckpt:
        assert ckpt.restore(state) == 0
        assert (ckpt.last_restore.proof.size_bytes, ckpt.last_restore.proof.objects) == ((1 << 20) + 56 + 66, 1)
        late = Told({}, lambda *_: flip(state["w"], at=1 << 19))
        with pytest.raises(RestoreProofError, match=r"1 entry differs from the saved state: w\. Do not"):
            ckpt.restore(zeroed_in_place(state) | {"zz": late}, strict=False)


def zeroed_in_place(state):
    state["w"].zero_()
    return state


# -- states that are restored wrongly ------------------------------------------------------------------------------


def flip(tensor, at=0):
    """Flip a bit of byte ``at``, even in a view of some columns."""
    element, byte = divmod(at, tensor.itemsize)
    place = tuple(map(int, np.unravel_index(element, tensor.shape)))
    tensor[place].view(1).view(torch.uint8)[byte] ^= 1
    return tensor


def test_a_bit_that_flips_in_the_live_state_after_everything_was_verified(agent_dir):
    saved({"w": Told({"a": torch.randn(CHUNK_BYTES), "b": torch.randn(5)})})

    def damaged():
        blank = {"a": torch.zeros(CHUNK_BYTES), "b": torch.zeros(5)}
        return {"w": Told(blank, lambda own, new: own.update(new | {"a": flip(new["a"], at=3 * CHUNK_BYTES + 5)}))}

    unnoticed(damaged())
    with pytest.raises(RestoreProofError, match=r"1 entry differs from the saved state: w\.a\. Do not train on it"):
        restored(damaged())


def flip_in_slot(at):
    """Flip a bit of byte ``at`` of the job's only shard in this node's memory."""
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        store = ckpt.session.agent.store
        (fact,) = store.list_shards("proof")
        pin = store.pin(fact.key)
        with open(pinned_file(pin), "r+b") as file:  # noqa: PTH123
            file.seek(at)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 4]))
        store.unpin(pin.id)


@pytest.mark.parametrize(("way", "proof"), [("restore", True), ("restore", False), ("dcp.load", True)])
def test_shard_damaged_after_the_vote_is_detected_and_dropped(agent_dir, monkeypatch, way, proof):
    state = {"w": torch.randn(2 * CHUNK_BYTES), "b": torch.randn(5)}
    saved(state)

    def reach(point):
        if point == "load.voted":
            flip_in_slot(4096 + 3 * CHUNK_BYTES)

    monkeypatch.setattr("tieredckpt.dcp.tiered_reader.failpoint", reach)
    if way == "restore":
        with pytest.raises(CheckpointDamagedError, match="in memory: damaged"):
            restored(zeros_like_state(state), proof=proof)
    else:
        with pytest.raises(CheckpointException, match="in memory: damaged"):
            dcp.load(zeros_like_state(state), storage_reader=TieredReader(JOB), no_dist=True)
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        assert not ckpt.session.agent.store.list_shards("proof")


def test_shard_damaged_before_a_restore_is_replaced_by_its_durable_copy(agent_dir, tmp_path):
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/durable"), "proof")
    job.save(0)
    flip_in_slot(1 << 19)
    state = zeros_like_state(state_at(0))
    with job.checkpointer() as ckpt:
        assert ckpt.restore(state) == 0
        assert ckpt.last_restore.bytes_by_tier["durable"] >= 1 << 20
    assert_same_bits(state, state_at(0))


@pytest.mark.parametrize("way", ["restore", "dcp.load"])
def test_bit_flipped_on_the_way_to_its_target_is_read_again(agent_dir, monkeypatch, caplog, way):
    state = {"w": torch.randn(2 * CHUNK_BYTES), "b": torch.randn(5)}
    saved(state)

    def reading(file, address, offset, size_bytes):
        read_shard(file, address, offset, size_bytes)
        memory_at_address(address, 1)[0] ^= 1

    monkeypatch.setattr("tieredckpt.restore.verified_copy.read_shard", reading)
    found = zeros_like_state(state)
    if way == "restore":
        assert restored(found).size_bytes == sum(one.nbytes for one in state.values())
    else:
        dcp.load(found, storage_reader=TieredReader(JOB), no_dist=True)
    assert_same_bits(state, found)
    assert "differed from their checksums when they were read" in caplog.text


@pytest.mark.parametrize("strict", [True, False])
def test_bit_flipped_behind_the_agents_comparison_is_detected(agent_dir, monkeypatch, strict):
    """The live state is read again if the bytes are not compared during the copy."""
    state = {"w": torch.randn(2 * CHUNK_BYTES), "b": torch.randn(5)}
    saved(state)
    read = Copier.copy_from_file

    def reading(copier, fd, moves):
        read(copier, fd, moves)
        memory_at_address(moves[0].target, 1)[0] ^= 1

    monkeypatch.setattr(Copier, "copy_from_file", reading)
    monkeypatch.setattr("tieredckpt.restore.read_executor.copy_verified", lambda *_, **__: [0])
    with pytest.raises(RestoreProofError, match=r": b\. Do not"):  # the first entry of the shard
        restored(zeros_like_state(state), strict=strict)


def test_restore_reads_and_hashes_every_byte_once(agent_dir, monkeypatch):
    state = trained(1)
    saved(state)
    read, compared, hashed_again = [], [], []
    verify = PinnedShards.verify

    def reading(file, address, offset, size_bytes):
        read.append((offset, size_bytes))
        read_shard(file, address, offset, size_bytes)

    def verifying(pinned, shard, ranges, **how):
        compared.extend(ranges)
        return verify(pinned, shard, ranges, **how)

    monkeypatch.setattr("tieredckpt.restore.verified_copy.read_shard", reading)
    monkeypatch.setattr("tieredckpt.tensors.slot_copy.read_into", lambda fd, *where: reading(ShardFile(fd), *where))
    monkeypatch.setattr(PinnedShards, "verify", verifying)
    monkeypatch.setattr("tieredckpt.restore.proof._chunk_windows", lambda *_: hashed_again.append(1) or iter(()))
    fresh = trained(2, steps=0)
    proof = restored(fresh)
    assert_same_bits(state_dicts(state), state_dicts(fresh))
    assert proof.size_bytes == sum(one.nbytes for one in tensors_of(state))
    assert not hashed_again
    ends = itertools.accumulate((size for _, size in sorted(read)), initial=0)
    assert [start for start, _ in sorted(read)] == [*ends][:-1]
    assert sum(stop - start for start, stop in compared) < sum(size for _, size in read) // 2


def test_process_that_saved_copies_out_of_its_own_mapping(agent_dir, monkeypatch):
    state, files = trained(1), []

    def reading(file, *where):
        files.append(file)
        read_shard(file, *where)

    monkeypatch.setattr("tieredckpt.restore.verified_copy.read_shard", reading)
    saved(state)
    fresh = trained(2, steps=0)
    restored(fresh)
    assert_same_bits(state_dicts(state), state_dicts(fresh))
    assert files
    assert all(file.address for file in files)
    files.clear()
    close_sessions()  # like a new process
    fresh = trained(3, steps=0)
    restored(fresh)
    assert_same_bits(state_dicts(state), state_dicts(fresh))
    assert files
    assert not any(file.address for file in files)


def state_dicts(state):
    return {"model": state["model"].state_dict(), "optim": state["optim"].state_dict()}


def tensors_of(state):
    moments = [one for moments in state["optim"].state.values() for one in moments.values()]
    return [*state["model"].state_dict().values(), *moments]


def write_with_numpy(tensor):
    tensor.detach().view(-1).numpy()[3] = 77.0


@pytest.mark.parametrize("through", ["numpy", "data"])
def test_write_of_a_load_hook_past_the_version_counter_is_detected(agent_dir, through):
    saved({"model": nn.Linear(50, 60)})
    model = nn.Linear(50, 60)

    def write(module, _):
        if through == "numpy":
            write_with_numpy(module.weight)
        else:
            module.weight.data.view(-1)[3] = 77.0

    model.register_load_state_dict_post_hook(write)
    with pytest.raises(RestoreProofError, match=r"1 entry differs from the saved state: model\.weight\. Do not"):
        restored({"model": model})


def test_write_of_a_stateful_past_the_version_counter_is_detected(agent_dir):
    saved({"app": Told({"m": torch.randn(1000)})})

    def takes(own, new):
        own.update(new)
        write_with_numpy(own["m"])

    with pytest.raises(RestoreProofError, match=r"1 entry differs from the saved state: app\.m\. Do not"):
        restored({"app": Told({"m": torch.zeros(1000)}, takes)})


def test_write_of_a_stateful_into_another_entry_is_detected(agent_dir):
    saved({"model": nn.Linear(50, 60), "zz": Told({"a": 1})})
    model = nn.Linear(50, 60)

    def takes(own, new):
        own.update(new)
        with torch.no_grad():
            model.weight[3] += 1

    with pytest.raises(RestoreProofError, match=r"1 entry differs from the saved state: model\.weight\. Do not"):
        restored({"model": model, "zz": Told({"a": 0}, takes)})


def test_overlapping_targets_are_refused(agent_dir):
    saved({"a": torch.full((CHUNK_BYTES,), 1.0), "b": torch.full((CHUNK_BYTES,), 2.0)})
    base = torch.zeros(CHUNK_BYTES + 1000)
    with pytest.raises(RestoreProofError, match=r"entr.* from the saved state"):
        restored({"a": base[:CHUNK_BYTES], "b": base[1000:]})


@pytest.mark.parametrize("way", ["restore", "dcp.load"])
@pytest.mark.parametrize("size", [10, CHUNK_BYTES])
def test_two_entries_sharing_memory_are_refused(agent_dir, way, size):
    saved({"a": torch.full((size,), 1.0), "b": torch.full((size,), 2.0)})
    one = torch.zeros(size)
    if way == "restore":
        unnoticed({"a": one, "b": one})
        with pytest.raises(RestoreProofError, match=r"is the same memory as [ab]"):
            restored({"a": one, "b": one})
    else:
        with pytest.raises(CheckpointException, match="is the same memory as"):
            dcp.load({"a": one, "b": one}, storage_reader=TieredReader(JOB), no_dist=True)


def test_swapped_modules_of_the_same_shape_are_detected(agent_dir):
    state = {"policy": nn.Linear(50, 60), "reference": nn.Linear(50, 60)}
    saved(state)

    def swapped():
        policy, reference = nn.Linear(50, 60).state_dict(), nn.Linear(50, 60).state_dict()
        return {
            "policy": Told(policy, lambda _, new: reference.update(new)),
            "reference": Told(reference, lambda _, new: policy.update(new)),
        }

    unnoticed(swapped())
    with pytest.raises(RestoreProofError, match=r"4 entries.*policy\.bias \(has what was saved as reference\."):
        restored(swapped())


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_moment_left_at_zero_is_detected(agent_dir, name):
    state = trained(1)
    saved({"optim": Told(state["optim"].state_dict())})

    def without():
        blank = zeros_like_state(state["optim"].state_dict()) | {
            "param_groups": state["optim"].state_dict()["param_groups"]
        }

        def takes(own, new):
            kept = own["state"][2][name]
            own.update(new)
            own["state"][2][name] = kept

        return {"optim": Told(blank, takes)}

    unnoticed(without())
    with pytest.raises(RestoreProofError, match=rf"1 entry.*optim\.state\.2\.{name} \(is all zeros\)"):
        restored(without())


def test_dropped_moments_are_detected(agent_dir):
    """The optimizer's state is requested and read, but its ``load_state_dict`` drops it."""
    state = trained(1)
    saved({"optim": Told(state["optim"].state_dict())})
    blank = zeros_like_state(state["optim"].state_dict()) | {
        "param_groups": state["optim"].state_dict()["param_groups"]
    }
    dropping = Told(blank, lambda own, new: own.update(state={}, param_groups=new["param_groups"]))
    with pytest.raises(RestoreProofError, match=r"18 entries.*optim\.state\.0\.step \(is not in the live state"):
        restored({"optim": dropping})


def test_ignored_schedule_state_is_detected(agent_dir):
    state = trained(1, steps=5)
    saved({"schedule": state["schedule"]})

    class Ignores(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state):
            pass

    def fresh():
        optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.01)
        return {"schedule": Ignores(optimizer, step_size=1, gamma=0.5)}

    assert restored(fresh(), proof=False) is None
    with pytest.raises(RestoreProofError, match=r"schedule\.last_epoch \(is 0, saved was 5\)"):
        restored(fresh())


class Generators:
    def __init__(self, *, sets=True):
        self.sets = sets

    def state_dict(self):
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def load_state_dict(self, state):
        if self.sets:
            torch.set_rng_state(state["torch"])
            random.setstate(state["python"])


def test_generator_left_unrestored_is_detected(agent_dir):
    saved({"random": Generators()})
    torch.rand(3), random.random()
    proof = restored({"random": Generators()})
    assert proof.size_bytes
    assert proof.objects == 1
    torch.rand(3), random.random()
    with pytest.raises(RestoreProofError, match=r"2 entries.*random\.torch"):
        restored({"random": Generators(sets=False)})


def test_cursor_reset_at_the_second_resume_is_detected(agent_dir):
    """The first resume continues correctly but reports position 0, so the next save stores the beginning."""

    class Loader:
        def __init__(self):
            self.begin, self.at = 0, 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.begin = state["at"]

    loader = Loader()
    loader.at = 70
    saved({"data": loader})
    fresh = Loader()
    restored({"data": fresh}, proof=False)
    assert fresh.begin == 70
    with pytest.raises(RestoreProofError, match=r"data\.at \(is 0, saved was 70\)"):
        restored({"data": Loader()})


@pytest.mark.parametrize("name", ["plain", "pair"])
def test_mismatch_is_reported_even_without_an_explanation(agent_dir, name):
    """Wrapper subclasses have no memory of their own to inspect."""

    def values(seed):
        torch.manual_seed(seed)
        return {"plain": torch.randn(16), "pair": TwoTensor(torch.randn(8), torch.randn(8))}

    ours = values(2)
    wrong = Told(values(2), lambda own, state: own.update(state | {name: ours[name]}))
    with torch.serialization.safe_globals([TwoTensor]):
        saved({"app": Told(values(1))})
        with pytest.raises(RestoreProofError, match=rf"1 entry differs from the saved state: app\.{name}"):
            restored({"app": wrong})
        assert not restored({"app": Told(values(3))}).not_compared


def test_proof_detects_all_tensors_wrong_with_none_missing(agent_dir):
    """A state built from copies has all names, but the loaded values never reach the model."""
    saved({"model": trained(1)["model"]})
    model = trained(2)["model"]
    with pytest.raises(RestoreProofError, match="8 entries"):  # the ninth entry counts batches and is equal in both
        restored({"model": Told(model.state_dict(), lambda *_: None)})


def test_repeated_restores_leak_nothing_and_never_start_at_zero(agent_dir):
    state = trained(1) | {"large": torch.zeros(4 << 20)}
    saved(state, step=7)
    fresh = trained(2, steps=0) | {"large": torch.ones(4 << 20)}

    def footprint():
        """Return the numbers of open files and threads, which may still shrink after an earlier test."""
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        seen, memory = [], []
        for _ in range(20):
            assert ckpt.restore(fresh) == 7
            ckpt.session.slots.wait_until_prepared()
            seen.append(footprint())
            memory.append(psutil.Process().memory_full_info().uss)
        assert ckpt.last_restore.proof.size_bytes
    assert all(last <= first for last, first in zip(seen[-1], seen[4], strict=True)), seen
    assert memory[-1] - memory[4] < 3 * state["large"].nbytes  # over 15 restores


# -- entries that cannot be compared -------------------------------------------------------------------------------


def test_unstable_entries_are_left_out_and_reported(agent_dir, caplog):
    class Clock:
        def state_dict(self):
            return {"at": time.perf_counter_ns(), "noise": torch.rand(4), "kept": 3}

        def load_state_dict(self, state):
            pass

    saved({"clock": Clock(), "w": torch.ones(5)})
    with caplog.at_level(logging.INFO):
        proof = restored({"clock": Clock(), "w": torch.zeros(5)})
    assert set(proof.not_compared) == {"clock.at", "clock.noise"}
    assert (proof.size_bytes, proof.objects) == (20, 1)
    assert "2 entries not compared" in caplog.text
    assert "clock.at (changes at every call of state_dict())" in caplog.text


def test_excluded_entries_are_left_out_and_reported(agent_dir):
    saved({"data": Told({"at": 3}), "w": torch.ones(5)})
    state = {"data": Told({"at": 0}, lambda own, new: own.update(at=new["at"] + 1)), "w": torch.zeros(5)}
    with pytest.raises(RestoreProofError, match=r"data\.at"):
        restored(state)
    assert restored(state, exclude_from_proof={"data"}).not_compared == {"data.at": "as said"}


def test_object_without_equality_is_compared_by_its_pickle(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_MEMORY_TRUST_OBJECTS", "1")
    saved({"own": Opaque(3)})
    state = {"own": None}
    assert restored(state).objects == 1
    assert state["own"].value == 3


class Opaque:
    def __init__(self, value):
        self.value = value


# -- other shardings -----------------------------------------------------------------------------------------------


def save_sharded(kind, steps):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=1)
    train_steps(model, optimizer, steps)
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        ckpt.save(App(model, optimizer).whole(), steps).wait()
    return full_state(get_state(model, optimizer))


class App:
    """Model and optimizer as one ``Stateful``, as in DCP's tutorials, with ``breaks`` run after the load."""

    def __init__(self, model, optimizer, breaks=None):
        self.model, self.optimizer, self.breaks = model, optimizer, breaks

    def whole(self):
        return {"app": self}

    def state_dict(self):
        return get_state(self.model, self.optimizer)

    def load_state_dict(self, state):
        set_state(self.model, self.optimizer, state)
        if self.breaks is not None:
            self.breaks(self.model, self.optimizer)


def zero_a_moment(_, optimizer):
    if dist.get_rank() == dist.get_world_size() - 1:
        moment = next(iter(optimizer.state.values()))["exp_avg"]
        getattr(moment, "_local_tensor", moment).zero_()


def swap_moments(_, optimizer):
    for moments in optimizer.state.values():
        moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg_sq"], moments["exp_avg"]


def load_sharded(kind, breaks=None):
    model, optimizer = build_model(kind, dist.get_world_size(), seed=2)
    train_steps(model, optimizer, 1)
    app = App(model, optimizer, breaks)
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        try:
            ckpt.restore(app.whole())
        except RestoreProofError as error:
            return str(error)
        proof = ckpt.last_restore.proof
        return full_state(get_state(model, optimizer)), proof.size_bytes, proof.not_compared


@pytest.mark.parametrize(
    ("kind", "before", "other", "after"),
    [
        pytest.param("fsdp", 2, "fsdp", 3, marks=pytest.mark.nightly),
        pytest.param("hsdp", 4, "fsdp", 3, marks=replicas_on_gloo),
        pytest.param("tp", 2, "fsdp", 3, marks=pytest.mark.nightly),
        pytest.param("fsdp", 3, "tp", 2, marks=pytest.mark.nightly),
        ("2d", 4, "fsdp", 2),
        pytest.param("ddp", 2, "fsdp", 2, marks=pytest.mark.nightly),
    ],
)
def test_proof_is_the_same_in_another_sharding(agent_dir, ranks, kind, before, other, after):
    expected = ranks.run(before, save_sharded, kind, 2)[0]
    for found, size, left_out in ranks.run(after, load_sharded, other):
        assert_same_bits(expected, found)
        assert size > 0
        assert not left_out
    for problem in ranks.run(after, load_sharded, other, zero_a_moment):
        assert "exp_avg (is all zeros)" in problem  # on every rank, although only one has the fault


def test_swapped_moments_are_detected_on_every_rank(agent_dir, ranks):
    ranks.run(2, save_sharded, "fsdp", 2)
    for problem in ranks.run(2, load_sharded, "fsdp", swap_moments):
        assert "has what was saved as app.optim.state." in problem


def save_grid(placements):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(3 << 18, dtype=torch.float32).view(-1, 1 << 10)
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        ckpt.save({"w": distribute_tensor(whole, mesh, placements)}, 1).wait()


def load_grid(placements, spoil):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.zeros(3 << 8, 1 << 10), mesh, placements)}
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        if spoil is None:
            ckpt.restore(state)
            return ckpt.last_restore.proof.size_bytes, state["w"]._local_tensor.nbytes
        state["zz"] = Spoils(state["w"], spoil)
        try:
            ckpt.restore(state, strict=False)
        except RestoreProofError as error:
            return str(error)
        return "nothing was noticed"


class Spoils:
    """A ``Stateful`` that loads last and flips a bit of another entry's tensor."""

    def __init__(self, tensor, rank):
        self.tensor, self.rank = tensor, rank

    def state_dict(self):
        return {}

    def load_state_dict(self, _):
        if dist.get_rank() == self.rank:
            flip(self.tensor._local_tensor, at=self.tensor._local_tensor.nbytes // 2)


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ([Shard(1)], [Shard(0)]),
        ([Replicate()], [Shard(1)]),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                ([Shard(0)], [Shard(0)]),
                ([Shard(0)], [Shard(1)]),
                ([Shard(1)], [Shard(1)]),
                ([Replicate()], [Shard(0)]),
            )
        ),
    ],
)
def test_every_partition_of_a_tensor_is_compared_completely(agent_dir, ranks, rows, columns):
    ranks.run(2, save_grid, rows)
    for compared, held in ranks.run(3, load_grid, columns, None):
        assert compared == held
    for problem in ranks.run(3, load_grid, columns, 2):
        assert "on rank 2 1 entry differs from the saved state: w." in problem


def restore_where_one_rank_has_it_off():
    proof = dist.get_rank() == 0
    with Checkpointer(JOB, on_sigterm="ignore", proof=proof) as ckpt:
        ckpt.save({"x": torch.ones(3)}, 1).wait()
        ckpt.restore({"x": torch.zeros(3)})
        return ckpt.last_restore.proof, ckpt._ranks.all_gather("still together")


def test_rank_with_the_proof_disabled_blocks_no_other(agent_dir, ranks):
    assert ranks.run(2, restore_where_one_rank_has_it_off) == [(None, ["still together"] * 2)] * 2


def test_sparse_buffer_of_a_module_is_restored(agent_dir):
    """The state dict alone has the new elements, until the module loads it."""

    def module(seed):
        torch.manual_seed(seed)
        made = nn.Linear(3, 4)
        made.register_buffer("mask", torch.randn(5, 5).relu().to_sparse())
        return made

    saved({"model": module(1)})
    found = module(2)
    assert not restored({"model": found}).not_compared
    assert_same_bits(module(1).state_dict(), found.state_dict())
