"""``python -m integration.sagemaker.shim``: run a script with AWS's module paths and these classes.

::

    torchrun --nproc-per-node=8 -m integration.sagemaker.shim train.py --its-own arguments

runs ``train.py`` with ``amzn_sagemaker_checkpointing`` made of this package's classes. If AWS's library is installed,
this is an error, because it would be unclear which of the two the script uses.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from tieredckpt.errors import UsageError

_ROOT = "amzn_sagemaker_checkpointing"
_NAMES = {
    "": (),
    ".checkpointing": (),
    ".checkpointing.filesystem": ("SageMakerTieredStorageReader", "SageMakerTieredStorageWriter"),
    ".checkpointing.filesystem.filesystem": ("SageMakerTieredStorageReader", "SageMakerTieredStorageWriter"),
    ".checkpointing.filesystem.exceptions": (
        "SageMakerInMemoryTierError",
        "SageMakerS3TierError",
        "SageMakerTieredStorageConfigError",
        "SageMakerTieredStorageError",
    ),
    ".config": (),
    ".config.sagemaker_checkpoint_config": ("SageMakerCheckpointConfig",),
    ".config.s3_path_strategy": ("DefaultS3PathStrategy", "RayS3PathStrategy", "S3PathStrategy"),
}


@contextmanager
def aws_modules_replaced() -> Iterator[None]:
    """Bind AWS's public module paths to this package while the block runs.

    Raise :class:`UsageError` if AWS's library is installed.
    """
    if _ROOT in sys.modules or importlib.util.find_spec(_ROOT) is not None:
        raise UsageError(
            f"{_ROOT} is installed, and it is not shadowed: change the import to integration.sagemaker, or uninstall it"
        )
    modules = {_ROOT + path: _module(_ROOT + path, names) for path, names in _NAMES.items()}
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


def _module(name: str, public: Sequence[str]) -> ModuleType:
    package = import_module("integration.sagemaker")
    module = ModuleType(name, "Stands in for a module of AWS's library.")
    is_package = any(other.startswith(f"{name.removeprefix(_ROOT)}.") for other in _NAMES)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    module.__all__ = list(public)  # type: ignore[attr-defined]
    for attribute in public:
        setattr(module, attribute, getattr(package, attribute))
    return module


def main(argv: Sequence[str]) -> int:
    """Run a script as ``python SCRIPT ARGS`` would."""
    if not argv:
        print("which script? python -m integration.sagemaker.shim SCRIPT [ARGS]", file=sys.stderr)
        return 2
    with aws_modules_replaced():
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"shim: {error}", file=sys.stderr)
        sys.exit(2)
