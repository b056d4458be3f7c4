"""Random faults in real jobs, and the rules of a correct run (docs/how-to/faults.md)."""
