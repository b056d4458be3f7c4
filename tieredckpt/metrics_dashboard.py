"""Grafana dashboard and Prometheus alert rules for the metrics of node agents and of goodput.

Prometheus must scrape agents under the job name ``tieredckpt`` and with ``honor_labels``. The label ``job`` of their
metrics is the training job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JOB = 'job=~"$job"'
NODE = 'instance=~"$instance"'
BOTH = f"{JOB},{NODE}"
WINDOW = "$__rate_interval"
AGENTS = 'up{job="tieredckpt"}'
RUNBOOK = "docs/troubleshooting.md"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_PANEL_HEIGHT = 8


@dataclass(frozen=True)
class PanelQuery:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class DashboardPanel:
    """A panel of the dashboard."""

    title: str
    description: str
    unit: str
    """Grafana's identifier of the unit."""
    queries: tuple[PanelQuery, ...]
    kind: str
    top: float | None
    """Largest value of the axis. ``None``: chosen by Grafana."""


@dataclass(frozen=True)
class AlertRule:
    """An alert. ``summary`` and ``description`` are templates of Prometheus."""

    name: str
    expr: str
    hold: str
    """Time for which the expression must hold before the alert fires."""
    severity: str
    summary: str
    description: str


def _trainer(what: str, labels: str = BOTH) -> str:
    return f'tieredckpt_trainer_total{{{labels},what="{what}"}}'


def _per_save(what: str) -> str:
    return f"sum by (job) (rate({_trainer(what)}[{WINDOW}])) / sum by (job) (rate({_trainer('saves')}[{WINDOW}]))"


def _by_job(combine: str, name: str) -> PanelQuery:
    return PanelQuery(f"{combine} by (job) ({name}{{{BOTH}}})", "{{job}}")


def _job_rate(name: str, legend: str) -> PanelQuery:
    return PanelQuery(f"sum by (job) (rate({name}{{{BOTH}}}[{WINDOW}]))", f"{{{{job}}}} {legend}")


def _node(name: str, legend: str = "{{instance}}") -> PanelQuery:
    return PanelQuery(f"{name}{{{NODE}}}", legend)


def _node_rate(name: str, legend: str = "", window: str = WINDOW, function: str = "rate") -> PanelQuery:
    return PanelQuery(f"{function}({name}{{{NODE}}}[{window}])", f"{{{{instance}}}} {legend}".rstrip())


def _goodput(name: str, legend: str) -> PanelQuery:
    return PanelQuery(f"max by (job) ({name}{{{JOB}}})", legend)


def _panel(
    title: str, description: str, unit: str, *queries: PanelQuery, kind: str = "timeseries", top: float | None = None
) -> DashboardPanel:
    return DashboardPanel(title, description, unit, queries, kind, top)


