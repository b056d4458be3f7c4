"""P2: a whole ``dcp.save``, from the call until every byte is where it stays and has its checksum."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as dcp

from benchmarks.limits import NullWriter, WarmMapping
from benchmarks.opponents import DcpFiles, SafetensorsFile, TorchFile
from benchmarks.parameters import Scene
from benchmarks.rounds import COPY, Contender, measure, no_dist, use_threads
from benchmarks.sandbox import JOB, settings_for
from benchmarks.states import State, advance, blank, build, wipe
from tieredckpt import TieredReader, TieredWriter

OURS, FILES, PLANNING = "dcp.save(TieredWriter)", "dcp.save(FileSystemWriter)", "dcp.save(null writer)"


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    state = build(scene.state, scene.size_bytes, rank=rank, world=scene.ranks)
    target = blank(state)
    mapping = WarmMapping(scene.folder / f"warm-{rank}", state)
    settings = settings_for(scene)
    files, pickled, safe = (kind(scene.folder, rank, state) for kind in (DcpFiles, TorchFile, SafetensorsFile))

    def ours(turn: int) -> None:
        dcp.save(state, storage_writer=TieredWriter(JOB, turn, settings=settings), no_dist=no_dist())

    def ours_found() -> State:
        wipe(target)
        dcp.load(target, storage_reader=TieredReader(JOB, settings=settings), no_dist=no_dist())
        return target

    def found_by(opponent: DcpFiles | TorchFile | SafetensorsFile) -> State:
        wipe(target)
        return opponent.load(target)

    contenders = [
        Contender(COPY, "limit", lambda _: mapping.copy_in(), lambda: mapping.as_state(state), objects=False),
        Contender(
            PLANNING,
            "limit",
            lambda _: dcp.save(state, storage_writer=NullWriter(), no_dist=no_dist()),
            None,
            note="planning only, no bytes",
        ),
        Contender(OURS, "ours", ours, ours_found, warm_runs=4, note="sealed: checksums included"),
        Contender(
            FILES,
            "opponent",
            lambda _: files.save(),
            lambda: found_by(files),
            before=files.clear,
            note="no checksums",
        ),
        Contender(
            "torch.save",
            "opponent",
            lambda _: pickled.save(),
            lambda: found_by(pickled),
            before=pickled.clear,
            note="a file per rank, crc32",
        ),
        Contender(
            "safetensors save_file",
            "opponent",
            lambda _: safe.save(),
            lambda: found_by(safe),
            before=safe.clear,
            objects=False,
            note="a file per rank, tensors only, no checksums",
        ),
    ]
    return measure(
        contenders,
        scene.rounds,
        expected=state,
        prepare=lambda turn: advance(state, turn),
        every_round=False,
        spoil=scene.spoil,
    )
