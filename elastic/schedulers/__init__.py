"""Settings of a job from the environment variables of Slurm, torchrun or Kubeflow."""