ROWS = {
    "Protection": (
        _panel(
            "Protected step",
            "Newest step that has all its replicas or is durable. -1: none",
            "none",
            _by_job("max", "tieredckpt_protected_step"),
            kind="stat",
        ),
        _panel(
            "Unprotected time",
            "Time for which newer saves have had neither replicas nor a durable copy",
            "s",
            _by_job("max", "tieredckpt_unprotected_seconds"),
        ),
        _panel(
            "Steps at risk",
            "Steps that the loss of a node would repeat: newest complete step minus protected step",
            "none",
            PanelQuery(
                f"max by (job) (tieredckpt_newest_complete_step{{{BOTH}}}) - "
                f"max by (job) (tieredckpt_protected_step{{{BOTH}}})",
                "{{job}}",
            ),
        ),
        _panel(
            "Shards without all replicas",
            "Shards that lack replicas, and those for which no node is suitable",
            "none",
            PanelQuery(f"sum by (job) (tieredckpt_shards_under_replicated{{{BOTH}}})", "{{job}} under-replicated"),
            PanelQuery(f"sum by (job) (tieredckpt_shards_unplaceable{{{BOTH}}})", "{{job}} unplaceable"),
        ),
    ),
    "Saves": (
        _panel(
            "Time per save",
            "Mean time of a rank: training blocked, copy to memory, checksums and seal",
            "s",
            PanelQuery(_per_save("blocked_seconds"), "{{job}} blocked"),
            PanelQuery(_per_save("copy_seconds"), "{{job}} copy"),
            PanelQuery(_per_save("seal_seconds"), "{{job}} seal"),
        ),
        _panel(
            "Saves of ranks",
            "Saves that were sealed, skipped or failed",
            "ops",
            PanelQuery(
                f'sum by (job, what) (rate(tieredckpt_trainer_total{{{BOTH},what=~"saves|skipped|failed"}}[{WINDOW}]))',
                "{{job}} {{what}}",
            ),
        ),
        _panel(
            "Saved bytes",
            "Bytes that ranks saved to memory",
            "Bps",
            PanelQuery(f"sum by (job) (rate({_trainer('saved_bytes')}[{WINDOW}]))", "{{job}}"),
        ),
    ),
    "Durable uploads": (
        _panel(
            "Durable steps in the last hour",
            "Steps made durable, and steps skipped because a newer one was ready",
            "none",
            _node_rate("tieredckpt_drained_steps_total", "durable", "1h", "increase"),
            _node_rate("tieredckpt_drain_skips_total", "skipped", "1h", "increase"),
        ),
        _panel(
            "Failed uploads",
            "Failed attempts to make a step durable. Failures are retried",
            "none",
            _node_rate("tieredckpt_drain_errors_total", function="increase"),
        ),
        _panel("Upload bandwidth", "Bytes uploaded per second", "Bps", _node_rate("tieredckpt_drained_bytes_total")),
        _panel(
            "Upload lag",
            "Time from the seal of the last durable step to its manifest",
            "s",
            _node("tieredckpt_drain_lag_seconds"),
        ),
    ),
    "Peers": (
        _panel(
            "Live nodes",
            "Live nodes as each job's agents see them. The values differ during a network partition",
            "none",
            PanelQuery(f"min by (job) (tieredckpt_peers_alive{{{BOTH}}})", "{{job}} fewest"),
            PanelQuery(f"max by (job) (tieredckpt_peers_alive{{{BOTH}}})", "{{job}} most"),
            PanelQuery(f"sum by (job) (1 - tieredckpt_peers_quorum{{{BOTH}}})", "{{job}} without quorum"),
        ),
        _panel(
            "Replication",
            "Bytes sent for replicas, and bytes that were unchanged and not sent",
            "Bps",
            _job_rate("tieredckpt_copied_bytes_total", "sent"),
            _job_rate("tieredckpt_copies_unchanged_bytes_total", "unchanged"),
        ),
        _panel(
            "Replication lag",
            "Time from the seal of the last replicated shard to its replica",
            "s",
            _by_job("max", "tieredckpt_copy_lag_seconds"),
        ),
        _panel(
            "Failed replicas",
            "Replicas that failed and were retried",
            "ops",
            _job_rate("tieredckpt_copy_errors_total", "failed"),
        ),
        _panel(
            "Speed to other nodes",
            "Measured speed of replicas from each node to another node",
            "Bps",
            PanelQuery(f"tieredckpt_path_bytes_per_second{{{BOTH}}}", "{{instance}} to {{node}}"),
        ),
    ),
    "Memory": (
        _panel(
            "Memory budget in use",
            "Share of the agent's budget that slots use",
            "percentunit",
            PanelQuery(
                f"tieredckpt_arena_allocated_bytes{{{NODE}}} / tieredckpt_arena_budget_bytes{{{NODE}}}", "{{instance}}"
            ),
            top=1.0,
        ),
        _panel(
            "Memory by use",
            "Bytes of sealed shards, of all slots, and the budget",
            "bytes",
            _node("tieredckpt_arena_sealed_bytes", "{{instance}} sealed"),
            _node("tieredckpt_arena_allocated_bytes", "{{instance}} allocated"),
            _node("tieredckpt_arena_budget_bytes", "{{instance}} budget"),
        ),
        _panel(
            "Saves without a free slot",
            "Saves that found every slot in use or did not fit the budget",
            "none",
            _node_rate("tieredckpt_leases_busy_total", "busy", function="increase"),
            _node_rate("tieredckpt_leases_over_budget_total", "over budget", function="increase"),
        ),
    ),
    "Recovery and goodput": (
        _panel(
            "Goodput",
            "Share of the capacity and of the time in steps that count. Needs `tieredckpt goodput --prometheus`",
            "percentunit",
            _goodput("tieredckpt_goodput_ratio", "{{job}} goodput"),
            _goodput("tieredckpt_ettr_ratio", "{{job}} ETTR"),
            top=1.0,
        ),
        _panel(
            "Time of the job",
            "Time of the job by category. Needs `tieredckpt goodput --prometheus`",
            "s",
            PanelQuery(f"max by (job, category) (tieredckpt_job_seconds{{{JOB}}})", "{{job}} {{category}}"),
        ),
        _panel(
            "Faults and worlds",
            "Faults, and worlds that were formed. Needs `tieredckpt goodput --prometheus`",
            "none",
            _goodput("tieredckpt_job_faults", "{{job}} faults"),
            _goodput("tieredckpt_job_world_changes", "{{job}} worlds"),
        ),
        _panel(
            "Starts and restores",
            "Changes of the job's epoch in the last hour, and restores of ranks",
            "none",
            PanelQuery(f"max by (job) (changes(tieredckpt_job_epoch{{{BOTH}}}[1h]))", "{{job}} epochs"),
            PanelQuery(f"sum by (job) (increase({_trainer('loads')}[1h]))", "{{job}} restores"),
        ),
        _panel(
            "Time to recover",
            "Mean time from a fault to the next step. Needs `tieredckpt goodput --prometheus`",
            "s",
            _goodput("tieredckpt_mttr_seconds", "{{job}}"),
        ),
    ),
    "Agent health": (
        _panel(
            "Agents that answer",
            "Agents that Prometheus could scrape, and all of its targets",
            "none",
            PanelQuery(f"sum({AGENTS})", "answering"),
            PanelQuery(f"count({AGENTS})", "targets"),
            kind="stat",
        ),
        _panel(
            "Open files",
            "Open files and connections as a share of the limit",
            "percentunit",
            PanelQuery(f"tieredckpt_files_open{{{NODE}}} / tieredckpt_files_limit{{{NODE}}}", "{{instance}}"),
            top=1.0,
        ),
        _panel(
            "Damaged copies",
            "Copies with wrong checksums, and failed reads of shards",
            "none",
            _node("tieredckpt_damaged_copies_total", "{{instance}} damaged"),
            _node("tieredckpt_unreadable_reads_total", "{{instance}} unreadable"),
        ),
        _panel(
            "Agent errors",
            "Refused requests, revoked leases and events that the agent failed to handle",
            "none",
            _node_rate("tieredckpt_rejected_busy_total", "refused", function="increase"),
            _node_rate("tieredckpt_leases_lost_total", "leases revoked", function="increase"),
            _node_rate("tieredckpt_listener_errors_total", "events", function="increase"),
        ),
    ),
}


