"""Resources made of settings: AWS's own models accept each one, and no setting changes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_policy import policy_from_keys
from integration.hyperpod.job_manifest import (
    ARENA_DIRECTORY,
    TRAINER_CONTAINER,
    JobManifestError,
    MemoryLocation,
    TrainingJob,
    job_manifest,
)
from integration.hyperpod.job_resource import JobSpecError, parse_job_resource, write_elastic_policy, write_job_resource
from tests.support.example_counts import examples
from tieredckpt.settings import Settings, load_settings, settings_from_mapping

aws = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")

RUN = ("hyperpodrun", "--nproc-per-node=auto", "--tee=3", "train.py")
seconds = st.integers(1, 100_000).map(float)
names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
plain = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@st.composite
def policies(draw):
    least = draw(st.integers(1, 50))
    most = draw(st.integers(least, 100))
    sizes = draw(
        st.fixed_dictionaries({"replica_increment_step": st.none() | st.integers(1, 10)})
        | st.just({"replica_discrete_values": tuple(sorted({least, (least + most) // 2, most}))})
    )
    if "replica_discrete_values" in sizes:
        least, most = sizes["replica_discrete_values"][0], sizes["replica_discrete_values"][-1]
    limit = st.none() | st.integers(1, 20)
    return ScalingPolicy(
        min_replicas=least,
        max_replicas=most,
        **sizes,
        scaling_timeout_s=draw(seconds),
        graceful_shutdown_timeout_s=draw(seconds),
        faulty_scale_down_timeout_s=draw(seconds),
        scale_up_snooze_s=draw(seconds),
        startup_timeout_s=draw(st.none() | seconds),
        eval_period_s=draw(seconds),
        num_restart_before_full_job_restart=draw(limit),
        max_full_job_restarts=draw(limit),
        job_max_retry_count=draw(limit),
        max_num_repeat_offenders_to_avoid=draw(st.integers(0, 5)),
    )


@st.composite
def job_settings(draw, embedded):
    tree = {
        "durable": {
            "url": draw(st.sampled_from(["", "s3://bucket/$(HOME)/llama", "/fsx/llama"])),
            "options": draw(st.dictionaries(names, names, max_size=2)),
            "hashed_keys": draw(st.booleans()),
            "bandwidth": draw(st.sampled_from(["", "1GiB"])),
        },
        "memory": {"on_busy": draw(st.sampled_from(["wait", "skip"])), "wait_s": draw(st.sampled_from([1.5, 60]))},
        "peer": {"copies": draw(st.integers(1, 3)), "streams": draw(st.integers(1, 8))},
    }
    if embedded:
        tree["agent"] = {"job_ttl_s": draw(seconds), "slots_per_rank": draw(st.integers(2, 5))}
    return settings_from_mapping(tree)


@st.composite
def jobs(draw):
    memory = draw(st.sampled_from(list(MemoryLocation)))
    rule = {
        "name": "hang",
        "logPattern": r".*loss=(\d+).*",
        "expectedRecurringFrequencyInSeconds": 600,
        "metricThreshold": 3,
        "operator": "gt",
    }
    return TrainingJob(
        name=draw(names),
        namespace=draw(names),
        image=draw(st.sampled_from(["training:1", "repo.example/training@sha256:00"])),
        command=draw(st.sampled_from([RUN, ["sh", "-c", "exec hyperpodrun train.py"]])),
        policy=draw(policies()),
        settings=draw(job_settings(memory is MemoryLocation.EMBEDDED)),
        memory=memory,
        memory_size="" if memory is MemoryLocation.NODE else draw(st.sampled_from(["64GiB", "100Gi", "1.5TiB", "5GB"])),
        nproc=draw(st.sampled_from(["auto", "gpu", "cpu", "8"])),
        spares=draw(st.integers(0, 3)),
        resources=draw(st.sampled_from([{}, {"nvidia.com/gpu": 8, "memory": "200Gi", "vpc.amazonaws.com/efa": 32}])),
        environment=draw(st.dictionaries(st.just("NCCL_DEBUG"), plain)),
        secret=draw(st.just("") | names),
        cluster_config=draw(st.sampled_from(["", "tiered-storage"])),
        queue=draw(st.just("") | names),
        priority=draw(st.sampled_from(["", "high-priority"])),
        topology=draw(st.sampled_from(["", "topology.k8s.aws/network-node-layer-3"])),
        instance_type=draw(st.sampled_from(["", "ml.p5.48xlarge"])),
        user=draw(st.none() | st.integers(1, 65535)),
        log_rules=draw(st.sampled_from([(), (rule,)])),
    )


def accepted(document):
    """Check that AWS's models accept the document and hold exactly its fields."""
    spec = document["spec"]
    found = aws._HyperPodPytorchJob.model_validate(spec, by_name=True, by_alias=False)
    held = found.model_dump(exclude_unset=True, by_alias=False)
    assert held == spec
    return found


