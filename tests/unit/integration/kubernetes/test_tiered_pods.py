"""The runtime for Kubeflow and the JobSet: shipped files, options, memory and Kubeflow's own models."""

from __future__ import annotations

import argparse

import pytest
import yaml

from elastic.cli.run import run_command
from elastic.launcher import EXIT_STATUS
from integration.hyperpod.job_manifest import ARENA_DIRECTORY
from integration.kubernetes.tiered_pods import (
    FINAL_STATUSES,
    MANIFESTS,
    PREEMPTED_STATUS,
    SECRET_NAME,
    SERVICE_ACCOUNT,
    SHIPPED,
    manifest_text,
    training_jobset,
    training_runtime,
)
from tests.support.doc_pages import DocPage
from tests.support.jobset_pods import JobSetPod, jobset_of_train_job, pod_spec
from tieredckpt.agent.__main__ import add_agent_arguments

TRAINER = {"image": "train:2", "args": ["/app/other.py", "--lr=1"], "numNodes": 4, "numProcPerNode": 8}


def jobset_with(trainer):
    spec = {"runtimeRef": {"name": "torch-tiered"}} | ({"trainer": trainer} if trainer else {})
    return jobset_of_train_job(training_runtime(), {"metadata": {"name": "llama"}, "spec": spec})


def pod_of(jobset):
    return JobSetPod(jobset, 1, "x7k2p", secrets={SECRET_NAME: "a secret"})


def run_options(pod):
    (container,) = pod.spec["containers"]
    program, command, *words = pod.words(container)
    assert (program, command) == ("elastic", "run")
    return run_command.make_context("run", words).params


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_manifest_equals_the_generated_one(name):
    assert (MANIFESTS / name).read_text(encoding="utf-8") == manifest_text(name)


@pytest.mark.parametrize("jobset", [jobset_with(TRAINER), jobset_with(None), training_jobset()])
def test_options_of_the_command_are_known_and_complete(jobset):
    options = run_options(pod_of(jobset))
    assert options["node"] == "llama-node-0-1-x7k2p"
    assert options["job"] == "llama"
    assert options["coordinator"] == "kubernetes:///llama-5f0c3a52-1b7e-4a36-9b0e-2f5a8f6f1f10"
    assert options["preempted_status"] == PREEMPTED_STATUS
    assert options["grace"] < pod_spec(jobset["spec"])["terminationGracePeriodSeconds"]
    assert options["script"].endswith(".py")  # an unknown option would be the script
    assert "$(" not in str(options)


def test_train_job_sets_nodes_image_and_script():
    options = run_options(pod_of(jobset_with(TRAINER)))
    assert (options["nnodes"], options["script"], options["args"]) == ("1:4", "/app/other.py", ("--lr=1",))
    assert run_options(pod_of(jobset_with(None)))["nnodes"] == "1:2"


def test_agent_and_trainer_share_directory_node_and_user():
    pod = pod_of(training_jobset())
    (agent,), (trainer,) = pod.spec["initContainers"], pod.spec["containers"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_agent_arguments(parser)
    args = parser.parse_args(pod.words(agent)[2:])
    environ = pod.environ(trainer)
    assert str(args.dir) == environ["TIEREDCKPT_AGENT_DIRECTORY"] == ARENA_DIRECTORY
    assert environ["TIEREDCKPT_AGENT_EMBEDDED"] == "0"
    assert str(args.node) == run_options(pod)["node"]
    assert agent["volumeMounts"] == trainer["volumeMounts"]
    assert agent["securityContext"]["runAsUser"] == trainer["securityContext"]["runAsUser"]
    assert agent["restartPolicy"] == "Always"


def test_pods_use_the_account_of_the_leadership_manifest():
    documents = list(yaml.safe_load_all((MANIFESTS / "training" / "leadership.yaml").read_text(encoding="utf-8")))
    assert [one["metadata"]["name"] for one in documents if one["kind"] == "ServiceAccount"] == [SERVICE_ACCOUNT]
    assert pod_spec(training_jobset()["spec"])["serviceAccountName"] == SERVICE_ACCOUNT


def test_only_ends_of_the_job_fail_all_pods():
    ends = {status for status in EXIT_STATUS.values() if status}
    assert {int(status) for status in FINAL_STATUSES} == ends
    assert PREEMPTED_STATUS not in ends


def lost_fields(sent, kept, at=""):
    """Return the fields of ``sent`` that ``kept`` lacks or changes."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [one for key in sent for one in lost_fields(sent[key], kept.get(key), f"{at}.{key}")]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return [
            one for number in range(len(sent)) for one in lost_fields(sent[number], kept[number], f"{at}[{number}]")
        ]
    return [] if sent == kept else [at]


def test_kubeflow_models_know_every_field():
    """Kubeflow's own models drop unknown fields and refuse wrong types."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install tieredckpt[kubeflow]")
    for kind, document in (
        (models.TrainerV1alpha1ClusterTrainingRuntime, training_runtime()),
        (models.JobsetV1alpha2JobSet, training_jobset()),
        (models.JobsetV1alpha2JobSet, jobset_with(TRAINER)),
    ):
        assert lost_fields(document, kind.from_dict(document).to_dict()) == []


def test_page_train_job_is_known_and_runs_in_four_pods(tmp_path):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install tieredckpt[kubeflow]")
    train_job = yaml.safe_load(DocPage("how-to/kubeflow.md", tmp_path, paths={}).block("apiVersion: trainer"))
    assert lost_fields(train_job, models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict()) == []
    assert train_job["spec"]["runtimeRef"]["name"] == training_runtime()["metadata"]["name"]
    pod = pod_of(jobset_of_train_job(training_runtime(), train_job))
    (container,) = pod.spec["containers"]
    assert run_options(pod)["nnodes"] == "1:4"
    assert pod.environ(container)["TIEREDCKPT_DURABLE_URL"] == "s3://bucket/llama"