ALERTS = (
    AlertRule(
        "TieredckptUnprotected",
        "max by (job) (tieredckpt_unprotected_seconds) > 600 and on (job) "
        'sum by (job) (increase(tieredckpt_trainer_total{what=~"saves|skipped|failed"}[1h])) > 0',
        "1m",
        "critical",
        "Job {{ $labels.job }} has been unprotected for {{ $value | humanizeDuration }}",
        "Newer saves have neither all replicas nor a durable copy, and the loss of a node repeats their steps. "
        "Run `tieredckpt status {{ $labels.job }} --cluster` for the missing copies and the last upload error. "
        "A job on one node depends on durable.every: raise the limit of this alert if its uploads are further apart.",
    ),
    AlertRule(
        "TieredckptSavesFail",
        'sum by (job) (increase(tieredckpt_trainer_total{what="failed"}[10m])) > 0',
        "0m",
        "critical",
        "Saves of job {{ $labels.job }} fail",
        "The newest complete step stays, and training continues. Read the error in the trainer's log. "
        "If the memory is too small, raise agent.budget and restart the agent.",
    ),
    AlertRule(
        "TieredckptUploadsFail",
        "increase(tieredckpt_drain_errors_total[10m]) > 0",
        "15m",
        "critical",
        "Uploads from {{ $labels.instance }} fail",
        "Uploads have failed for 15 minutes. Run `tieredckpt doctor` on the node: it tries the store and shows the "
        "credentials. `tieredckpt status JOB` shows the last error.",
    ),
    AlertRule(
        "TieredckptNoNewDurableStep",
        "increase(tieredckpt_drained_steps_total[1h]) == 0 and tieredckpt_drained_steps_total > 0 "
        "and increase(tieredckpt_seals_total[1h]) > 0",
        "30m",
        "warning",
        "{{ $labels.instance }} has made no step durable for more than an hour",
        "The node saves to memory, and uploads that worked before have stopped. Run `tieredckpt status JOB` for "
        "pending uploads, and compare durable.every and durable.bandwidth with the time between saves.",
    ),
    AlertRule(
        "TieredckptAgentDown",
        "count by (instance, job) (count_over_time(tieredckpt_job_epoch[30m])) "
        "and on (job) count by (job) (tieredckpt_job_epoch) "
        f"and on (instance) {AGENTS} == 0",
        "3m",
        "critical",
        "The agent on {{ $labels.instance }} does not answer, and job {{ $labels.job }} continues on other nodes",
        "Its copies are unavailable. Run `tieredckpt agent ls` on the node, then `tieredckpt agent restart`. "
        "If the node is lost, replace it. Ignore the alert if the node left the job on purpose.",
    ),
    AlertRule(
        "TieredckptAgentNotScraped",
        "max by (job) (tieredckpt_peers_alive) > count by (job) (tieredckpt_job_epoch)",
        "10m",
        "warning",
        "Prometheus scrapes fewer agents of job {{ $labels.job }} than the job has nodes",
        "Other alerts do not see the missing agents. Set agent.http to HOST:PORT on every node, open the port for "
        "Prometheus, and add the nodes to the scrape configuration.",
    ),
    AlertRule(
        "TieredckptArenaNearlyFull",
        "tieredckpt_arena_allocated_bytes / tieredckpt_arena_budget_bytes > 0.95",
        "15m",
        "warning",
        "Slots on {{ $labels.instance }} use {{ $value | humanizePercentage }} of the memory budget",
        "Another job or a larger state will not fit. Raise agent.budget and restart the agent, set "
        "agent.burst_slots to 0, or delete finished jobs with `tieredckpt rm JOB`.",
    ),
    AlertRule(
        "TieredckptDamagedShard",
        "increase(tieredckpt_damaged_copies_total[1h]) > 0 "
        "or (tieredckpt_damaged_copies_total > 0 unless tieredckpt_damaged_copies_total offset 1h)",
        "0m",
        "warning",
        "A copy with wrong checksums was found on {{ $labels.instance }}",
        "The copy is not used, and is fetched again from another node. Run `tieredckpt verify JOB`. If a node repeats "
        "this alert, suspect its memory: drain the node and test it.",
    ),
    AlertRule(
        "TieredckptRecoveriesRepeat",
        "max by (job) (changes(tieredckpt_job_epoch[1h])) >= 4",
        "0m",
        "warning",
        "Job {{ $labels.job }} has started or recovered {{ $value }} times in an hour",
        "Run `tieredckpt goodput JOB --faults` for the node and cause of each recovery. Replace a node that fails "
        "repeatedly. `elastic run --max-restarts` stops a job that cannot continue.",
    ),
)


