"""P3: a whole ``dcp.load`` from memory into existing tensors, and the proof after it."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as dcp

from benchmarks.limits import NullReader, NullWriter, WarmMapping
from benchmarks.opponents import DcpFiles, SafetensorsFile, TorchFile
from benchmarks.parameters import Scene
from benchmarks.rounds import COPY, Contender, built, measure, no_dist, those_of, use_threads
from benchmarks.sandbox import JOB, settings_for
from benchmarks.states import State, blank, wipe
from tieredckpt import Checkpointer, TieredReader
from tieredckpt.settings import Settings, override_settings

OURS, FILES, VERIFY = "dcp.load(TieredReader)", "dcp.load(FileSystemReader)", "xxh3 of the bytes, 1 thread"
RESTORE = "Checkpointer.restore"
UNPROVEN = "{}, memory.proof off"


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    state = built(scene, rank=rank, world=scene.ranks)
    target = blank(state)
    settings = settings_for(scene)
    mapping = WarmMapping(scene.folder / f"warm-{rank}", state)
    mapping.copy_in()
    copy_out = mapping.copier_out(target)
    files = DcpFiles(scene.folder, rank, state)
    pickled = TorchFile(scene.folder, rank, state)
    safe = SafetensorsFile(scene.folder, rank, state)
    for opponent in (files, pickled, safe) if not scene.device else ():
        opponent.save()
    metadata = dcp.save(state, storage_writer=NullWriter(), no_dist=no_dist())
    plain = override_settings(settings, memory={"proof": False})
    with (
        Checkpointer(JOB, settings=settings, on_sigterm="ignore") as checkpointer,
        Checkpointer(JOB, settings=plain, on_sigterm="ignore") as unproven,
    ):
        checkpointer.save(state, 1).wait()

        def found() -> State:
            return target

        def load(settings: Settings) -> None:
            dcp.load(target, storage_reader=TieredReader(JOB, settings=settings), no_dist=no_dist())

        contenders = [
            Contender(COPY, "limit", lambda _: copy_out(), found, objects=False, note="out of the mapping"),
            Contender(VERIFY, "limit", lambda _: mapping.checksum(), None, note="verification's read"),
            Contender(
                "dcp.load(null reader)",
                "limit",
                lambda _: dcp.load(target, storage_reader=NullReader(metadata), no_dist=no_dist()),
                None,
                note="planning only, no bytes",
            ),
            Contender(OURS, "ours", lambda _: load(settings), found, note="verified, targets compared"),
            Contender(UNPROVEN.format(OURS), "ours", lambda _: load(plain), found, note="verified"),
            Contender(RESTORE, "ours", lambda _: checkpointer.restore(target), found, note="verified, state compared"),
            Contender(UNPROVEN.format(RESTORE), "ours", lambda _: unproven.restore(target), found, note="verified"),
            Contender(FILES, "opponent", lambda _: files.load(target), found, note="not verified"),
            Contender("torch.load", "opponent", lambda _: pickled.load(target), found, note="then copied into place"),
            Contender(
                "torch.load, mmap",
                "opponent",
                lambda _: pickled.load(target, mapped=True),
                found,
                note="then copied into place, not verified",
            ),
            Contender(
                "safetensors load_file",
                "opponent",
                lambda _: safe.load(target),
                found,
                objects=False,
                note="then copied into place, not verified",
            ),
        ]
        return measure(
            those_of(scene, contenders),
            scene.rounds,
            expected=state,
            prepare=lambda _: wipe(target),
            every_round=True,
            spoil=scene.spoil,
        )
