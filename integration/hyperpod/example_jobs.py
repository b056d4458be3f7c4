"""The example manifests, and ``python -m`` to regenerate them. A development tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.job_manifest import MemoryLocation, TrainingJob, job_manifest, manifest_yaml
from tieredckpt.settings import settings_from_mapping

EXAMPLES_FOLDER = Path(__file__).parent / "manifests" / "examples"
EXAMPLE_COMMAND = (
    "hyperpodrun",
    "--nproc-per-node=auto",
    "--tee=3",
    "--log-dir=/tmp/hyperpod",
    "/opt/training/train.py",
)
EXAMPLE_POLICY = ScalingPolicy(
    min_replicas=2,
    max_replicas=8,
    replica_increment_step=2,
    scaling_timeout_s=600,
    graceful_shutdown_timeout_s=600,
    faulty_scale_down_timeout_s=60,
    startup_timeout_s=1800,
)
EXAMPLE_SETTINGS = settings_from_mapping({"durable": {"url": "s3://bucket/llama", "every": 200}})
EXAMPLE_RESOURCES = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}

EXAMPLE_JOBS = {
    "hyperpod-job.yaml": (
        "Elastic from 2 to 8 nodes; checkpoints in the memory of the node agents (../node-agent).",
        TrainingJob(
            name="llama",
            image="training:1",
            command=EXAMPLE_COMMAND,
            policy=EXAMPLE_POLICY,
            settings=EXAMPLE_SETTINGS,
            resources=EXAMPLE_RESOURCES,
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
            command=EXAMPLE_COMMAND,
            policy=EXAMPLE_POLICY,
            settings=EXAMPLE_SETTINGS,
            memory=MemoryLocation.SIDECAR,
            memory_size="512GiB",
            resources=EXAMPLE_RESOURCES,
            secret="llama-peers",  # noqa: S106 - the name of one
            instance_type="ml.p5.48xlarge",
        ),
    ),
}


def example_text(about: str, document: dict[str, Any]) -> str:
    return f"# {about}\n# Made by integration/hyperpod/example_jobs.py.\n{manifest_yaml(document)}"


def main() -> None:
    for name, (about, job) in EXAMPLE_JOBS.items():
        (EXAMPLES_FOLDER / name).write_text(example_text(about, job_manifest(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
