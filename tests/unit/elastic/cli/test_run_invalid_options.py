"""``elastic run`` with invalid options: exit code 2, every problem listed, nothing started."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from elastic.cli import main, scaling_options
from elastic.cli import run as run_cli
from elastic.cli.scaling_options import load_scaling_policy
from tieredckpt.cli.exit_codes import ExitCode


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """A function that runs ``elastic run`` with invalid options and returns its error output."""
    monkeypatch.setenv("ELASTIC_RUN_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.delenv("ELASTIC_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.touch()

    def run(*options, script=script):
        assert main(["run", "--no-agent", *map(str, options), str(script)]) == ExitCode.USAGE
        assert not (tmp_path / "run").exists()
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture
def policy(tmp_path):
    def write(text):
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        return path

    return write


def test_invalid_policy_lists_every_problem(refused, policy):
    said = refused(
        "--policy", policy("min_replicas: 4\nmax_replicas: 2\nscaling_timeout_s: -1\nrepeat_offender_faults: 0\n")
    )
    for name in (
        "max_replicas is 2, less than min_replicas (4)",
        "scaling_timeout_s is -1",
        "repeat_offender_faults is 0",
    ):
        assert name in said


def test_invalid_custom_resource_is_refused_with_its_own_keys(refused, policy):
    said = refused(
        "--policy",
        policy("elasticPolicy:\n  maxReplicas: 2\n  minReplicas: 3\nrestartPolicy:\n  maxFullJobRestarts: -1\n"),
    )
    for name in ("maxReplicas is 2, less than minReplicas (3)", "maxFullJobRestarts is -1"):
        assert name in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_replica: 4\n", "max_replica"),
        ("max_replicas: four\n", "max_replicas"),
        ("- 1\n", "is not a policy: write names and values"),
        ("", "is not a policy: write names and values"),
        ("a: [\n", "the policy cannot be read from"),
        ("elasticPolicy: 3\n", "elasticPolicy is 3, must be names and values"),
        ("elasticPolicy:\n  maxReplicas: 3\nrestartPolicy: [1]\n", "restartPolicy is [1], must be names and values"),
        ("elasticPolicy:\n  maxReplicas: 3\nmin_replicas: 2\n", "min_replicas stands beside elasticPolicy"),
        ("elasticPolicy:\n  3: 4\n", "3 is unknown"),
    ],
)
def test_invalid_policy_file_is_refused(refused, policy, text, said):
    assert said in refused("--policy", policy(text))


def test_missing_policy_file_is_refused(refused, tmp_path):
    assert "the policy cannot be read from" in refused("--policy", tmp_path / "absent.yaml")


@pytest.mark.parametrize("nodes", ["3:2", "0", "0:2", "2:", ":2", "-1", "1:2:3", "two", "1.5", "\u0663"])
def test_numbers_of_nodes_that_cannot_be(refused, nodes):
    assert f"--nnodes {nodes!r}" in refused("--nnodes", nodes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nproc", 0), "--nproc"),
        (("--simulate-nodes", 65), "--simulate-nodes"),
        (("--grow-after", -1), "scaling_timeout_s is -1"),
        (("--grow-after", "nan"), "scaling_timeout_s is nan"),
        (("--max-restarts", -1), "job_max_retry_count is -1"),
        (("--coordinator-here",), "--coordinator-here needs --coordinator HOST:PORT"),
        (("--http", "localhost"), "--http: 'localhost' is neither HOST:PORT nor off"),
        (("--http", "localhost:70000"), "--http: 'localhost:70000' is neither HOST:PORT nor off"),
        (("--coordinator", "h:1"), "several machines need a secret they all know"),
    ],
)
def test_options_that_cannot_be(refused, options, said):
    assert said in refused(*options)


def test_missing_script_is_refused(refused, tmp_path):
    assert "there is no file" in refused(script=tmp_path / "absent.py")


@pytest.fixture
def policy_readers(monkeypatch):
    """Replace the readers that installed packages add."""

    def replace(**readers):
        group = scaling_options.POLICY_READER_ENTRY_POINTS
        points = [EntryPoint(name, value, group) for name, value in readers.items()]
        monkeypatch.setattr(scaling_options, "entry_points", lambda *, group: points)

    return replace


def test_a_format_that_no_package_reads_is_refused(refused, policy, policy_readers):
    policy_readers()
    assert "unknown field `elasticPolicy`" in refused("--policy", policy("elasticPolicy:\n  maxReplicas: 3\n"))


def test_a_reader_that_cannot_be_loaded_is_named(refused, policy, policy_readers):
    policy_readers(sizes="absent_package:read")
    said = refused("--policy", policy("sizes: [2, 4]\n"))
    assert "absent_package:read, which reads sizes, cannot be loaded" in said


def test_options_replace_fields_of_another_format(policy):
    file = policy("elasticPolicy:\n  maxReplicas: 4\n  scalingTimeoutInSeconds: 5\n")
    found = load_scaling_policy("2:3", file, scaling_timeout_s=7.0, job_max_retry_count=None)
    assert (found.sizes, found.scaling_timeout_s) == ((2, 3, 4), 7.0)


def test_problems_of_another_format_have_its_spellings(refused, policy):
    assert "maxReplicas is 1, less than minReplicas (2)" in refused(
        "--nnodes", 2, "--policy", policy("elasticPolicy:\n  maxReplicas: 1\n")
    )


def test_sizes_in_the_policy_file_replace_nnodes(policy):
    sizes = {
        "replicaDiscreteValues: [2, 4]": (2, 4),
        "minReplicas: 2\n  maxReplicas: 3": (2, 3),
        "min_nodes: 2\n  max_nodes: 3": (2, 3),
    }
    for text, expected in sizes.items():
        assert load_scaling_policy("1", policy(f"elasticPolicy:\n  {text}\n")).sizes == expected
    assert load_scaling_policy("2:3", policy("elasticPolicy:\n  scalingTimeoutInSeconds: 5\n")).sizes == (2, 3)


IN_A_STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURMD_NODENAME": "n2",
}


@pytest.mark.parametrize(
    ("environ", "options", "said"),
    [
        (IN_A_STEP, ("--nnodes", "4"), "--nnodes 4 and $SLURM_STEP_NODELIST=n[1-3]"),
        (IN_A_STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, (), "elastic run --nproc 8"),
        (IN_A_STEP, ("--coordinator", "elsewhere:7"), "several machines need a secret they all know"),
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}, (), "srun --ntasks-per-node=1 elastic run"),
        (
            {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1"},
            ("--requeue",),
            "is not a step of a Slurm job",
        ),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "h", "PET_NODE_RANK": "1"}, (), "several machines need a secret"),
        ({}, ("--requeue",), "is not a step of a Slurm job"),
    ],
)
def test_missing_scheduler_variables_are_refused(refused, monkeypatch, environ, options, said):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert said in refused(*options)


def test_a_policy_of_more_nodes_than_the_scheduler_has_given(refused, policy, monkeypatch):
    for name, value in IN_A_STEP.items():
        monkeypatch.setenv(name, value)
    assert "--policy and $SLURM_STEP_NODELIST=n[1-3]" in refused(
        "--policy", policy("min_replicas: 4\nmax_replicas: 4\n")
    )


def test_resume_from_needs_a_step(refused):
    assert "--resume-from: 'newest' is not a step: write STEP or STEP@EPOCH" in refused("--resume-from", "newest")


def test_resume_from_and_requeue_exclude_each_other(refused):
    assert "each requeued run would restore that step again" in refused("--resume-from", "3", "--requeue")


@pytest.mark.parametrize("option", [["--resume-from", "3@7"], ["--resume-from=3@7"]])
def test_command_that_resumes_the_job_has_no_resume_from(option):
    argv = ["run", *option, "--nnodes", "2", "train.py", "--resume-from", "x"]
    again = ["run", "--nnodes", "2", "train.py", "--resume-from", "x"]
    assert run_cli._without_resume_from(argv, 3) == again
    assert run_cli._without_resume_from(again, 3) == again