@settings(max_examples=examples(40))
@given(jobs())
def test_awss_models_take_every_resource(job):
    document = job_manifest(job)
    accepted(document)
    assert (document["apiVersion"], document["kind"]) == ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob")


@pytest.mark.parametrize(
    "sizes", [{"replica_increment_step": 2}, {"replica_discrete_values": (2, 4, 8)}], ids=["steps", "discrete"]
)
def test_aws_command_line_generates_the_same_job(sizes):
    template = pytest.importorskip("hyperpod_pytorch_job_template.v1_1.model")
    policy = ScalingPolicy(min_replicas=2, max_replicas=8, **sizes, job_max_retry_count=3)
    ours = job_manifest(
        TrainingJob(
            name="llama",
            image="training:1",
            command=["hyperpodrun", "train.py"],
            policy=policy,
            nproc="8",
            queue="research",
            priority="high-priority",
            topology="topology.k8s.aws/network-node-layer-3",
            instance_type="ml.p5.48xlarge",
        )
    )
    theirs = template.PyTorchJobConfig(
        job_name="llama",
        namespace="default",
        image="training:1",
        command=["hyperpodrun", "train.py"],
        node_count=2,
        max_node_count=8,
        max_retry=3,
        tasks_per_node=8,
        queue_name="research",
        priority="high-priority",
        preferred_topology="topology.k8s.aws/network-node-layer-3",
        instance_type="ml.p5.48xlarge",
        elastic_scaling_timeout_in_seconds=60,
        elastic_graceful_shutdown_timeout_in_seconds=600,
        **{f"elastic_{name}": list(value) if isinstance(value, tuple) else value for name, value in sizes.items()},
    )
    made = theirs.to_domain().model_dump(exclude_none=True, exclude_unset=True, by_alias=False)
    own = {"faultyScaleDownTimeoutInSeconds"}  # theirs lacks this key
    elastic = {key: value for key, value in ours["spec"]["elasticPolicy"].items() if key not in own}
    assert made["elasticPolicy"] == elastic
    assert made["metadata"]["labels"] == ours["metadata"]["labels"]
    assert made["runPolicy"].items() <= ours["spec"]["runPolicy"].items()
    assert made["nprocPerNode"] == ours["spec"]["nprocPerNode"]
    (they,), (we,) = made["replicaSpecs"], ours["spec"]["replicaSpecs"]
    assert (they["replicas"], they["maxReplicas"]) == (we["replicas"], we["maxReplicas"])
    theirs_pod, our_pod = they["template"], we["template"]
    assert theirs_pod["metadata"]["annotations"] == our_pod["metadata"]["annotations"]
    assert theirs_pod["spec"]["nodeSelector"] == our_pod["spec"]["nodeSelector"]


def test_aws_models_reject_unknown_fields():
    document = job_manifest(TrainingJob(name="llama", image="i", command=RUN))
    document["spec"]["replicaSpecs"][0]["template"]["spec"]["securityContext"] = {"fsGroup": 1}
    with pytest.raises(ValueError, match="fsGroup"):
        accepted(document)


