"""Leadership through a Lease on a real API server, with only the manifest's rights."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes.config import kube_config

from elastic.control.leader_election import LeaderRecordStore, open_leader_record
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError
from elastic.fault_injection import FaultPlan
from tests.support import leadership_contract as contract
from tests.support.elastic_runs import kill
from tests.support.golden_runs import (
    EVERY,
    POLICY,
    SETTLE_S,
    TRAINER,
    GoldenRun,
    assert_same_training,
    assert_worlds_consistent,
    reference_run,
)
from tests.support.kube_server import ApiRefusedError, KubeClient
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.system

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
_LEASE_S = 4
_STEPS = 60


@pytest.fixture
def config(account: KubeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = account.kubeconfig(tmp_path / "kubeconfig")
    _use(path, monkeypatch)
    return path


def _use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the kubeconfig of this process, whose client read the variable at import."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def lease(bare_kube: KubeClient, config: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"job-{abs(hash(request.node.name)) % 10**8}"
    yield name
    if bare_kube.find(f"{_LEASES}/{name}") is not None:
        bare_kube.delete(f"{_LEASES}/{name}")


def place(lease: str) -> LeaderRecordStore:
    return open_leader_record(f"kubernetes://default/{lease}?lease={_LEASE_S}")


def test_record_keeps_its_content(lease: str, bare_kube: KubeClient) -> None:
    contract.check_read_after_write(place(lease))
    said = bare_kube.get(f"{_LEASES}/{lease}")
    assert (said["spec"]["holderIdentity"], said["spec"]["leaseDurationSeconds"]) == ("", 2)
    assert said["metadata"]["annotations"]["elastic.tieredckpt/term"] == str(contract.FULL.term)


def test_record_is_changed_only_by_its_latest_reader(lease: str) -> None:
    contract.check_conditional_write(place(lease))


def test_deleted_record_is_not_overwritten(lease: str, bare_kube: KubeClient) -> None:
    contract.check_deleted_record_stays_deleted(place(lease), lambda: bare_kube.delete(f"{_LEASES}/{lease}"))


def test_only_one_of_many_writers_succeeds(lease: str) -> None:
    contract.check_concurrent_writes([place(lease) for _ in range(4)])


def test_leadership_account_may_only_use_its_lease(account: KubeClient, lease: str) -> None:
    contract.check_conditional_write(place(lease))
    for method, path in (
        ("GET", _LEASES),
        ("DELETE", f"{_LEASES}/{lease}"),
        ("GET", "/api/v1/namespaces/default/pods"),
    ):
        with pytest.raises(ApiRefusedError) as refused:
            account.request(method, path)
        assert refused.value.status == 403


def test_missing_lease_rights_are_named(bare_kube: KubeClient, lease: str, tmp_path: Path, monkeypatch) -> None:
    other = bare_kube.as_service_account("default", "default")
    _use(other.kubeconfig(tmp_path / "other"), monkeypatch)
    other.close()
    with pytest.raises(ControlPlaneRefusedError, match=r"get, create and patch on leases: .*leadership\.yaml"):
        place(lease).read()


def test_unreachable_api_server_is_unavailable_not_refused(config: Path, lease: str) -> None:
    document = yaml.safe_load(config.read_text())
    document["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    config.write_text(yaml.safe_dump(document))
    with pytest.raises(ControlPlaneUnavailableError) as lost:
        place(lease).read()
    assert not isinstance(lost.value, ControlPlaneRefusedError)


def test_job_result_is_unchanged_by_the_loss_of_the_leaders_machine(lease: str, config: Path, tmp_path: Path) -> None:
    quiet = reference_run(tmp_path / "quiet", _STEPS)
    folder = tmp_path / "k"
    folder.mkdir()
    job = GoldenRun(folder, "job", "ddp", FaultPlan())
    try:
        runs = {name: _machine(job, lease, config, name) for name in ("m1", "m2", "m3")}
        wait_until(
            lambda: [one for one in job.log_lines("step") if one["size"] == 3 and one["step"] >= 6], "steps", 120
        )
        record = place(lease).read()
        leader = record.holder.rpartition("-")[0]
        lost = _lose(job, runs.pop(leader), leader)
        wait_until(lambda: place(lease).read().term > record.term, "another machine leads", 120)
        for run in runs.values():
            assert run.wait(200) == 0, job.failure_report()
        after = place(lease).read()
        assert (after.holder, after.over) == ("", "finished")
        assert after.epoch > record.epoch
        assert_worlds_consistent(job)
        assert all(one["first"] > 0 for one in job.log_lines("world") if one["epoch"] > record.epoch)
        committed = job.committed_steps(lost)
        assert {one["size"] for one in committed[-3:]} == {2}
        assert_same_training(committed, quiet)
    finally:
        job.close()


def _machine(job: GoldenRun, lease: str, config: Path, name: str):
    """Start a launcher with its own agent; it finds the other machines through the Lease alone."""
    secret, policy = job.folder / "secret", job.folder / "policy.yaml"
    if not secret.exists():
        secret.touch(mode=0o600)
        secret.write_text("a secret that three machines know")
    policy.write_text(POLICY)
    job.total = _STEPS
    job.environ |= {
        "TIEREDCKPT_AGENT_DIRECTORY": str(job.folder / f"agent-{name}"),
        "KUBECONFIG": str(config),
        "no_proxy": "*",
    }
    return job.start(
        *("run", "-v", "--job", job.name, "--log-dir", str(job.folder / "logs"), "--policy", str(policy)),
        *("--nnodes", "1:3", "--nproc", "1", "--grow-after", "15", "--shrink-after", "0", "--node", name),
        *("--coordinator", f"kubernetes://default/{lease}?lease={_LEASE_S}", "--listen", "127.0.0.1:0"),
        *("--secret", f"file:{secret}", "--max-restarts", "100"),
        *(str(TRAINER), str(job.diary), str(_STEPS), "ddp", str(SETTLE_S), str(EVERY["ddp"]), "gloo"),
    )


def _lose(job: GoldenRun, run, name: str) -> set[int]:
    """Kill all processes of a machine at once, including its agent, and return their pids."""
    gone = {
        run.pid,
        *job.pids(f'"node":"{name}"'),
        *job.pids(f'"candidate":"{name}-'),
        *job.pids(f"agent-{name}"),
        *(one["pid"] for one in job.log_lines("world") if _node_of(one["pid"]) == name),
    }
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in gone:
            if Path(f"/proc/{pid}").exists():
                kill(pid, number)
    run.wait(60)
    assert run.returncode == -signal.SIGKILL
    return gone


def _node_of(pid: int) -> str:
    """Return the node of a rank, or an empty string if the process is gone."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((one.partition(b"=")[2].decode() for one in environ if one.startswith(b"ELASTIC_NODE=")), "")
