"""The coordinator process, which decides on the job's world. Every state it keeps can be learned again."""
