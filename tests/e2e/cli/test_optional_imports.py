"""Every command and public entry that needs an extra, in a process that cannot import its package.

They fork from an interpreter that imported torch and others, but no module of this project.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.fresh_starts]

CONFIG = '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16}'
FORK = """
import gc, os, runpy, sys
import click, msgspec, rich.table, torch, torch.distributed.checkpoint, torch.distributed.fsdp

assert not any(name.partition(".")[0] in ("tieredckpt", "peerstore", "elastic", "integration") for name in sys.modules)
gc.freeze()  # else each process scans and copies the objects of these imports
for line in sys.stdin:
    packages, out, err, *words = eval(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.modules.update(dict.fromkeys(packages.split()))
    kind, program, *sys.argv[1:] = words
    sys.argv[0] = program if kind == "-m" else kind
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(program, {"__name__": "__main__"})
    break
"""
"""Each line names the packages to block, two files for the output, and the command line of a process."""


def install(package, extra):
    return f"needs the {package} package: pip install {extra}"


KUBERNETES = "a connection to Kubernetes " + install("kubernetes", "'tieredckpt[kubernetes]'")
FINETUNE = "fine-tuning " + install("transformers", "'tieredckpt[finetune]'")
OTLP = "goodput --otlp " + install("opentelemetry", "'tieredckpt[otlp]'")
NIXL = "the nixl transport " + install("nixl", "'tieredckpt[nixl]'")
S3FS = "a plain checkpoint on s3:// " + install("s3fs", "'tieredckpt[s3fs]'")
GCSFS = "a plain checkpoint on gs:// " + install("gcsfs", "gcsfs")
HDFS = "durable.url hdfs://h/x " + install("pyarrow", "pyarrow")
LIGHTNING = "integration.lightning " + install("lightning", "'tieredckpt[lightning]'")
ACCELERATE = "integration.accelerate " + install("accelerate", "'tieredckpt[accelerate]'")
KUBEFLOW = "integration.kubeflow " + install("kubeflow", "'tieredckpt[kubeflow]'")
MEGATRON = "integration.megatron " + install("megatron", "'tieredckpt[megatron]'")
NVRX = "integration.nvrx " + install("nvidia_resiliency_ext", "'tieredckpt[nvrx]'")
TORCHFT = "integration.torchft " + install("torchft", "'tieredckpt[torchft]'")
TORCHTITAN = "integration.torchtitan " + install("torchtitan", "'tieredckpt[torchtitan]'")
RAY = "integration.ray_train " + install("ray", "'tieredckpt[ray]'")
TRANSFORMERS = "integration.transformers " + install("transformers", "'tieredckpt[transformers]'")
TORCH = "this command " + install("torch", "torch")
AGENT = install("hyperpod_elastic_agent", "--no-deps hyperpod-elastic-agent")
AGENT_SERVER = install("fastapi", 'fastapi==0.131.0 "uvicorn[standard]" psutil')


@pytest.fixture(scope="module")
def run_without(tmp_path_factory):
    """Return a function that runs ``python WORDS`` without some packages and returns the result."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "config.json").write_text(CONFIG)
    (folder / "data.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIEREDCKPT_")}
    environ |= {"PYTHONPATH": str(Path(__file__).parents[3]), "ELASTIC_SECRET": "s" * 32}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORK], cwd=folder, env=environ, **streams) as forking:

        def run(packages, *words):
            out, err = (folder / f"{name}-{time.monotonic_ns()}" for name in ("out", "err"))
            print([packages, str(out), str(err), *words], file=forking.stdin, flush=True)
            return int(forking.stdout.readline()), out.read_text(), err.read_text()

        yield run
        forking.stdin.close()
    assert forking.returncode == 0


@pytest.mark.parametrize(
    ("packages", "words", "text"),
    [
        ("kubernetes", "-m integration.kubernetes.controller -A", f"hyperpod-controller: {KUBERNETES}"),
        ("kubernetes", "-m tieredckpt cluster node-health n1", f"tieredckpt: {KUBERNETES}"),
        (
            "kubernetes",
            "-m elastic coordinator --job j --listen :0 --leadership kubernetes://ns/job",
            f"elastic: {KUBERNETES}",
        ),
        ("kubernetes", "-m elastic run --coordinator kubernetes://ns/job train.py", f"elastic: {KUBERNETES}"),
        ("transformers", "-m elastic finetune --config config.json --data data.jsonl", f"elastic: {FINETUNE}"),
        (
            "transformers",
            "-m integration.finetune.worker --config config.json --data data.jsonl",
            f"finetune: {FINETUNE}",
        ),
        ("nixl_cu12 nixl_cu13", "-m tieredckpt agent run --dir a --transport nixl", f"tieredckpt: {NIXL}"),
        ("opentelemetry", "-m tieredckpt goodput llama --otlp", f"tieredckpt: {OTLP}"),
        ("hyperpod_elastic_agent", "-m integration.hyperpod.hyperpodrun train.py", f"hyperpodrun {AGENT}"),
        ("hyperpod_elastic_agent", "-m integration.hyperpod.demo", f"the demo {AGENT}"),
        ("torch", "-m tieredckpt export llama out", f"tieredckpt: {TORCH}"),
        ("torch", "-m elastic reshard file:///a/llama file:///b/llama --ranks 4", f"elastic: {TORCH}"),
        ("fastapi", "-m integration.hyperpod.hyperpodrun train.py", f"hyperpodrun {AGENT_SERVER}"),
    ],
)
def test_command_names_the_missing_package_in_one_line(run_without, packages, words, text):
    code, out, err = run_without(packages, *words.split())
    assert (code, out, err) == (2, "", f"{text}\n")