@settings(max_examples=examples(40))
@given(policies())
def test_policy_round_trips_through_the_manifest(policy):
    document = job_manifest(TrainingJob(name="llama", image="i", command=RUN, policy=policy))
    run = document["spec"]["runPolicy"]
    if not len(policy.sizes) > 1:
        assert "elasticPolicy" not in document["spec"]
        assert "maxReplicas" not in document["spec"]["replicaSpecs"][0]
        return
    restart = dict(run["restartPolicy"])
    unlimited = {
        name: None
        for key, name in (
            ("numRestartBeforeFullJobRestart", "num_restart_before_full_job_restart"),
            ("maxFullJobRestarts", "max_full_job_restarts"),
        )
        if key not in restart
    }
    again = policy_from_keys(
        write_elastic_policy(policy),
        restart,
        job_max_retry_count=run.get("jobMaxRetryCount"),
        startup_timeout_s=policy.startup_timeout_s,
        **unlimited,
    )
    assert again.sizes == policy.sizes
    kept = ("replica_increment_step", "replica_discrete_values", "min_replicas", "max_replicas", "replicas")
    for name in set(ScalingPolicy.__struct_fields__) - set(kept):
        assert getattr(again, name) == getattr(policy, name), name


@settings(max_examples=examples(40))
@given(policies())
def test_the_reference_operator_reads_the_same_job(policy):
    job = parse_job_resource(job_manifest(TrainingJob(name="llama", image="i", command=RUN, policy=policy, spares=1)))
    assert job.elastic is (len(policy.sizes) > 1)
    assert job.policy.sizes == (policy.sizes if len(policy.sizes) > 1 else (policy.smallest_size,))
    assert job.policy.initial_nodes == policy.smallest_size
    assert job.spares == 1
    names = ["eval_period_s", "num_restart_before_full_job_restart", "max_full_job_restarts", "job_max_retry_count"]
    if len(policy.sizes) > 1:
        names += ["scaling_timeout_s", "graceful_shutdown_timeout_s", "faulty_scale_down_timeout_s"]
    assert [getattr(job.policy, name) for name in names] == [getattr(policy, name) for name in names]


@settings(max_examples=examples(40))
@given(jobs())
def test_parsed_resource_is_written_unchanged(job):
    document = job_manifest(job)
    metadata = document["metadata"]
    again = write_job_resource(
        parse_job_resource(document), namespace=metadata["namespace"], labels=metadata.get("labels")
    )
    assert again == document


def test_every_field_of_the_run_policy_is_written_and_parsed():
    document = job_manifest(TrainingJob(name="llama", image="i", command=RUN))
    document["spec"]["runPolicy"] |= {
        "cleanPodPolicy": "All",
        "suspend": True,
        "jobMaxRetryCount": 0,
        "startupDeadlineSeconds": 1,
        "activeDeadlineSeconds": 2,
        "faultDeadlineSeconds": 3,
        "ttlSecondsAfterFinished": 60,
        "logMonitoringConfiguration": [{"name": "a", "logPattern": "x", "faultOnMatch": True}],
    }
    assert write_job_resource(parse_job_resource(document)) == document


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"name": "a", "logPattern": "x", "pattern": "y"}, "log rule a: pattern is unknown"),
        ({"logPattern": "x"}, "log rule without a name: name is missing"),
        ({"name": "a", "logPattern": "x", "operator": "near"}, "log rule a: operator is none of gt, lt"),
        ({"name": "a", "logPattern": "x", "metricThreshold": True}, "metricThreshold is True, must be int"),
        ({"name": "a", "logPattern": "x", "faultOnMatch": 1}, "faultOnMatch is 1, must be bool"),
    ],
)
def test_wrong_log_rule_has_the_same_error_in_both_directions(rule, text):
    with pytest.raises(JobManifestError) as written:
        TrainingJob(name="llama", image="i", command=RUN, log_rules=[rule])
    document = job_manifest(TrainingJob(name="llama", image="i", command=RUN))
    document["spec"]["runPolicy"]["logMonitoringConfiguration"] = [rule]
    with pytest.raises(JobSpecError) as parsed:
        parse_job_resource(document)
    assert text in str(written.value)
    assert text in str(parsed.value)


