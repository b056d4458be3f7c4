"""``tieredckpt cluster`` against an endpoint that validates requests with AWS's model."""

import functools
import json

import boto3
import pytest
from botocore.loaders import JSONFileLoader
from botocore.stub import Stubber

from integration.hyperpod.cluster.tiered_storage_config import (
    HyperPodClusterApi,
    TieredStorageConfig,
    TieredStorageMode,
    read_tiered_storage_config,
    region_of_arn,
)
from tests.support.sagemaker_api import ARN, FakeSageMaker, serve
from tieredckpt import cli
from tieredckpt.cli.exit_codes import CommandError, ExitCode

ON = {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 30}


_load = functools.cache(JSONFileLoader().load_file)


@pytest.fixture(autouse=True)
def models(monkeypatch):
    """Cache AWS's model of SageMaker, which takes most of a command's time to read."""
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda _, path: _load(path))


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def cluster(capsys):
    """Return a function that runs a command against a cluster and returns exit code, stdout and stderr."""
    from tieredckpt.cli import main

    def run(sagemaker, command, *words, name="ml"):
        with serve(sagemaker) as url:
            code = main(["cluster", command, "--cluster", name, "--endpoint-url", url, *map(str, words)])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    """Make the command available even if the package's entry points are not installed."""
    from integration.hyperpod.cluster.cluster_cli import cluster_group

    found = cli.LazyCommandGroup.get_command
    monkeypatch.setattr(
        cli.LazyCommandGroup,
        "get_command",
        lambda self, ctx, name: cluster_group if name == "cluster" else found(self, ctx, name),
    )


