"""From a chosen step to live tensors: index, verified reads, execution, and proof of the result."""
