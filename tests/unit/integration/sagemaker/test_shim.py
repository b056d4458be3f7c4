"""AWS's module paths import this package only if AWS's library is not installed."""

import importlib.util
import sys

import pytest

import integration.sagemaker as ours
from integration.sagemaker import shim
from tieredckpt.errors import UsageError

ROOT = "amzn_sagemaker_checkpointing"
SCRIPT = """
import sys
from amzn_sagemaker_checkpointing.checkpointing.filesystem import SageMakerTieredStorageReader
from amzn_sagemaker_checkpointing.checkpointing.filesystem.exceptions import SageMakerTieredStorageError
from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import SageMakerTieredStorageWriter
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
import amzn_sagemaker_checkpointing.config.s3_path_strategy as layouts

config = SageMakerCheckpointConfig(namespace="job", world_size=1)
found.append((sys.argv, SageMakerTieredStorageWriter(config, step=3).step, __name__))
found.append((SageMakerTieredStorageReader, SageMakerTieredStorageError, layouts.RayS3PathStrategy))
"""


@pytest.fixture
def not_installed(monkeypatch):
    """Simulate an environment without AWS's library."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name == ROOT or name.startswith(f"{ROOT}.")}
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == ROOT else real(name, *more))
    yield
    assert not [name for name in sys.modules if name.startswith(ROOT)]
    sys.modules.update(kept)


def test_a_script_that_was_not_changed(not_installed, tmp_path, monkeypatch):
    found = []
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr("builtins.found", found, raising=False)
    monkeypatch.setattr(sys, "argv", ["shim"])
    assert shim.main([str(script), "--lr", "1"]) == 0
    assert found[0] == ([str(script), "--lr", "1"], 3, "__main__")
    assert found[1] == (
        ours.SageMakerTieredStorageReader,
        ours.SageMakerTieredStorageError,
        ours.RayS3PathStrategy,
    )


def test_an_installed_library_is_not_shadowed():
    pytest.importorskip(ROOT)
    with pytest.raises(UsageError, match="not shadowed"), shim.aws_modules_replaced():
        pass


def test_missing_script_is_refused_by_the_launcher(capsys):
    assert shim.main([]) == 2
    assert "which script" in capsys.readouterr().err
