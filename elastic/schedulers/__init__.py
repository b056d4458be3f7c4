"""What a process that a scheduler started on every machine of a job is told of that job, by its environment."""
