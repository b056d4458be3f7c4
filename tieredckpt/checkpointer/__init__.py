"""The training loop's interface: Checkpointer, its save handles, its restore, preemption and progress hooks."""
