"""A job's settings from the environment that Slurm, torchrun or Kubeflow gives to its processes."""
