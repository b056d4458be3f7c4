"""The HyperPod jobs in ``manifests/examples``: ``python -m integration.hyperpod.example_jobs`` writes them anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic.world.policy import ScalingPolicy
from integration.hyperpod.job import TrainingJob, as_yaml, resource
from integration.hyperpod.memory import Memory
from tieredckpt.settings import settings_from

FOLDER = Path(__file__).parent / "manifests" / "examples"
RUN = (
    "hyperpodrun",
    "--nproc-per-node=auto",
    "--tee=3",
    "--log-dir=/tmp/hyperpod",
    "/opt/training/train.py",
)
POLICY = ScalingPolicy(
    min_replicas=2,
    max_replicas=8,
    replica_increment_step=2,
    scaling_timeout_s=600,
    graceful_shutdown_timeout_s=600,
    faulty_scale_down_timeout_s=60,
    startup_timeout_s=1800,
)
SETTINGS = settings_from({"durable": {"url": "s3://bucket/llama", "every": 200}})
GPUS = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}

JOBS = {
    "hyperpod-job.yaml": (
        "Elastic from 2 to 8 nodes; checkpoints in the memory of the node agents (../node-agent).",
        TrainingJob(
            name="llama",
            image="training:1",
            command=RUN,
            policy=POLICY,
            settings=SETTINGS,
            resources=GPUS,
            secret="llama-peers",  # noqa: S106 - the name of one
            instance_type="ml.p5.48xlarge",
            topology="topology.k8s.aws/network-node-layer-3",
        ),
    ),
    "hyperpod-job-sidecar.yaml": (
        "The same without a node agent: one in each pod, 512 GiB of it. Needs no host path; Kubernetes 1.29 or later.",
        TrainingJob(
            name="llama",
            image="training:1",
            command=RUN,
            policy=POLICY,
            settings=SETTINGS,
            memory=Memory.SIDECAR,
            memory_size="512GiB",
            resources=GPUS,
            secret="llama-peers",  # noqa: S106 - the name of one
            instance_type="ml.p5.48xlarge",
        ),
    ),
}


def written(about: str, document: dict[str, Any]) -> str:
    return f"# {about}\n# Made by integration/hyperpod/example_jobs.py.\n{as_yaml(document)}"


def main() -> None:
    for name, (about, job) in JOBS.items():
        (FOLDER / name).write_text(written(about, resource(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