def environment(document):
    """Return a container's variables with their references resolved, as Kubernetes does."""
    container = document["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    known = {"POD_IP": "10.0.0.1"}
    for variable in container["env"]:
        if "value" in variable:
            kept = variable["value"].replace("$$(", "\0").replace("$(POD_IP)", known["POD_IP"])
            known[variable["name"]] = kept.replace("\0", "$(")
    return known


@settings(max_examples=examples(40))
@given(jobs())
def test_trainers_have_the_settings_that_were_given(job):
    variables = environment(job_manifest(dataclasses.replace(job, cluster_config="")))
    found = load_settings(variables)
    assert dataclasses.replace(found, agent=job.settings.agent) == job.settings
    assert str(found.agent_directory) == ARENA_DIRECTORY
    assert found.agent.embedded is (job.memory is MemoryLocation.EMBEDDED)
    if job.memory is MemoryLocation.EMBEDDED:
        assert found.agent.budget == job.memory_size
        assert found.agent.job_ttl_s == job.settings.agent.job_ttl_s
        assert found.agent.peers == "10.0.0.1:7070"


@settings(max_examples=examples(40))
@given(jobs())
def test_pod_defines_its_mounts_and_has_unique_names(job):
    pod = job_manifest(job)["spec"]["replicaSpecs"][0]["template"]["spec"]
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        variables = [variable["name"] for variable in container["env"]]
        assert len(set(variables)) == len(variables)
        ports = [port["name"] for port in container["ports"]]
        assert len(set(ports)) == len(ports)
    assert pod["containers"][0]["name"] == TRAINER_CONTAINER
    assert (job.memory is MemoryLocation.NODE) == any("hostPath" in volume for volume in pod["volumes"])
    assert (job.memory is MemoryLocation.SIDECAR) == ("initContainers" in pod)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "Llama"}, "name 'Llama' is no DNS label"),
        ({"command": ()}, "command is empty"),
        ({"nproc": "0"}, "nproc '0'"),
        ({"spares": -1}, "spares is -1"),
        ({"memory": MemoryLocation.SIDECAR}, "needs memory_size"),
        ({"memory_size": "1GiB"}, "has its own size"),
        ({"memory": MemoryLocation.EMBEDDED, "memory_size": "much"}, "memory_size 'much' is not a size"),
        ({"resources": {"memory": "lots"}}, "resources: memory 'lots' is not a size"),
        ({"settings": settings_from_mapping({"peer": {"secret": "x" * 32}})}, "name a Kubernetes Secret"),
        ({"settings": settings_from_mapping({"agent": {"budget": "1GiB"}})}, "has no effect"),
        ({"settings": settings_from_mapping({"durable": {"options": {"a": "1,2"}}})}, "commas"),
        ({"environment": {"TIEREDCKPT_AGENT_DIRECTORY": "/x"}}, "TIEREDCKPT_AGENT_DIRECTORY is made of the settings"),
        ({"log_rules": [{"name": "a", "logPattern": "x", "faultOnMatch": True}]}, "faultOnMatch is not known to AWS"),
        ({"log_rules": [{"name": "a", "logPattern": "x", "metricThreshold": 2.5}]}, "metricThreshold is 2.5"),
        ({"log_rules": [{"name": "a", "logPattern": "x", "operator": ">"}]}, "operator is none of gt"),
        ({"log_rules": [{"name": "a"}]}, "logPattern is missing"),
    ],
)
def test_impossible_jobs_cannot_be_made(given, why):
    with pytest.raises(JobManifestError, match=why) as refused:
        TrainingJob(**{"name": "llama", "image": "i", "command": RUN, **given})
    assert isinstance(refused.value, PolicyError)


def test_all_manifest_problems_are_reported_at_once():
    with pytest.raises(JobManifestError) as refused:
        TrainingJob(name="A", image="", command=(), spares=-1)
    for why in ("no DNS label", "image is empty", "command is empty", "spares"):
        assert why in str(refused.value)


def test_no_settings_make_no_variables_but_the_agents_place():
    found = environment(job_manifest(TrainingJob(name="llama", image="i", command=RUN, settings=Settings())))
    ours = {"TIEREDCKPT_AGENT_DIRECTORY": ARENA_DIRECTORY, "TIEREDCKPT_AGENT_EMBEDDED": "0"}
    assert found == {"POD_IP": "10.0.0.1", **ours}
