"""The public API: its types, its names, and imports without side effects."""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PUBLIC = {
    "tieredckpt": {
        "CheckpointDamagedError",
        "CheckpointDeletedError",
        "CheckpointLostError",
        "CheckpointNotFoundError",
        "CheckpointTornError",
        "Checkpointer",
        "DurableRefusedError",
        "DurableStep",
        "FormatVersionError",
        "JobTakenOverError",
        "MismatchError",
        "MissingStepError",
        "NonFiniteStateError",
        "NullCheckpointer",
        "PeersLostError",
        "RestoreProofError",
        "SaveFailedError",
        "Settings",
        "SettingsError",
        "StoreBusyError",
        "TierUnavailableError",
        "TieredCheckpointError",
        "TieredReader",
        "TieredWriter",
        "UntrustedObjectError",
        "UsageError",
        "enable_urls",
        "load",
        "save",
    },
    "elastic": {
        "BatchCache",
        "BatchPlan",
        "ElasticDataLoader",
        "ElasticError",
        "LRScaler",
        "Loop",
        "LoopStep",
        "StepHooks",
        "ExactGradients",
        "RankPlan",
        "RNGState",
        "RecoveryPolicy",
        "World",
        "elastic_event_detected",
        "recoverable",
        "run",
        "seeded",
    },
    "peerstore": {
        "AgentPaths",
        "Client",
        "PeerStoreError",
        "ShardDamagedError",
        "ShardKey",
        "ShardNotFoundError",
        "ShardRecord",
        "Store",
        "StoreSettings",
        "UnavailableError",
        "VersionId",
    },
}
"""Frozen: a name is added here on purpose, and removed with a major release."""


def run(*command, **more):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environ, **more)


def wrong_lines():
    return {n for n, line in enumerate((HERE / "misuse.py").read_text().splitlines(), 1) if line.endswith("# WRONG")}


@pytest.fixture
def folder(tmp_path):
    """A user's own folder, without this repository's configuration."""
    for name in ("user.py", "misuse.py"):
        shutil.copy(HERE / name, tmp_path)
    return tmp_path


def mypy(folder):
    """mypy's errors about both files, as a user's strict configuration gives them."""
    (folder / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nimplicit_reexport = True\n")
    done = run(sys.executable, "-m", "mypy", "--output", "json", "user.py", "misuse.py", cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(one["file"], one["line"]): one["message"] for one in found if one["severity"] == "error"}


def pyright(folder):
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": ["."], "typeCheckingMode": "standard"}))
    done = run(sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, cwd=folder)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    errors = [one for one in report["generalDiagnostics"] if one["severity"] == "error"]
    return {(Path(one["file"]).name, one["range"]["start"]["line"] + 1): one["message"] for one in errors}


@pytest.mark.parametrize("checker", [pytest.param(mypy, marks=pytest.mark.nightly), pyright])
def test_type_checker_accepts_user_code_and_finds_its_mistakes(checker, folder):
    found = checker(folder)
    assert {place: text for place, text in found.items() if place[0] == "user.py"} == {}
    assert {line for name, line in found if name == "misuse.py"} == wrong_lines()
    assert {name for name, _ in found} == {"misuse.py"}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_few_and_known(package):
    module = __import__(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    # Errors do not count: a caller that catches one needs its name, and meets no other.
    assert len([name for name in module.__all__ if not name.endswith("Error")]) <= 16
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_wheel_contains_py_typed(tmp_path):
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path)
    for name in PUBLIC:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), ".", cwd=tmp_path)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {"tieredckpt/py.typed", "peerstore/py.typed"} <= packed
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in packed)
    modules = {str(path.relative_to(ROOT)) for name in PUBLIC for path in (ROOT / name).rglob("*.py")}
    assert modules <= packed


