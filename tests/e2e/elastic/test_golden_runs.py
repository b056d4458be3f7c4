"""Faults of every kind, in every phase of a step and of a recovery, change no bit of the result."""

from __future__ import annotations

import pytest

from elastic.fault_injection import InjectionKind, InjectionPhase
from tests.support import nccl_like
from tests.support.golden_runs import (
    NPROC,
    all_pairs,
    assert_all_injected_once,
    assert_same_training,
    assert_worlds_consistent,
    chain_faults,
    golden_run,
    reference_run,
)

pytestmark = pytest.mark.e2e

__all__ = ["golden_run"]

CHAINS = {
    "ddp": """
        sigkill@forward exception@backward nan@allreduce agent@optimizer segfault@optimizer oom@save sigkill@seal
        node@replicate exception@restore sigkill@recovery
    """,
    "fsdp": """
        oom@backward segfault@save partition@forward node@seal sigkill@replicate hold_gil@optimizer exception@allreduce
        agent@seal segfault@restore oom@recovery agent@recovery
    """,
    "hsdp": """
        nan@forward segfault@backward sigkill@allreduce exception@seal oom@replicate partition@save slow@optimizer
        node@restore exception@recovery
    """,
}
SHORT = {
    "ddp": "sigkill@forward agent@optimizer exception@recovery",
    "fsdp": "exception@backward node@seal sigkill@replicate segfault@restore",
    "hsdp": "nan@forward sigkill@allreduce oom@save",
}
"""Short chains, one of them for every push; the others and the full chains are nightly."""
ALL = [(how, backend) for how in CHAINS for backend in ("gloo", nccl_like.NAME)]
IN_A_PUSH = [("hsdp", nccl_like.NAME)]
"""Other tests of a push recover with DDP and over gloo."""
IN_A_NIGHT = 12
"""Number of chains that cover all pairs."""
STEPS = 70


def pairs_of(text: str) -> list[tuple[InjectionKind, InjectionPhase]]:
    return [(InjectionKind(kind), InjectionPhase(phase)) for kind, phase in (word.split("@") for word in text.split())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return reference_run(tmp_path_factory.mktemp("quiet"), STEPS)


def go_through(golden, undisturbed, how, pairs: list[tuple[InjectionKind, InjectionPhase]], within_s: float) -> None:
    job = golden(how[0], chain_faults(pairs, 2 * NPROC[how[0]]), backend=how[1])
    job.wait_finished(job.start_run(), within_s)
    assert_all_injected_once(job)
    assert_worlds_consistent(job)
    assert all(one["first"] > 0 for one in job.log_lines("world") if one["epoch"] > 0), "a world found no saved step"
    assert_same_training(job.committed_steps(), undisturbed)


@pytest.mark.parametrize("how", IN_A_PUSH, ids="-".join)
def test_few_faults_do_not_change_the_result(golden_run, undisturbed, how) -> None:
    go_through(golden_run, undisturbed, how, pairs_of(SHORT[how[0]]), 240)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [how for how in ALL if how not in IN_A_PUSH], ids="-".join)
def test_few_faults_do_not_change_the_result_of_other_families(golden_run, undisturbed, how) -> None:
    go_through(golden_run, undisturbed, how, pairs_of(SHORT[how[0]]), 360)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ALL, ids="-".join)
def test_chain_of_faults_does_not_change_the_result(golden_run, undisturbed, how) -> None:
    go_through(golden_run, undisturbed, how, pairs_of(CHAINS[how[0]]), 360)


def test_fault_chains_cover_every_phase_and_pair() -> None:
    assert {phase for chain in SHORT.values() for _, phase in pairs_of(chain)} == set(InjectionPhase)
    for chain in CHAINS.values():
        assert {phase for _, phase in pairs_of(chain)} == set(InjectionPhase)
    spread = [pair for number in range(IN_A_NIGHT) for pair in all_pairs()[number::IN_A_NIGHT]]
    assert len(spread) == len(set(spread)) == len(InjectionKind) * len(InjectionPhase) - (len(InjectionPhase) - 3)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(IN_A_NIGHT))
@pytest.mark.parametrize("how", ALL, ids="-".join)
def test_every_fault_in_every_phase_does_not_change_the_result(golden_run, undisturbed, how, number: int) -> None:
    go_through(golden_run, undisturbed, how, all_pairs()[number::IN_A_NIGHT], 1100)