def grafana_dashboard() -> dict[str, Any]:
    """Return the dashboard for Grafana's import."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        header = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top}, **header})
        top += 1
        per_line = 4 if len(row) == 4 else 3
        width = _COLUMNS // per_line
        for number, panel in enumerate(row):
            line, column = divmod(number, per_line)
            place = {"h": _PANEL_HEIGHT, "w": width, "x": column * width, "y": top + line * _PANEL_HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel_json(panel)})
        top += _PANEL_HEIGHT * -(-len(row) // per_line)
    return {
        "uid": "tieredckpt",
        "title": "tieredckpt",
        "description": "Checkpoints of training jobs: protection, saves, uploads, peers, memory and recovery",
        "tags": ["tieredckpt"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable_json("job", "Job", "label_values(tieredckpt_job_epoch, job)"),
                _variable_json("instance", "Node", "label_values(tieredckpt_arena_budget_bytes, instance)"),
            ]
        },
        "panels": panels,
    }


def prometheus_rules() -> dict[str, Any]:
    """Return the alert rules as a rule file of Prometheus."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "description": alert.description,
                "runbook": f"{RUNBOOK}#{alert.name.lower()}",
            },
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "tieredckpt", "rules": rules}]}


def _panel_json(panel: DashboardPanel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any]
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "textMode": "value_and_name"}
    else:
        defaults |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
        if panel.top is not None:
            defaults["max"] = panel.top
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }


def _variable_json(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
