"""Hugging Face Accelerate: the state of an ``Accelerator`` as steps of a job."""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.accelerate", "'tieredckpt[accelerate]'"):
    from integration.accelerate.accelerator_steps import restore_state, save_state

__all__ = ["restore_state", "save_state"]
