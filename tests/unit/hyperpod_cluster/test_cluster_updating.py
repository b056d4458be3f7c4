"""Which UpdateCluster is sent, compared with AWS's own model of it, and when it is over."""

import pytest
from botocore.validate import ParamValidator
from hypothesis import given
from hypothesis import strategies as st

from integration.hyperpod.cluster.flag import DISABLED, Mode, TieredStorageConfig
from integration.hyperpod.cluster.updating import Cluster, Progress, enabling, has, progress, update_request
from tests.support.sagemaker_api import ARN, model, problems
from tieredckpt.cli.exits import CommandError, Exit

ON = TieredStorageConfig(Mode.ENABLE, 30)
names = st.from_regex(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,62}", fullmatch=True) | st.just(ARN)


def cluster(flag=DISABLED, status="InService", recovery="Automatic", name="ml"):
    return Cluster(name, ARN, status, flag, recovery)


@given(names, st.integers(1, 100) | st.none(), st.sampled_from(["Automatic", "None"]))
def test_every_request_is_one_of_awss_model(name, percent, recovery):
    found = cluster(name=name, recovery=recovery)
    wanted = DISABLED if percent is None else enabling(found, percent)
    request = update_request(found, wanted)
    shape = model().operation_model("UpdateCluster").input_shape
    assert not ParamValidator().validate(request, shape).has_errors()
    assert problems(request, shape) == []
    assert request["NodeRecovery"] == recovery
    assert "InstanceGroups" not in request


def test_a_recovery_that_nobody_says_is_not_made_up():
    with pytest.raises(CommandError, match="needs NodeRecovery") as refused:
        update_request(cluster(recovery=None), ON)
    assert refused.value.code is Exit.USAGE
    assert "--node-recovery" in refused.value.advice
    assert update_request(cluster(recovery=None), ON, "None")["NodeRecovery"] == "None"


def test_a_share_is_kept_or_asked_for():
    assert enabling(cluster(), 40).percent == 40
    assert enabling(cluster(TieredStorageConfig(Mode.DISABLE, 25)), None) == TieredStorageConfig(Mode.ENABLE, 25)
    for flag in (DISABLED, TieredStorageConfig(Mode.DISABLE, 0)):
        with pytest.raises(CommandError, match="no share"):
            enabling(cluster(flag), None)


def test_a_share_of_what_is_off_means_nothing():
    assert has(cluster(TieredStorageConfig(Mode.DISABLE, 25)), DISABLED)
    assert not has(cluster(TieredStorageConfig(Mode.DISABLE, 30)), ON)
    assert not has(cluster(TieredStorageConfig(Mode.ENABLE, 20)), ON)


@pytest.mark.parametrize(
    ("status", "flag", "began", "stands"),
    [
        ("InService", DISABLED, False, Progress.NOT_BEGUN),
        ("Updating", DISABLED, False, Progress.UNDER_WAY),
        ("SystemUpdating", ON, True, Progress.UNDER_WAY),
        ("Updating", ON, True, Progress.UNDER_WAY),
        ("RollingBack", ON, True, Progress.UNDER_WAY),
        ("InService", ON, True, Progress.DONE),
        ("InService", ON, False, Progress.DONE),
        ("InService", DISABLED, True, Progress.FAILED),
        ("Failed", ON, True, Progress.FAILED),
        ("Deleting", ON, False, Progress.FAILED),
    ],
)
def test_how_far_an_update_is(status, flag, began, stands):
    assert progress(cluster(flag, status), ON, began=began) is stands


def test_every_status_of_awss_model_is_one_of_these():
    known = model().shape_for("ClusterStatus").enum
    assert {progress(cluster(ON, status), ON, began=True) for status in known} == set(Progress) - {Progress.NOT_BEGUN}