def test_missing_package_is_an_error_in_json(run_without):
    code, out, _ = run_without("kubernetes", "-m", "tieredckpt", "cluster", "node-health", "n1", "--json")
    error = json.loads(out)["error"]
    assert (code, error["exit"], error["kind"], error["message"]) == (2, 2, "MissingPackageError", KUBERNETES)


ENTRIES = {
    LIGHTNING: ("lightning", "integration.lightning", "integration.lightning.trainer_plugins"),
    ACCELERATE: ("accelerate", "integration.accelerate", "integration.accelerate.accelerator_steps"),
    KUBEFLOW: ("kubeflow", "integration.kubeflow", "integration.kubeflow.train_job_status"),
    MEGATRON: ("megatron", "integration.megatron", "integration.megatron.sharded_checkpoints"),
    NVRX: ("nvidia_resiliency_ext", "integration.nvrx", "integration.nvrx.local_checkpoint_manager"),
    TORCHFT: ("torchft", "integration.torchft", "integration.torchft.tiered_transport"),
    TORCHTITAN: ("torchtitan", "integration.torchtitan", "integration.torchtitan.checkpoint_manager"),
    RAY: ("ray", "integration.ray_train", "integration.ray_train.run_checkpoints"),
    TRANSFORMERS: ("transformers", "integration.transformers"),
    KUBERNETES: (
        "kubernetes",
        "integration.kubernetes.api_client:connect_api_server()",
        "integration.kubernetes.api_client:connected('config')",
        "integration.hyperpod.cluster.node_health:connect_node_labels()",
    ),
    NIXL: ("nixl_cu12 nixl_cu13", "peerstore.transport.nixl:NixlTransport()"),
    S3FS: (
        "s3fs",
        "tieredckpt.dcp.plain_checkpoints:plain_reader(DurableSettings(url='s3://b/x'), 'job', 1)",
        "tieredckpt.dcp.plain_checkpoints:plain_writer(DurableSettings(url='s3://b/x'), 'job', 1)",
    ),
    GCSFS: ("gcsfs", "tieredckpt.dcp.plain_checkpoints:plain_writer(DurableSettings(url='gs://b/x'), 'job', 1)"),
    HDFS: ("pyarrow", "tieredckpt.durable.filesystem_backends:FsspecBackend('hdfs://h/x', {})"),
}
CALL_ENTRIES = """
import importlib, sys
from tieredckpt.settings import DurableSettings

for entry in sys.argv[1:]:
    module, _, call = entry.partition(":")
    try:
        found = importlib.import_module(module)
        eval(call, {**vars(found), "DurableSettings": DurableSettings})
    except Exception as error:
        print(type(error).__name__, error, sep=": ")
"""


@pytest.mark.parametrize("text", ENTRIES)
def test_public_entry_raises_one_line(run_without, text):
    packages, *entries = ENTRIES[text]
    kind = "UsageError" if text in {S3FS, GCSFS, HDFS} else "MissingPackageError"
    code, out, err = run_without(packages, "-c", CALL_ENTRIES, *entries)
    assert (code, out, err) == (0, f"{kind}: {text}\n" * len(entries), "")


SHOW_HELP = """
import integration.finetune.worker, integration.hyperpod.operator.sim_cli, integration.kubernetes.controller
import elastic.cli, tieredckpt.cli

codes = [
    tieredckpt.cli.main(["--help"]), tieredckpt.cli.main(["cluster", "node-health", "--help"]),
    tieredckpt.cli.main(["export", "--help"]), tieredckpt.cli.main(["goodput", "--help"]),
    tieredckpt.cli.main(["agent", "run", "--help"]),
    elastic.cli.main(["--help"]), elastic.cli.main(["finetune", "--help"]), elastic.cli.main(["recipe", "--help"]),
    integration.kubernetes.controller.main(["--help"]), integration.hyperpod.operator.sim_cli.main(["--help"]),
    integration.finetune.worker.main(["--help"]),
]
assert not any(codes), codes
"""


def test_help_needs_no_extra(run_without):
    frameworks = "transformers accelerate safetensors lightning nvidia_resiliency_ext torchft torchtitan"
    packages = f"kubernetes {frameworks} nixl_cu12 nixl_cu13 s3fs opentelemetry hyperpod_elastic_agent"
    code, out, err = run_without(packages, "-c", SHOW_HELP)
    assert (code, err) == (0, "")
    assert out.count("sage: ") == 11
