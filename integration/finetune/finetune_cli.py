"""``elastic finetune``: check the inputs, write the job, start ``elastic run``, follow the step log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from elastic.cli.common import ElasticScreen, pass_elastic_screen
from elastic.schedulers.allocation import node_range
from elastic.world.scaling_policy import ScalingPolicy
from integration.finetune.finetune_job import FinetuneJob, StepLogFollower, size_job
from integration.finetune.worker import job_from_options, training_options
from integration.hyperpod.recipes import read_recipe, recipe_plan
from integration.hyperpod.recipes import recipe as recipe_module
from tieredckpt.cli.common_options import output_options
from tieredckpt.cli.exit_codes import ExitCode

_WORKER = "integration.finetune.worker"
_PASSED = ("simulate_nodes", "spares", "node", "coordinator", "secret", "log_dir", "max_restarts", "grow_after")


@click.command("finetune", short_help="Fine-tune a model of Transformers on any number of nodes, without code.")
@training_options
@click.option("--nodes", metavar="MIN[:MAX]", help="Nodes of the job (default the recipe's, or 1).")
@click.option("--nproc", type=click.IntRange(1, 1024), help="Ranks of every node (default the recipe's, or 1).")
@click.option("--simulate-nodes", type=click.IntRange(1, 64), metavar="N", help="Simulate N nodes on this machine.")
@click.option("--spares", type=click.IntRange(0), help="Warm spare processes on every node.")
@click.option("--node", metavar="NAME", help="This node's name.")
@click.option("--coordinator", metavar="HOST:PORT", help="Address of the coordinator, for several machines.")
@click.option("--coordinator-here", is_flag=True, help="Start the coordinator on this machine, on that port.")
@click.option("--secret", metavar="file:PATH", help="File with the shared secret; the same on every machine.")
@click.option(
    "--grow-after", type=float, metavar="S", help="Wait this many seconds for more new nodes before adding them."
)
@click.option("--max-restarts", type=int, metavar="N", help="Stop the job after N faults.")
@click.option(
    "--log-dir", type=click.Path(path_type=Path), help="Folder for the output of ranks (default OUTPUT/logs)."
)
@output_options
@pass_elastic_screen
def finetune_command(screen: ElasticScreen, /, **options: Any) -> int:
    """Fine-tune a model. The same command resumes an interrupted run.

    Data are lines of JSON: {"text"}, {"prompt", "completion"}, or {"input_ids"} with "labels" or "weights". The result
    is OUTPUT/model, which from_pretrained can load. OUTPUT/progress.jsonl has a line for each step.
    """
    from elastic.cli.run import run_command

    launching = {name: options.pop(name) for name in (*_PASSED, "nodes", "nproc", "coordinator_here")}
    nproc, policy = _policy(options["recipe"], launching["nodes"], launching["nproc"])
    job = job_from_options(options, sizes=policy.sizes, nproc=nproc if options["recipe"] else None)
    for nodes in policy.sizes:
        size_job(job, nodes=nodes, world_size=nodes * nproc)
    _check_inputs(job)
    words = [
        *_write_job_files(job, policy, launching),
        "--nnodes",
        recipe_plan.nodes_option(policy),
        "--nproc",
        str(nproc),
    ]
    last: dict[str, Any] = {}

    def on_line(line: dict[str, Any]) -> None:
        last.update(line)
        if "step" in line and not screen.as_json:
            screen.err.print(step_text(line), markup=False)

    with StepLogFollower(job.progress_file, on_line), _rank_environment():
        status = run_command.main(
            args=[*words, "-m", _WORKER, "--from", str(job.folder / "job.json")], standalone_mode=False, obj=screen
        )
    status = int(status or 0)
    done = status == ExitCode.OK and "done" in last
    if done or screen.as_json:
        value = {
            "job": job.name,
            "status": status,
            "steps": last.get("done", last.get("step", -1) + 1),
            "loss": last.get("loss"),
            "model": str(job.model_folder) if done else None,
            "logs": str(launching["log_dir"] or job.folder / "logs"),
        }
        screen.result(value, lambda out: out.print(f"{value['steps']} steps; the model is in {job.model_folder}"))
    return status


def step_text(line: dict[str, Any]) -> str:
    """Return the text of a step for the terminal."""
    ranks = f"{line['ranks']} rank{'s' * (line['ranks'] != 1)}"
    return (
        f"step {line['step'] + 1}/{line['steps']}  loss {line['loss']:.4f}  {line['tokens']:,} tokens  "
        f"lr {line['lr']:.3g}  {ranks}  {line['seconds']:.2f} s"
    )


def _policy(recipe: str | None, nodes: str | None, nproc: int | None) -> tuple[int, ScalingPolicy]:
    """Return the ranks of a node, and the policy with the allowed numbers of nodes."""
    if recipe is None:
        least, most = node_range(nodes or "1")
        return nproc or 1, ScalingPolicy(min_replicas=least, max_replicas=most)
    found = read_recipe(recipe, devices=nproc)
    if nodes is None and not found.elastic:
        return found.devices, recipe_module.limit_nodes(found.policy, found.nodes, found.nodes, where=found.file)
    if nodes is None:
        return found.devices, found.policy
    least, most = node_range(nodes)
    return found.devices, recipe_module.limit_nodes(found.policy, least, most, where=f"{found.file}: --nodes {nodes}")


def _check_inputs(job: FinetuneJob) -> None:
    """Check model, tokenizer and data before any process starts."""
    from integration.finetune.inputs import open_job_inputs

    open_job_inputs(job)


def _write_job_files(job: FinetuneJob, policy: ScalingPolicy, launching: dict[str, Any]) -> list[str]:
    """Write the job and its policy to the output's folder. Return the arguments that name them."""
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "job.json").write_bytes(msgspec.json.format(msgspec.json.encode(job)))
    file = job.folder / recipe_plan.POLICY_FILE
    file.write_text(yaml.safe_dump(recipe_plan.policy_document(policy), sort_keys=False), encoding="utf-8")
    launching["log_dir"] = launching["log_dir"] or job.folder / "logs"
    words = ["--policy", str(file), "--job", job.name]
    for name in _PASSED:
        if launching[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(launching[name])]
    return [*words, "--coordinator-here"] if launching["coordinator_here"] else words


@contextlib.contextmanager
def _rank_environment() -> Iterator[None]:
    """Disable tokenizer threads while the block runs: they warn at every fork, and ranks have processes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
