"""Histories with random faults match the closed form and account for all of their time."""

import numpy as np
import pytest

from tieredckpt.errors import UsageError
from tieredckpt.goodput.expected_goodput import CheckpointScheme, FaultCost, restart_scheme
from tieredckpt.goodput.monte_carlo import MAX_SIMULATED_FAULTS, SimulatedNodes, forecast_goodput, simulate_runs

PLAIN = [
    restart_scheme(interval, stall, recovery)
    for interval in (60.0, 600.0)
    for stall in (0.0, 6.0)
    for recovery in (0.0, 45.0, 600.0)
]
MIXED = [
    CheckpointScheme(600, 2, FaultCost(0, 0), live=FaultCost(1, 30)),
    CheckpointScheme(600, 2, FaultCost(0.3, 50), live=FaultCost(0.7, 30)),
    CheckpointScheme(600, 2, FaultCost(0.3, 50), live=FaultCost(0.7, 30), step_s=100),
    CheckpointScheme(600, 20, FaultCost(0.5, 150), durable=FaultCost(0.5, 200), durable_every=3),
    CheckpointScheme(
        600,
        2,
        FaultCost(0.25, 150),
        live=FaultCost(0.5, 130),
        durable=FaultCost(0.25, 200),
        durable_every=5,
        step_s=100,
    ),
]


@pytest.mark.parametrize("mtbf_s", [1000.0, 20000.0])
@pytest.mark.parametrize("scheme", PLAIN + MIXED)
def test_simulation_matches_the_closed_form(scheme, mtbf_s):
    forecast = forecast_goodput(scheme, SimulatedNodes(mtbf_s), work_s=20 * mtbf_s, runs=300, seed=7)
    assert forecast.is_comparable
    assert forecast.deviation_sigmas < 4  # standard errors: one in 16,000 by chance, and the seed is fixed
    assert forecast.simulated.standard_error < 0.02 * forecast.closed_form


NODES = SimulatedNodes(3000, count=16, spares=1, min_nodes=14, node_loss_share=0.5, repair_s=9000, resize_s=5)


@pytest.mark.parametrize("nodes", [SimulatedNodes(1000), NODES])
@pytest.mark.parametrize("scheme", MIXED)
def test_all_time_is_accounted_for(scheme, nodes):
    one = simulate_runs(scheme, nodes, rounds=20, runs=50, seed=1)
    total = one.work_s + one.stalled + one.repeated + one.recovering + one.waiting + one.smaller
    # Work and repeated work count at the speed of all nodes; the delay from fewer nodes is a separate item.
    assert np.allclose(total, one.elapsed, rtol=1e-9)
    assert one.work_s == 20 * scheme.round_s


def test_the_same_seed_is_the_same_history():
    first, again, other = (simulate_runs(MIXED[4], NODES, rounds=5, runs=20, seed=seed) for seed in (3, 3, 4))
    assert (first.elapsed == again.elapsed).all()
    assert not (first.elapsed == other.elapsed).all()


def test_no_faults_no_losses():
    one = simulate_runs(restart_scheme(60, 3, 1e6), SimulatedNodes(1e30), rounds=10, runs=3, seed=0)
    assert list(one.elapsed) == [630.0] * 3
    assert one.goodput == pytest.approx(600 / 630)
    assert one.standard_error == 0


def test_spares_and_smaller_worlds_help():
    def goodput(**changes):
        nodes = SimulatedNodes(3000, count=16, node_loss_share=0.5, repair_s=9000, **({"min_nodes": 16} | changes))
        return simulate_runs(restart_scheme(60, 1, 30), nodes, rounds=2000, runs=50, seed=5).goodput

    alone, spares, smaller = goodput(), goodput(spares=4), goodput(min_nodes=8)
    assert alone < smaller < spares
    assert (
        spares
        > 0.95 * simulate_runs(restart_scheme(60, 1, 30), SimulatedNodes(3000), rounds=2000, runs=50, seed=5).goodput
    )


def test_run_without_progress_is_not_simulated():
    forecast = forecast_goodput(restart_scheme(600, 1, 6000), SimulatedNodes(300), work_s=86400, runs=10, seed=0)
    assert forecast.simulated is None
    assert forecast.goodput == forecast.closed_form < 1e-6
    assert forecast.rounds * forecast.scheme.interval_s / forecast.closed_form / 300 > MAX_SIMULATED_FAULTS


def test_work_ends_with_a_save_that_lasts():
    scheme = CheckpointScheme(600, 2, FaultCost(0.5, 50), durable=FaultCost(0.5, 50), durable_every=4)
    assert forecast_goodput(scheme, SimulatedNodes(1e9), work_s=2401, runs=2, seed=0).work_s == 4800
    assert forecast_goodput(scheme, SimulatedNodes(1e9), work_s=2400, runs=2, seed=0).work_s == 2400


@pytest.mark.parametrize("wrong", [{"node_loss_share": 0.5}, {"count": 4, "min_nodes": 5}, {"min_nodes": 0}])
def test_nodes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError):
        SimulatedNodes(1000, **wrong)
