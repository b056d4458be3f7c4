"""The coordinator process, which decides on the job's world. A restarted one relearns its state."""
