"""The UpdateCluster request, compared with AWS's own model, and the end of the update."""

import pytest
from botocore.validate import ParamValidator
from hypothesis import given
from hypothesis import strategies as st

from integration.hyperpod.cluster.tiered_storage_config import (
    TIERED_STORAGE_DISABLED,
    ClusterDescription,
    TieredStorageConfig,
    TieredStorageMode,
    UpdateProgress,
    enabled_config,
    has_config,
    update_progress,
    update_request,
)
from tests.support.sagemaker_api import ARN, schema_errors, service_model
from tieredckpt.cli.exit_codes import CommandError, ExitCode

ON = TieredStorageConfig(TieredStorageMode.ENABLE, 30)
names = st.from_regex(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,62}", fullmatch=True) | st.just(ARN)


def cluster(flag=TIERED_STORAGE_DISABLED, status="InService", recovery="Automatic", name="ml"):
    return ClusterDescription(name, ARN, status, flag, recovery)


@given(names, st.integers(1, 100) | st.none(), st.sampled_from(["Automatic", "None"]))
def test_every_request_matches_the_aws_model(name, percent, recovery):
    found = cluster(name=name, recovery=recovery)
    wanted = TIERED_STORAGE_DISABLED if percent is None else enabled_config(found, percent)
    request = update_request(found, wanted)
    shape = service_model().operation_model("UpdateCluster").input_shape
    assert not ParamValidator().validate(request, shape).has_errors()
    assert schema_errors(request, shape) == []
    assert request["NodeRecovery"] == recovery
    assert "InstanceGroups" not in request


def test_missing_node_recovery_is_refused():
    with pytest.raises(CommandError, match="needs NodeRecovery") as refused:
        update_request(cluster(recovery=None), ON)
    assert refused.value.code is ExitCode.USAGE
    assert "--node-recovery" in refused.value.advice
    assert update_request(cluster(recovery=None), ON, "None")["NodeRecovery"] == "None"


def test_memory_share_is_kept_or_required():
    assert enabled_config(cluster(), 40).percent == 40
    assert enabled_config(cluster(TieredStorageConfig(TieredStorageMode.DISABLE, 25)), None) == TieredStorageConfig(
        TieredStorageMode.ENABLE, 25
    )
    for flag in (TIERED_STORAGE_DISABLED, TieredStorageConfig(TieredStorageMode.DISABLE, 0)):
        with pytest.raises(CommandError, match="no share"):
            enabled_config(cluster(flag), None)


def test_memory_share_of_a_disabled_config_is_ignored():
    assert has_config(cluster(TieredStorageConfig(TieredStorageMode.DISABLE, 25)), TIERED_STORAGE_DISABLED)
    assert not has_config(cluster(TieredStorageConfig(TieredStorageMode.DISABLE, 30)), ON)
    assert not has_config(cluster(TieredStorageConfig(TieredStorageMode.ENABLE, 20)), ON)


@pytest.mark.parametrize(
    ("status", "flag", "began", "stands"),
    [
        ("InService", TIERED_STORAGE_DISABLED, False, UpdateProgress.NOT_STARTED),
        ("Updating", TIERED_STORAGE_DISABLED, False, UpdateProgress.IN_PROGRESS),
        ("SystemUpdating", ON, True, UpdateProgress.IN_PROGRESS),
        ("Updating", ON, True, UpdateProgress.IN_PROGRESS),
        ("RollingBack", ON, True, UpdateProgress.IN_PROGRESS),
        ("InService", ON, True, UpdateProgress.DONE),
        ("InService", ON, False, UpdateProgress.DONE),
        ("InService", TIERED_STORAGE_DISABLED, True, UpdateProgress.FAILED),
        ("Failed", ON, True, UpdateProgress.FAILED),
        ("Deleting", ON, False, UpdateProgress.FAILED),
    ],
)
def test_how_far_an_update_is(status, flag, began, stands):
    assert update_progress(cluster(flag, status), ON, began=began) is stands


def test_every_aws_cluster_status_is_mapped():
    known = service_model().shape_for("ClusterStatus").enum
    assert {update_progress(cluster(ON, status), ON, began=True) for status in known} == set(UpdateProgress) - {
        UpdateProgress.NOT_STARTED
    }
