"""Random faults in real jobs, and what must hold whatever happens: ``python -m tests.faults``, ``docs/faults.md``."""
