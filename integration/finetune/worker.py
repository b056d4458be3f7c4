"""One rank of a fine-tuning: of ``elastic run``, of ``torchrun``, of ``hyperpodrun``, or alone.

::

    torchrun --nproc-per-node 8 -m integration.finetune.worker --model ... --data ...
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from elastic.errors import PolicyError
from integration.finetune.job import Job
from integration.finetune.options import job_from, training_options
from peerstore.decode import from_json


@click.command("worker")
@training_options
@click.option("--from", "job_file", type=click.Path(path_type=Path), hidden=True, help="A job that is written down.")
def worker(*, job_file: Path | None, **options: Any) -> int:
    """Be one rank of a fine-tuning."""
    job = read_job(job_file) if job_file is not None else job_from(options)
    print(fine_tune(job), flush=True)
    return 0


def fine_tune(job: Job) -> object:
    """What became of this rank. Imports, tokenizer and data are there before it asks for a place."""
    from transformers.utils.logging import disable_progress_bar

    from elastic.workers.loop import run
    from integration.finetune.pretrained import prepared
    from integration.finetune.training import train

    quiet: Any = disable_progress_bar
    quiet()
    brought = prepared(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    return run(lambda world: train(world, job, brought))


def read_job(path: Path) -> Job:
    try:
        return from_json(path.read_bytes(), Job)
    except (OSError, msgspec.DecodeError) as error:
        raise PolicyError(f"{path} is no job: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        return int(worker.main(args=None if argv is None else list(argv), standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except click.ClickException as wrong:
        wrong.show()
        return int(wrong.exit_code)
    except PolicyError as error:
        print(f"finetune: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