HEAVY = {"torch", "boto3", "botocore", "obstore", "s3fs", "numpy"}
IMPORT = """
import json, os, signal, sys, threading, warnings
reads = []
class Watched(type(os.environ)):
    def __getitem__(self, key):
        reads.append(key)
        return super().__getitem__(key)
environ = os.environ
handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
own = [f"/dev/shm/{{name}}-{{os.getuid()}}" for name in ("tieredckpt", "peerstore")]
files = [os.path.exists(path) for path in own]
{prepare}
before = set(sys.modules)
real, os.environ.__class__ = os.environ.__class__, Watched
reads.clear()
{module}
os.environ.__class__ = real
print(json.dumps({{
    "reads": [key.decode() if isinstance(key, bytes) else key for key in reads],
    "threads": [t.name for t in threading.enumerate()],
    "handlers": handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
    "heavy": sorted(m for m in set(sys.modules) - before if m.split(".")[0] in {heavy}),
    "files": files != [os.path.exists(path) for path in own],
    "loggers": [type(h).__name__ for h in __import__("logging").getLogger().handlers],
}}))
"""


def effects(module, prepare=""):
    done = run(
        sys.executable, "-W", "error", "-c", textwrap.dedent(IMPORT).format(module=module, prepare=prepare, heavy=HEAVY)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["tieredckpt", "peerstore", "tieredckpt.agent.agent_service", "tieredckpt.settings"])
def test_import_has_no_side_effects_and_stays_light(module):
    found = effects(f"import {module}")
    assert [key for key in found["reads"] if key.startswith(("TIERED", "PEER", "AWS", "LOCAL_", "RANK", "WORLD"))] == []
    assert found["threads"] == ["MainThread"]
    assert found["handlers"]
    assert found["heavy"] == []
    assert (found["files"], found["loggers"]) == (False, [])


def test_import_of_the_torch_half_has_no_side_effects():
    prepare = "warnings.simplefilter('ignore'); import torch, torch.distributed.checkpoint, torch.distributed.tensor"
    found = effects("from tieredckpt import Checkpointer, TieredReader, TieredWriter", prepare)
    assert [key for key in found["reads"] if key.startswith(("TIERED", "PEER", "AWS", "LOCAL_", "RANK", "WORLD"))] == []
    assert found["threads"] == ["MainThread"]
    assert found["handlers"]
    assert [name for name in found["heavy"] if name.split(".")[0] != "torch"] == []
    assert (found["files"], found["loggers"]) == (False, [])


def test_each_package_reads_the_environment_in_one_module():
    def reads(path):
        text = path.read_text()
        if "environ" not in text and "getenv" not in text:
            return False
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
        return any(n.attr in ("environ", "getenv") and isinstance(n.value, ast.Name) for n in nodes)

    paths = [path for package in PUBLIC for path in (ROOT / package).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in paths if reads(path)}
    # Variables for ranks, for child processes and for numpy are not configuration.
    inherited = {
        *("tieredckpt/agent/agent_client.py", "elastic/batch_inference/map_node.py"),
        *("elastic/rendezvous/store_servers.py", "elastic/launcher.py"),
        *("elastic/supervisor/supervisor.py", "elastic/launcher.py"),
        *(
            "elastic/workers/process_groups.py",
            "elastic/workers/launch_environment.py",
            "elastic/workers/train_loop.py",
        ),
        *("elastic/workers/rank_timeline.py", "tieredckpt/checkpointer/progress_hook.py"),
        *("elastic/workers/injected_faults.py", "elastic/fault_injection/fault_actions.py", "peerstore/cli.py"),
    }
    # The event log is written before settings are read, and read where they cannot be.
    event_log = {"tieredckpt/event_log/log_writer.py", "tieredckpt/event_log/log_reader.py"}
    parts = {"elastic/settings.py", *event_log}
    left = readers - inherited - parts - {"tieredckpt/settings.py", "peerstore/settings.py"}
    shown = ("tieredckpt/demo/", "tieredckpt/cli/", "elastic/demo/")
    assert {name for name in left if not name.startswith(shown)} == set()
