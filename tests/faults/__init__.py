"""Random faults in real jobs, and what must always hold: ``python -m tests.faults`` (docs/how-to/faults.md)."""
