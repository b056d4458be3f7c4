"""Kubeflow Trainer: the progress of a run in the status of its TrainJob."""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.kubeflow", "'tieredckpt[kubeflow]'"):
    from integration.kubeflow.train_job_status import TrainJobStatus

__all__ = ["TrainJobStatus"]
