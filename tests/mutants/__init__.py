"""Mutants: deliberate defects in the product, each with the test that must fail."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("peerstore", "tieredckpt", "elastic", "integration")
_STAGING = "tests/unit/tieredckpt/tensors/test_slot_copy_devices.py::"
_LOADING = "tests/unit/tieredckpt/restore/test_read_executor_devices.py::test_restored_state_is_on_the_devices"
_STAGED = f"{_STAGING}test_staged_state_is_unaffected_by_later_device_work"
_OVERLAPPED = "tests/unit/tieredckpt/checkpointer/test_overlapped_copy.py::"
_FENCE = "tests/unit/tieredckpt/live/test_abort_fence.py::"
_NCCL = "tests/unit/repository/test_nccl_like.py::"


class Mutant(NamedTuple):
    """A defect: with ``new`` for the only ``old`` in ``file``, ``test`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


MUTANTS = (
    Mutant(
        "a save does not wait for the compute stream",
        "tieredckpt/tensors/slot_copy.py",
        "stream.wait_stream(self._device.current_stream(place))  # the work",
        "pass  # the work",
        _STAGED,
    ),
    Mutant(
        "a load does not wait for the compute stream",
        "tieredckpt/tensors/slot_copy.py",
        "stream.wait_stream(self._device.current_stream(place))  # pending work",
        "pass  # pending work",
        _LOADING,
    ),
    Mutant(
        "a save returns before its copies are done",
        "tieredckpt/tensors/slot_copy.py",
        "                for stream in streams:\n                    stack.callback(stream.synchronize)\n",
        "                pass\n",
        _STAGED,
    ),
    Mutant(
        "a load returns before its copies are done",
        "tieredckpt/tensors/slot_copy.py",
        '"""Wait until all submitted copies are done."""\n        for stream in self._streams.values():',
        '"""Nothing is waited for."""\n        for stream in ():',
        "tests/unit/tieredckpt/restore/test_read_executor_devices.py::test_other_dtypes_are_converted_during_a_restore",
    ),
    Mutant(
        "a buffer is filled again before its event",
        "tieredckpt/tensors/slot_copy.py",
        "        for event in self.emptied:\n            event.synchronize()\n",
        "",
        _LOADING,
    ),
    Mutant(
        "a slot is unregistered under a copy",
        "tieredckpt/tensors/slot_copy.py",
        "self._in_flight += 1",
        "self._in_flight += 0",
        f"{_STAGING}test_mutant_that_unregisters_under_a_copy",
    ),
    Mutant(
        "buffers are unregistered under a copy",
        "tieredckpt/tensors/slot_copy.py",
        "            for stream in self._streams.values():\n                stack.callback(stream.synchronize)\n",
        "",
        "tests/unit/tieredckpt/restore/test_read_executor_devices.py::"
        "test_mutant_that_unregisters_buffers_of_a_load_that_has_failed",
    ),
    Mutant(
        "a registered file is cut and grows again",
        "tieredckpt/tensors/slot_copy.py",
        "        copy = SlotCopy(self, CopyPlan(pieces))\n",
        "        os.ftruncate(self._fd, 0)\n        os.ftruncate(self._fd, self.size_bytes)\n"
        "        copy = SlotCopy(self, CopyPlan(pieces))\n",
        _STAGED,
    ),
    Mutant(
        "a parameter's new memory is not seen",
        "tieredckpt/checkpointer/save_template.py",
        "if loose is None or not self._addresses.are_same():",
        "if loose is None:",
        "tests/unit/tieredckpt/checkpointer/test_save_template.py::test_every_save_is_of_the_state_as_it_is",
    ),
    Mutant(
        "an optimizer's step does not wait for the copy",
        "tieredckpt/checkpointer/overlapped_copy.py",
        "            self.wait(by_device=not accelerator().is_capturing())\n",
        "            pass\n",
        f"{_OVERLAPPED}test_optimizer_step_waits_for_the_copy",
    ),
    Mutant(
        "devices do not wait for the copy before a step",
        "tieredckpt/checkpointer/overlapped_copy.py",
        "                accelerator().current_stream(place).wait_event(event)\n",
        "                pass\n",
        f"{_OVERLAPPED}test_devices_do_not_change_a_tensor_before_it_is_copied",
    ),
    Mutant(
        "devices do not wait for what is copied before a save returns",
        "tieredckpt/checkpointer/overlapped_copy.py",
        "            device.current_stream(place).wait_event(event)\n",
        "            pass\n",
        f"{_OVERLAPPED}test_devices_do_not_change_a_tensor_before_it_is_copied",
    ),
    Mutant(
        "a version counter that moved during the copy is not seen",
        "tieredckpt/checkpointer/overlapped_copy.py",
        "                    if now != before\n",
        "                    if False\n",
        f"{_OVERLAPPED}test_change_on_a_device_before_a_step_is_seen",
    ),
    Mutant(
        "a change through .data during the copy is not seen",
        "tieredckpt/checkpointer/overlapped_copy.py",
        "return self._sampled[wrong[0]][0] if len(wrong) else",
        "return",
        f"{_OVERLAPPED}test_change_outside_of_an_optimizer_step_is_not_saved",
    ),
    Mutant(
        "a copy of what an aborted world computed is sealed",
        "tieredckpt/checkpointer/overlapped_copy.py",
        "            if not self._fence.trusts(self._work):\n",
        "            if False:\n",
        f"{_OVERLAPPED}test_step_that_an_aborted_world_computed_is_not_saved",
    ),
    Mutant(
        "a boundary is noted before the gate is asked",
        "tieredckpt/live/boundary_recorder.py",
        "        abort_fence.raise_if_aborted()\n",
        "",
        f"{_FENCE}test_a_step_of_a_broken_world_is_not_noted",
    ),
    Mutant(
        "an optimizer does not ask the gate",
        "tieredckpt/live/survivor_state.py",
        "            raise_if_aborted()  # first",
        "            pass  # first",
        f"{_FENCE}test_an_optimizer_does_not_begin_a_step_of_a_broken_world",
    ),
    Mutant(
        "events are asked after the abort",
        "elastic/workers/train_loop.py",
        "                self._fence.close()",
        "                pass",
        "tests/unit/elastic/workers/test_in_process_restart.py::test_completed_device_work_is_queried_before_the_abort",
    ),
    Mutant(
        "what completes after the abort is believed",
        "tieredckpt/live/abort_fence.py",
        "return work.has_completed() if self._believed is None else work in self._believed",
        "return work.has_completed()",
        f"{_FENCE}test_only_work_completed_before_the_abort_is_trusted",
    ),
    Mutant(
        "groups are aborted one by one",
        "elastic/workers/process_groups.py",
        "is not None][:1]",
        "is not None][:0]",
        f"{_NCCL}test_all_groups_are_aborted_together",
    ),
    Mutant(
        "the watchdog stays on",
        "elastic/workers/process_groups.py",
        "            disable_nccl_watchdog(os.environ)\n",
        "            pass\n",
        f"{_NCCL}test_the_watchdog_is_off_before_the_first_group_is_made",
    ),
    Mutant(
        "replayed graphs are not seen",
        "tieredckpt/live/survivor_state.py",
        "        self.replays = True\n",
        "        pass\n",
        "tests/unit/tieredckpt/live/test_boundary_recorder_captured_steps.py::test_a_state_that_a_replayed_graph_has_changed_is_not_kept",
    ),
    Mutant(
        "a step is believed that one survivor had not completed",
        "tieredckpt/live/survivor_choice.py",
        "return {job: min(",
        "return {job: max(",
        "tests/unit/tieredckpt/live/test_survivor_choice.py::test_steps_not_completed_before_the_abort_are_not_trusted",
    ),
    Mutant(
        "replicas' content is not compared",
        "tieredckpt/live/survivor_choice.py",
        "elif here.digest != there.digest:",
        "elif False:",
        "tests/unit/tieredckpt/live/test_survivor_choice.py::test_diverging_replicas_are_named",
    ),
    Mutant(
        "the health check asks the first device",
        "elastic/workers/in_process_restart.py",
        "place = device.current()",
        'place = __import__("torch").device(device.type, 0)',
        "tests/unit/elastic/workers/test_in_process_restart.py::test_health_check_uses_the_device_of_the_rank",
    ),
    Mutant(
        "groups give up before a hang is found",
        "elastic/workers/process_groups.py",
        "timedelta(seconds=min(_LONGER * hang_s, _MOST_S))",
        "timedelta(seconds=0.5 * hang_s)",
        "tests/unit/elastic/control/test_hang_detector.py::test_groups_wait_longer_than_a_hang_takes_to_be_found",
    ),
    Mutant(
        "the doctor keeps memory registered after an error",
        "tieredckpt/cli/device_checks.py",
        "                is_quiet = self._is_quiet()\n",
        "                pass\n",
        "tests/unit/tieredckpt/cli/test_device_checks.py::test_a_device_that_raises_is_a_finding_and_keeps_no_memory",
    ),
)
