"""The training loop's interface: Checkpointer, save handles, restore, preemption, progress hooks."""