def test_enabling_sends_the_required_request(cluster):
    aws = FakeSageMaker()
    code, out, err = cluster(aws, "enable", "--percent", 30, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["changed"] is True
    assert said["TieredStorageConfig"] == ON
    assert said["settings"] == {"enabled": True, "agent": {"budget": "30%"}}
    request = {"ClusterName": "ml", "TieredStorageConfig": ON, "NodeRecovery": "Automatic"}
    assert aws.requests[1:] == [("UpdateCluster", request)]
    assert aws.cluster["TieredStorageConfig"] == ON


def test_the_endpoint_refuses_the_flag_alone():
    aws = FakeSageMaker()
    status, code, _ = aws.answer("UpdateCluster", {"ClusterName": "ml", "TieredStorageConfig": ON})
    assert (status, code) == (400, "ValidationException")
    assert aws.answer("UpdateCluster", {"ClusterName": "-", "NodeRecovery": "Never"})[1] == "ValidationException"


def test_a_dry_run_sends_nothing(cluster):
    aws = FakeSageMaker(NodeRecovery="None")
    code, out, _ = cluster(aws, "enable", "--percent", 40, "--dry-run")
    assert code == 0
    assert json.loads(out)["UpdateCluster"]["NodeRecovery"] == "None"
    assert [operation for operation, _ in aws.requests] == ["DescribeCluster"]


def test_unchanged_configuration_sends_no_update(cluster):
    aws = FakeSageMaker(TieredStorageConfig=ON)
    code, out, _ = cluster(aws, "enable")
    assert code == 0
    assert "has it already" in out
    code, out, _ = cluster(FakeSageMaker(), "disable", "--json")
    assert json.loads(out)["changed"] is False
    assert [operation for operation, _ in aws.requests] == ["DescribeCluster"]


def test_disabling_keeps_the_node_recovery(cluster):
    aws = FakeSageMaker(TieredStorageConfig=ON, NodeRecovery="None")
    code, out, _ = cluster(aws, "disable")
    assert code == 0
    assert "durable tier directly" in out
    assert aws.requests[1][1] == {
        "ClusterName": "ml",
        "TieredStorageConfig": {"Mode": "Disable"},
        "NodeRecovery": "None",
    }


def test_show_output_is_readable_by_agents(cluster, tmp_path):
    code, out, _ = cluster(FakeSageMaker(TieredStorageConfig=ON), "show", "--json", name=ARN)
    assert code == 0
    (tmp_path / "cluster.json").write_text(out)
    assert read_tiered_storage_config(tmp_path / "cluster.json") == TieredStorageConfig(TieredStorageMode.ENABLE, 30)
    _, out, _ = cluster(FakeSageMaker(), "show")
    assert "off: nothing is kept" in out


@pytest.mark.parametrize(
    ("refusal", "code", "words"),
    [
        ((400, "AccessDeniedException", "User is not authorized"), ExitCode.REFUSED, "sagemaker:DescribeCluster"),
        (
            (403, "UnrecognizedClientException", "The security token is invalid"),
            ExitCode.REFUSED,
            "get-caller-identity",
        ),
        ((400, "ValidationException", "no"), ExitCode.USAGE, "no"),
        ((400, "ConflictException", "busy"), ExitCode.FAILED, "InService"),
        ((400, "ResourceLimitExceeded", "full"), ExitCode.FAILED, "full"),
    ],
)
def test_refusals_map_to_exit_codes(cluster, refusal, code, words):
    aws = FakeSageMaker()
    aws.refusal = refusal
    found, out, err = cluster(aws, "show")
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_missing_cluster_and_invalid_name_are_reported(cluster):
    code, _, err = cluster(FakeSageMaker(), "enable", "--percent", 30, name="other")
    assert code == ExitCode.NOT_FOUND
    assert "there is no cluster other" in err
    code, _, err = cluster(FakeSageMaker(), "show", name="_")
    assert code == ExitCode.USAGE


def test_without_credentials_or_region(cluster, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, _, err = cluster(FakeSageMaker(), "show")
    assert code == ExitCode.REFUSED
    assert "credentials" in err
    assert "aws sso login" in err
    code, _, err = cluster(FakeSageMaker(), "show", "--profile", "absent")
    assert code == ExitCode.REFUSED
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    code, _, err = cluster(FakeSageMaker(), "show")
    assert code == ExitCode.USAGE
    assert "--region" in err
    assert region_of_arn(ARN) == "us-west-2"
    assert region_of_arn("ml") is None


def test_unreachable_api_is_unavailable(capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    from tieredckpt.cli import main

    code = main(["cluster", "show", "--cluster", "ml", "--endpoint-url", "http://127.0.0.1:9", "--json"])
    assert code == ExitCode.UNAVAILABLE
    assert json.loads(capsys.readouterr().out)["error"]["exit"] == 5


def test_invalid_options_are_usage_errors(cluster, capsys, tmp_path):
    from tieredckpt.cli import main

    assert cluster(FakeSageMaker(), "enable")[0] == ExitCode.USAGE
    assert cluster(FakeSageMaker(), "enable", "--percent", 0)[0] == ExitCode.USAGE
    assert cluster(FakeSageMaker(NodeRecovery=None), "enable", "--percent", 30)[0] == ExitCode.USAGE
    assert main(["cluster", "show"]) == ExitCode.USAGE
    assert main(["cluster", "show", "--file", str(tmp_path / "absent")]) == ExitCode.USAGE
    assert "AWS's guide asks for 20" in cluster(FakeSageMaker(), "enable", "--percent", 10)[2]


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "rolled back"])
def test_wait_ends_when_the_update_is_applied(keeps):
    aws, clock = FakeSageMaker(), FakeClock()
    aws.keeps = keeps
    wanted = TieredStorageConfig(TieredStorageMode.ENABLE, 30)
    with serve(aws) as url:
        clusters = HyperPodClusterApi(endpoint_url=url)
        clusters.update("ml", {"ClusterName": "ml", "TieredStorageConfig": ON, "NodeRecovery": "Automatic"})
        aws.updating = ["Updating", "Updating", "SystemUpdating"]
        if keeps:
            found = clusters.wait("ml", wanted, timeout_s=600, sleep=clock.sleep, clock=clock)
            assert (found.status, found.tiered_storage) == ("InService", wanted)
        else:
            with pytest.raises(CommandError, match="did not take TieredStorageConfig: it is InService"):
                clusters.wait("ml", wanted, timeout_s=600, sleep=clock.sleep, clock=clock)
    assert clock.now == 45


def test_waiting_ends_when_time_is_up():
    aws, clock = FakeSageMaker(ClusterStatus="Updating"), FakeClock()
    with serve(aws) as url, pytest.raises(CommandError, match="still Updating after 60 s") as late:
        HyperPodClusterApi(endpoint_url=url).wait(
            "ml", TieredStorageConfig(TieredStorageMode.ENABLE, 30), timeout_s=60, sleep=clock.sleep, clock=clock
        )
    assert late.value.code is ExitCode.UNAVAILABLE


def test_requests_pass_botocores_stubber():
    client = boto3.client("sagemaker")
    with Stubber(client) as stub:
        answer = {"ClusterArn": ARN, "ClusterStatus": "InService", "InstanceGroups": [], "TieredStorageConfig": ON}
        stub.add_response("describe_cluster", answer, {"ClusterName": "ml"})
        request = {"ClusterName": "ml", "TieredStorageConfig": ON, "NodeRecovery": "Automatic"}
        stub.add_response("update_cluster", {"ClusterArn": ARN}, request)
        clusters = HyperPodClusterApi(client=client)
        assert clusters.describe("ml").tiered_storage == TieredStorageConfig(TieredStorageMode.ENABLE, 30)
        clusters.update("ml", request)
        stub.assert_no_pending_responses()
