"""Megatron-Core: distributed checkpoints as steps of a job."""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.megatron", "'tieredckpt[megatron]'"):
    from integration.megatron.sharded_checkpoints import (
        complete_exported_folder,
        load_sharded_state,
        save_sharded_state,
    )
    from integration.megatron.sharded_strategies import TieredLoadStrategy, TieredSaveStrategy

__all__ = [
    "TieredLoadStrategy",
    "TieredSaveStrategy",
    "complete_exported_folder",
    "load_sharded_state",
    "save_sharded_state",
]
