"""``tieredckpt cluster node-health``: health labels, read, set, and derived from what a job's ledger says."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from integration.hyperpod.cluster.health import NodeHealth
from tieredckpt.cli.exits import CommandError, Exit
from tieredckpt.cli.options import pass_screen, printing
from tieredckpt.cli.screen import Screen, show_age, table

if TYPE_CHECKING:
    from integration.hyperpod.cluster.nodes import NodeLabels


@click.command("node-health", short_help="How a node is labelled, and by its faults should be.")
@click.argument("node", required=False)
@click.option("--set", "value", type=click.Choice([one.value for one in NodeHealth]), help="Set NODE's label.")
@click.option("--ledger", "ledgers", multiple=True, metavar="DIR|JOB", help="Of which device faults are counted.")
@click.option("--apply", "applies", is_flag=True, help="With --ledger: set the labels that are worse than they were.")
@click.option("--called", multiple=True, metavar="OURS=THEIRS", help="A node's name in the ledger and in Kubernetes.")
@click.option("--context", metavar="NAME", help="As for kubectl.")
@click.option("--kubeconfig", metavar="FILE", help="As for kubectl. [default: a pod's own account, $KUBECONFIG]")
@printing
@pass_screen
def node_health(
    screen: Screen,
    /,
    *,
    node: str | None,
    value: str | None,
    ledgers: tuple[str, ...],
    applies: bool,
    called: tuple[str, ...],
    context: str | None,
    kubeconfig: str | None,
) -> int:
    """Read or set the label by which HyperPod reboots and replaces nodes.

    With --ledger: which nodes had so many device faults within a day that they are to be rebooted (a device was lost
    or its memory was damaged once, it was stuck or its links failed twice) or replaced (twice, four times). Labels
    are only set for the worse; HyperPod takes them back.
    """
    if bool(node) == bool(ledgers) or (value and not node) or ((applies or called) and not ledgers):
        text = "say either NODE, with --set or without, or --ledger, with --apply and --called or without"
        raise CommandError(text, code=Exit.USAGE)
    if node:
        return _one(screen, node, NodeHealth(value) if value else None, _labels(context, kubeconfig))
    names = dict(_pair(one) for one in called)
    return _judged(screen, ledgers, names, (lambda: _labels(context, kubeconfig)) if applies else None)


def _one(screen: Screen, node: str, value: NodeHealth | None, labels: NodeLabels) -> int:
    if value is None:
        health = labels.health(node)
        screen.result({"node": node, "health": health}, lambda out: out.print(f"{node} {health or 'has no label'}"))
        return Exit.OK
    was = labels.change(node, value, when=lambda now: now != value.value)
    said = {"node": node, "health": value.value, "was": was}
    screen.result(said, lambda out: out.print(f"{node} {value.value} (was: {was or 'no label'})"))
    return Exit.OK


def _judged(
    screen: Screen, ledgers: Sequence[str], names: dict[str, str], connect: Callable[[], NodeLabels] | None
) -> int:
    from integration.hyperpod.cluster.health import DeviceFault, device_faults, verdict, worse
    from tieredckpt.cli.accounting import ledger_of
    from tieredckpt.ledger import read_ledger

    now = time.time()
    faults: dict[str, list[DeviceFault]] = {}
    for ledger in ledgers:
        for fault in device_faults(read_ledger(ledger_of(ledger)).events):
            faults.setdefault(names.get(fault.node, fault.node), []).append(fault)
    rows: list[dict[str, Any]] = []
    labels = connect() if connect is not None and faults else None
    for node, found in sorted(faults.items()):
        wanted = verdict(found, now)
        last = max(found, key=lambda fault: fault.at)
        row: dict[str, Any] = {"node": node, "faults": len(found), "wanted": wanted.value, "last_at": last.at}
        row["last"] = f"{last.kind.value}: {last.words}"
        if labels is not None:
            was = labels.change(node, wanted, when=functools.partial(worse, wanted=wanted))
            row |= {"was": was, "set": worse(was, wanted)}
        rows.append(row)
    screen.result({"nodes": rows}, lambda out: _show(out, rows, now))
    return Exit.OK


def _show(out: Console, rows: Sequence[dict[str, Any]], now: float) -> None:
    if not rows:
        out.print("no device faults")
        return
    columns = ("NODE", "FAULTS", "LAST", "AGE", "TO BE", "")
    cells = [
        (
            row["node"],
            str(row["faults"]),
            row["last"][:60],
            show_age(now - row["last_at"]),
            row["wanted"],
            "set" if row.get("set") else "",
        )
        for row in rows
    ]
    out.print(table(columns, cells, right=("FAULTS",)))


def _labels(context: str | None, kubeconfig: str | None) -> NodeLabels:
    from integration.hyperpod.cluster.nodes import connected

    return connected(context, kubeconfig)


def _pair(text: str) -> tuple[str, str]:
    ours, found, theirs = text.partition("=")
    if not (ours and found and theirs):
        raise CommandError(f"--called {text!r}: write OURS=THEIRS", code=Exit.USAGE)
    return ours, theirs
