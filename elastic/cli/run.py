"""``elastic run``, ``elastic join`` and ``elastic coordinator``, and their scaling policy."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from elastic import settings
from elastic.cli.common import ElasticScreen, pass_elastic_screen
from elastic.cli.scaling_options import scaling_options, scaling_policy
from elastic.control.control_messages import ExitReason
from elastic.control.leader_election import is_leader_url, open_leader_record
from elastic.control.node_address import gloo_interface, node_address, resolves_to_loopback, wait_for_name
from elastic.control.run_directory import LastRun, LocalRun, RunDirectory, run_secret
from elastic.control.running_clock import since_boot
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError, PolicyError
from elastic.fault_injection.fault_actions import InjectionRecord
from elastic.launcher import (
    EXIT_STATUS,
    CoordinatorSpec,
    JobEnd,
    JobLauncher,
    SupervisorSpec,
    end_message,
    run_coordinator,
    supervisor_environ,
)
from elastic.rendezvous.store_servers import ROOTLESS
from elastic.schedulers.allocation import NodeLaunch, RunOptions, resolve_launch
from elastic.schedulers.shared_secret import shared_secret
from elastic.schedulers.slurm import remaining_nodes, requeue_job
from elastic.supervisor.memory_tier import (
    began_ns,
    newest_step_holders,
    resumable_steps,
    shut_down_left_agent,
)
from elastic.world.world_state import RequestedStep
from peerstore.membership.topology import validate_node_id
from peerstore.message_codec import from_json
from peerstore.network_addresses import (
    interface_with_address,
    is_loopback_host,
    is_wildcard_host,
    join_address,
    outbound_address,
    split_address,
)
from peerstore.store.slot_metadata import jobs_in_directory
from tieredckpt.cli.exit_codes import ExitCode, exit_code_for
from tieredckpt.errors import UsageError
from tieredckpt.event_log import EVENT_LOG_ENV
from tieredckpt.http_server import http_bind_address
from tieredckpt.location import parse_step
from tieredckpt.settings import load_settings, run_directory

log = logging.getLogger(__name__)

_GRACE_S = 30.0
_RESOLVE_S = 120.0
_LOCAL = "127.0.0.1:0"

_http_option = click.option(
    "--http",
    default="off",
    show_default=True,
    metavar="HOST:PORT|off",
    help="Serve a read-only page and /status on this address while the coordinator leads. With port 0 it picks a port "
    "and logs it.",
)


@click.command(
    "run",
    short_help="Run SCRIPT as the ranks of an elastic job.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@scaling_options
@click.option(
    "--resume-from",
    metavar="STEP[@EPOCH]",
    help="Restore exactly this step in the first world, or fail. Later worlds restore the newest step.",
)
@click.option(
    "--spares",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Spare processes per node, started in advance.",
)
@click.option(
    "--job", default="", metavar="NAME", help="Name of the job. [default: the script's name and the Slurm job ID]"
)
@click.option("--node", default="", metavar="NAME", help="Name of this node. [default: from Slurm, or the host name]")
@click.option(
    "--simulate-nodes", type=click.IntRange(1, 64), metavar="N", help="Run N nodes (n0, n1, ...) on this machine."
)
@click.option(
    "--coordinator",
    default="",
    metavar="HOST:PORT|URL",
    help="Several machines: address of the coordinator, or the record of which machine leads: "
    "kubernetes://NAMESPACE/LEASE or file:///SHARED/FILE.",
)
@click.option(
    "--listen", default="", metavar="HOST:PORT", help="Address at which other machines reach this one, with a URL."
)
@click.option(
    "--coordinator-here", is_flag=True, help="Run the coordinator on this machine, on the port of --coordinator."
)
@click.option(
    "--secret",
    default="",
    metavar="file:PATH",
    help="File with the shared secret, the same on every machine. [$ELASTIC_SECRET]",
)
@click.option(
    "--grace", type=float, default=_GRACE_S, show_default=True, help="Seconds to save and exit after SIGTERM or Ctrl-C."
)
@click.option(
    "--preempted-status",
    type=click.IntRange(0, 255),
    default=0,
    show_default=True,
    help="Exit status if this machine leaves the job on SIGTERM and the job continues. A status other than 0 makes a "
    "Kubernetes Job replace the pod.",
)
@click.option(
    "--requeue",
    is_flag=True,
    help="Requeue the Slurm job after SIGUSR1, or if its first node is lost.",
)
@_http_option
@click.option(
    "--log-dir", type=click.Path(path_type=Path), help="Directory of the ranks' log files. [default: elastic-logs/JOB]"
)
@click.option(
    "--agent/--no-agent", default=True, show_default=True, help="Start the node's checkpoint agent before its ranks."
)
@click.option("--no-python", is_flag=True, help="SCRIPT is a program, not a Python file.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("-v", "--verbose", count=True, help="Log the coordinator's decisions and their reasons.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@pass_elastic_screen
def run_command(screen: ElasticScreen, /, script: str, args: tuple[str, ...], **options: Any) -> int:
    """Run SCRIPT as the ranks of a job whose number of nodes may change.

    SCRIPT calls elastic.run or uses @elastic.recoverable. On SIGTERM or Ctrl-C the ranks agree on a step, save it and
    exit; a second Ctrl-C kills them. On SIGUSR1 the job grows to the maximum number of nodes.

    On several machines, run the same command with --coordinator HOST:PORT and the same --secret on each, and with
    --coordinator-here on one of them. On the others, SIGTERM removes this machine and the job continues.

    With --coordinator URL on each, any machine can lead, and another one takes over if it is lost. SIGTERM removes the
    machine from the job; `elastic stop` stops the job.

    Under Slurm, `srun --ntasks-per-node=1 elastic run SCRIPT` needs none of these options. Pods with Kubeflow's PET_*
    variables need only the secret. Options override both. Slurm's signals stop the job, SIGUSR1 included.
    """
    _check_agent_settings(options)
    _page_address(options["http"])
    if options["coordinator_here"] and is_leader_url(options["coordinator"]):
        raise PolicyError("--coordinator-here needs --coordinator HOST:PORT, where the other machines find it")
    if options["requeue"] and options["resume_from"]:
        raise PolicyError("--requeue with --resume-from: each requeued run would restore that step again")
    if _requested_step(options) is not None:
        screen.argv = _without_resume_from(screen.argv, 1 + len(args))
    if options["listen"] and not is_leader_url(options["coordinator"]):
        raise PolicyError("--listen needs --coordinator URL: without it no other machine looks for a coordinator here")
    if is_leader_url(options["coordinator"]):
        _check_leader_record(options["coordinator"])
    options |= {"scheduled": (scheduled := _resolve_launch(options))}
    options |= {"nnodes": scheduled.nnodes, "nproc": scheduled.nproc, "node": scheduled.node}
    options |= {"coordinator": scheduled.coordinator, "coordinator_here": scheduled.several and scheduled.leads}
    leads = scheduled.leads
    place = RunDirectory(run_directory(), options["job"] or "-".join(filter(None, (_job_name(script), scheduled.run))))
    command = _command(script, args, options)
    scheduled.refuse_more(scaling_policy(options).min_replicas)
    secret = settings.load_secret(options["secret"])
    if scheduled.several and secret is None and not scheduled.agreement:
        raise PolicyError("several machines need a secret they all know: --secret file:/path, or $ELASTIC_SECRET")
    if scheduled.is_given_its_coordinator:
        wait_for_name(scheduled.coordinator, _RESOLVE_S)
    first = _node_names(options)[0]
    logs = (options["log_dir"] or Path("elastic-logs") / place.job).absolute()
    with contextlib.ExitStack() as held:
        held.enter_context(place.locked("lock" if leads else f"{first}.lock"))
        if scheduled.several and secret is None:
            shared = settings.shared_directory()
            secret = held.enter_context(shared_secret(shared, scheduled.agreement, makes=leads))
        record = LocalRun(
            job=place.job,
            coordinator=options["coordinator"],
            secret_file=str(place.write_secret(secret, "" if leads else first)),
            nproc=options["nproc"],
            spares=options["spares"],
            command=command,
            working_directory=str(Path.cwd()),
            logs=str(logs),
            grace_s=options["grace"],
            event_log=str(settings.event_log_directory(logs)),
            generated_secret=secret is None,
            shared_agent_node="" if _agent_directory(place, first, options) else first,
        )
        place.end_file.unlink(missing_ok=True)
        if leads:  # another node of this machine may start after the coordinator has written its address
            place.address_file.unlink(missing_ok=True)
            InjectionRecord(place.directory).clear()
        leader = (
            _coordinator_spec(place, record, options, _join_command(place.job, options, screen.argv)) if leads else None
        )
        nodes = [_supervisor_spec(place, record, name, options) for name in _node_names(options)]
        if leader is not None and leader.requested_step is None and len(nodes) > 1:
            environs = {task.node: supervisor_environ(task) for task in nodes if task.starts_agent}
            leader = msgspec.structs.replace(leader, holders=newest_step_holders(environs))
        again = scheduled.run if options["requeue"] else ""
        return _launch(screen, place, record, nodes, leader, notices=scheduled.notices, requeue=again)


def _check_agent_settings(options: dict[str, Any]) -> None:
    """Raise :class:`SettingsError` before anything starts: no node would have an agent."""
    if options["agent"]:
        load_settings()


def _resolve_launch(options: dict[str, Any]) -> NodeLaunch:
    """Return the role of this process in its job, from its options and its scheduler."""
    wanted = RunOptions(
        nnodes=options["nnodes"],
        nproc=options["nproc"],
        node=options["node"],
        coordinator=options["coordinator"],
        coordinator_here=options["coordinator_here"],
        simulated=options["simulate_nodes"],
    )
    found = settings.allocation()
    if options["requeue"] and not (found is not None and found.notices):
        raise PolicyError("--requeue: this process is not a step of a Slurm job, started with srun")
    return resolve_launch(wanted, found, is_mine=lambda address: interface_with_address(address) is not None)


@click.command("join")
@click.argument("job", required=False)
@click.option("--node", default="", metavar="NAME", help="Name of the new node. [default: the next free n0, n1, ...]")
@click.option(
    "--agent/--no-agent", default=True, show_default=True, help="Start the node's checkpoint agent before its ranks."
)
@click.option("-v", "--verbose", count=True, help="Log the coordinator's decisions and their reasons.")
@pass_elastic_screen
def join_command(screen: ElasticScreen, /, job: str | None, node: str, **options: Any) -> int:
    """Add a node on this machine to a job that was started on it."""
    from elastic.cli.job_control import find_run

    _check_agent_settings(options)
    place, record = find_run(job)
    name = str(validate_node_id(node)) if node else _free_name(place)
    os.chdir(record.working_directory)
    with place.locked(f"{name}.lock"):
        task = _supervisor_spec(
            place,
            record,
            name,
            {**options, "node": name, "simulate_nodes": 2, "coordinator": "", "coordinator_here": False, "listen": ""},
        )
        if not is_leader_url(record.coordinator):
            task = msgspec.structs.replace(task, joined_run=str(place.root))
        return _launch(screen, place, record, [task], None)


@click.command("coordinator", short_help="Run only the coordinator of a job.")
@scaling_options
@click.option(
    "--listen", required=True, metavar="HOST:PORT", help="Address to listen on; without a host, on every address."
)
@click.option("--job", required=True, metavar="NAME", help="The job's name.")
@click.option("--secret", default="", metavar="file:PATH", help="File with the secret of the nodes. [$ELASTIC_SECRET]")
@click.option(
    "--leadership",
    default="",
    metavar="URL",
    help="Wait as a standby, and lead if no other coordinator does. URL as in `elastic run --coordinator URL`.",
)
@_http_option
@click.option("-v", "--verbose", count=True, help="Log the coordinator's decisions and their reasons.")
@pass_elastic_screen
def coordinator_command(
    screen: ElasticScreen, /, listen: str, job: str, secret: str, verbose: int, **options: Any
) -> int:
    """Run a coordinator alone, for nodes that use `elastic run --coordinator HOST:PORT`.

    It stores only the number of the newest world. After a restart it learns the job from the nodes, which keep
    training.
    """
    import logging

    split_address(listen)
    known = settings.load_secret(secret)
    if known is None:
        raise PolicyError("a coordinator needs the secret of its nodes: --secret file:/path, or $ELASTIC_SECRET")
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="elastic: %(message)s")
    place = RunDirectory(run_directory(), job)
    if options["leadership"]:
        _check_leader_record(options["leadership"])
    task = CoordinatorSpec(
        job=place.job,
        secret_file="",
        listen=listen,
        policy=scaling_policy(options),
        nproc=options["nproc"] or 1,
        fresh=False,
        epoch_file="" if options["leadership"] else str(place.epoch_file),
        store=_store(options["store"]),
        hang=settings.hang_limits(options["hang_timeout"], options["first_step_timeout"]),
        leadership=options["leadership"],
        stands_by=True,
        http=_page_address(options["http"]),
    )
    end = run_coordinator(task, known)
    while end.over is ExitReason.DISMISSED:  # another one leads
        log.warning("%s", end.reason)
        end = run_coordinator(task, known)
    screen.info(end_message(end))
    return EXIT_STATUS[end.over]


def _launch(
    screen: ElasticScreen,
    place: RunDirectory,
    record: LocalRun,
    nodes: list[SupervisorSpec],
    leader: CoordinatorSpec | None,
    *,
    notices: bool = False,
    requeue: str = "",
) -> int:
    """Run the nodes and the coordinator until the job ends, and return the exit status.

    ``requeue`` is the Slurm job ID to requeue if necessary; "" for none.
    """
    import logging

    logging.basicConfig(level=logging.WARNING, format="elastic: %(message)s", stream=sys.stderr)

    has_leader_record = is_leader_url(record.coordinator)

    def known(address: str) -> None:
        if leader is not None or has_leader_record:
            place.write(msgspec.structs.replace(record, coordinator=address))
        screen.info(f"job {record.job}: coordinator on {address}, output of the ranks in {record.logs}")

    began = since_boot(), time.time_ns()
    launcher = JobLauncher(
        nodes,
        leader,
        run_secret(record),
        grace_s=record.grace_s,
        notices=notices,
        on_address=known,
    )
    end: JobEnd | None = None
    status: int = ExitCode.FAILED
    try:
        status = launcher.run()
    except Exception as error:
        status = exit_code_for(error, screen.codes_by_error)
        if status == ExitCode.JOB_FAILED:
            end = JobEnd(ExitReason.JOB_FAILED, str(error), "not retried")
        raise
    finally:
        if leader is not None and (record_of_end := place.end_record()):
            end = from_json(record_of_end, JobEnd)
        if leader is not None and status in (ExitCode.STOPPED, ExitCode.JOB_FAILED):
            end = end or JobEnd(next(over for over, code in EXIT_STATUS.items() if code == status), "")
            environs = [supervisor_environ(task) for task in nodes if task.starts_agent]
            steps = resumable_steps(environs, began_ns(*began), place)
            screen.info(end_message(end, str(steps), _same_command(screen.argv)))
        elif leader is not None and end is not None and end.over is ExitReason.NEVER_JOINED:
            screen.info(end_message(end))
        if leader is not None or has_leader_record:
            # Before the removal: a node that has joined reads how the run ended once its record is gone.
            how = next((over.value for over, code in EXIT_STATUS.items() if code == status), f"status {int(status)}")
            place.write_last_run(LastRun(record.job, how, time.time(), _same_command(screen.argv)))
            place.remove()
        has_finished = leader is not None and status == ExitCode.OK
        for task in nodes:
            if has_finished and task.starts_agent and task.node in launcher.killed_nodes:
                shut_down_left_agent(supervisor_environ(task), place.directory)
            with contextlib.suppress(PermissionError):
                (place.directory / f"{task.node}.secret").unlink(missing_ok=True)
            _remove_directory(Path(task.directory))
    if leader is None and status in (ExitCode.STOPPED, ExitCode.JOB_FAILED):
        screen.info(f"the same command resumes the job: {_same_command(screen.argv)}")
    if requeue and _is_to_requeue(requeue, nodes[0], status, noticed=launcher.noticed):
        screen.info(requeue_job(requeue))
    return status


def _is_to_requeue(job: str, mine: SupervisorSpec, status: int, *, noticed: bool) -> bool:
    """Return whether this node requeues the job.

    After a notice has stopped it, the leader's node does. If Slurm lost that node, the first remaining node does.
    """
    if status == ExitCode.STOPPED:
        return noticed and mine.has_local_coordinator
    if status != ExitCode.JOB_FAILED or mine.has_local_coordinator or not mine.coordinator_node:
        return False
    left = remaining_nodes(job)
    return mine.coordinator_node not in left and left[:1] == (mine.node,)


def _same_command(argv: Sequence[str]) -> str:
    return shlex.join(["elastic", *argv])


def _without_resume_from(argv: Sequence[str], script_words: int) -> list[str]:
    """Return the command line that resumes the job, without --resume-from: it would drop the new steps.

    The last ``script_words`` words are the script and its arguments.
    """
    end = len(argv) - script_words
    words = list(argv[:end])
    for at in reversed(range(end)):
        if words[at] == "--resume-from":
            del words[at : at + 2]
        elif words[at].startswith("--resume-from="):
            del words[at]
    return [*words, *argv[end:]]


def _requested_step(options: dict[str, Any]) -> RequestedStep | None:
    """Return the step that --resume-from names."""
    if not options.get("resume_from"):
        return None
    try:
        return RequestedStep(*parse_step(options["resume_from"]))
    except UsageError as error:
        raise PolicyError(f"--resume-from: {error}") from error


def _remove_directory(directory: Path) -> None:
    """Remove a supervisor's directory, unless it has an agent's files."""
    with contextlib.suppress(PermissionError):
        if not (directory / "agent").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _join_command(job: str, options: dict[str, Any], argv: Sequence[str]) -> str:
    """Return the command that adds a node, on this machine or on another one with the same coordinator."""
    if not options["coordinator"]:
        return f"elastic join {job} (on this machine; other machines need --coordinator HOST:PORT)"
    return _same_command([word for word in argv if word != "--coordinator-here"])


def _coordinator_spec(
    place: RunDirectory, record: LocalRun, options: dict[str, Any], join_command: str
) -> CoordinatorSpec:
    listen = _LOCAL
    if options["coordinator"]:
        host, port = split_address(options["coordinator"])
        everywhere = (
            is_wildcard_host(host)
            or _scheduled(options).is_given_its_coordinator
            or resolves_to_loopback(options["coordinator"])
        )
        listen = join_address("" if everywhere else host, port)
    return CoordinatorSpec(
        job=record.job,
        secret_file=record.secret_file,
        listen=listen,
        policy=scaling_policy(options),
        nproc=record.nproc,
        fresh=True,
        store=_store(options["store"]),
        address_file=str(place.address_file),
        end_file=str(place.end_file),
        hang=settings.hang_limits(options["hang_timeout"], options["first_step_timeout"]),
        event_log=record.event_log,
        local_nodes=len(_node_names(options)),
        join_command=join_command,
        requested_step=_requested_step(options),
        http=_page_address(options["http"]),
        verbose=options["verbose"],
    )


def _supervisor_spec(place: RunDirectory, record: LocalRun, name: str, options: dict[str, Any]) -> SupervisorSpec:
    directory = place.node_directory(name)
    if is_leader_url(record.coordinator):
        host = _reachable_host(options["listen"])
    else:
        host = node_address(record.coordinator, _scheduled(options).others)
    mine = {EVENT_LOG_ENV: record.event_log} if record.event_log else {}
    mine |= _peer_secret(place, record)
    if (interface := gloo_interface(host)) is not None:
        mine |= settings.gloo_on(interface)
    if options["node"] and not settings.has_agent_name():
        mine["TIEREDCKPT_AGENT_NODE"] = name
    if name != record.shared_agent_node and (memory := _agent_directory(place, name, options)):
        mine |= _own_agent(memory)
        if is_loopback_host(host) and not settings.has_agent_address():
            mine["TIEREDCKPT_AGENT_PEERS"] = join_address(host, 0)
    return SupervisorSpec(
        job=record.job,
        secret_file=record.secret_file,
        node=name,
        coordinator=record.coordinator,
        command=record.command,
        directory=str(directory),
        logs=record.logs,
        nproc=record.nproc,
        spares=record.spares,
        host=host,
        lead=_standby_coordinator(record, options, host)
        if is_leader_url(record.coordinator) and "nnodes" in options
        else None,
        sigterm_grace_s=record.grace_s,
        starts_agent=options["agent"],
        environ=mine,
        has_local_coordinator=options["coordinator_here"] or not options["coordinator"],
        coordinator_node=_scheduled(options).other_leader,
        scheduled_job=_scheduled(options).run,
        preempted_status=options.get("preempted_status", 0),
        verbose=options["verbose"],
    )


def _standby_coordinator(record: LocalRun, options: dict[str, Any], host: str) -> CoordinatorSpec:
    """Return the coordinator that any node of the job may have to start."""
    port = split_address(options["listen"])[1] if options["listen"] else 0
    return CoordinatorSpec(
        job=record.job,
        secret_file=record.secret_file,
        listen=join_address(host, port),
        policy=scaling_policy(options),
        nproc=record.nproc,
        fresh=False,
        store=_store(options["store"]),
        hang=settings.hang_limits(options["hang_timeout"], options["first_step_timeout"]),
        event_log=record.event_log,
        leadership=record.coordinator,
        requested_step=_requested_step(options),
        http=_page_address(options["http"]),
        verbose=options["verbose"],
    )


def _page_address(http: str) -> tuple[str, int] | None:
    return None if http == "off" else http_bind_address("--http", http)


def _check_leader_record(url: str) -> None:
    """Raise :class:`ControlPlaneRefusedError` for an unusable leader record, and log an unavailable one."""
    with contextlib.closing(open_leader_record(url)) as leadership:
        try:
            leadership.read()
        except ControlPlaneRefusedError:
            raise
        except ControlPlaneUnavailableError as error:
            log.warning("%s", error)


def _agent_directory(place: RunDirectory, name: str, options: dict[str, Any]) -> Path | None:
    """Return the directory of the node's agent; ``None`` for the machine's shared one.

    Each simulated node has its own agent, so that the peer tier has several nodes. A restarted job finds the steps
    there, even if it has one node now. An agent without steps does not count: a node that joined a run that had ended
    leaves one.
    """
    own = place.node_directory(name) / "agent"
    if (options["simulate_nodes"] or 1) > 1 or jobs_in_directory(own):
        return own
    if options["coordinator"] or settings.has_agent_directory():
        return None
    left = [one for one in place.directory.glob("*/agent") if jobs_in_directory(one)]
    return min(left, key=lambda one: (not (one / "agent.sock").exists(), one), default=None)


def _own_agent(directory: Path) -> dict[str, str]:
    """Return the environment of a node with its agent in ``directory``.

    It also names the directory of this machine's agent.
    """
    return {
        "TIEREDCKPT_AGENT_DIRECTORY": str(directory),
        "TIEREDCKPT_AGENT_NODE": directory.parent.name,
        settings.SHARED_AGENT_VARIABLE: str(settings.default_agent_directory()),
    }


def _peer_secret(place: RunDirectory, record: LocalRun) -> dict[str, str]:
    """Derive the secret of the job's agents from the job's secret, unless one is configured."""
    if settings.has_peer_secret():
        return {}
    return {
        "TIEREDCKPT_PEER_SECRET": f"file:{place.write_peer_secret(run_secret(record), keep=record.generated_secret)}"
    }


def _store(chosen: str) -> str:
    """Return the coordinator's store setting: "" for a store on one of the nodes."""
    if not chosen:
        return ROOTLESS if settings.wants_rootless_store() else ""
    if chosen in ("single", ROOTLESS):
        return chosen if chosen == ROOTLESS else ""
    split_address(chosen)
    return chosen


def _scheduled(options: dict[str, Any]) -> NodeLaunch:
    return options.get("scheduled") or NodeLaunch("1", 1)


def _reachable_host(listen: str) -> str:
    """Return the host at which other nodes reach this one and its coordinator."""
    host, _ = split_address(listen or ":0")
    return outbound_address() if is_wildcard_host(host) else host


def _node_names(options: dict[str, Any]) -> list[str]:
    if options["simulate_nodes"]:
        return [f"{options['node'] or 'n'}{number}" for number in range(options["simulate_nodes"])]
    return [str(validate_node_id(options["node"] or socket.gethostname()))]


def _free_name(place: RunDirectory) -> str:
    number = 0
    while (place.directory / f"n{number}").exists():
        number += 1
    return f"n{number}"


def _job_name(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem)[:100] or "job"


def _command(script: str, args: tuple[str, ...], options: dict[str, Any]) -> tuple[str, ...]:
    if options["no_python"]:
        return (script, *args)
    if options["module"]:
        return (sys.executable, "-u", "-m", script, *args)
    if not Path(script).is_file():
        raise PolicyError(f"there is no file {script!r}: for a program write --no-python, for a module -m")
    return (sys.executable, "-u", script, *args)
