"""``tieredckpt doctor``: checks of memory, agent, durable tier, credentials, clock and bandwidth."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.table import Table

from peerstore.daemon_process import ensure_private_directory
from peerstore.errors import AgentUnreachableError, PeerStoreError, RequestError
from peerstore.settings import AgentPaths, parse_budget
from peerstore.sizes_and_durations import parse_size, show_seconds, show_size
from peerstore.suggestions import did_you_mean
from peerstore.transport.unix import connect_to_agent
from tieredckpt.agent.agent_client import NodeAgentClient, file_system_type
from tieredckpt.cli.command_output import CommandOutput, literal, text_table
from tieredckpt.cli.common_options import pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.findings import (
    CheckResult,
    CheckStatus,
    LossSurvival,
    MemoryMeasurements,
    about_nccl,
    check_clock_skew,
    check_failed,
    check_memory,
    check_passed,
    check_warning,
    survivals_by_job,
)
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import (
    DurableRefusedError,
    FormatVersionError,
    SettingsError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.http_server import UNIX
from tieredckpt.memory_service_options import jobs_in_use
from tieredckpt.settings import DurableSettings, Settings, override_settings, require_plain_url

FRAMEWORK_CHECKS = "tieredckpt.framework_checks"
"""Entry-point group of functions from a framework's name, settings and environment to findings."""
FrameworkCheck = Callable[[str, Settings, Mapping[str, str]], list[CheckResult]]
_TIMEOUT_S = 5.0
_AGENT_STORE = "agent's uploads"
_STORE = ("durable tier", "credentials", "clock")
"""Subjects of findings about a store that stop all uploads if they fail."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@with_exit_code_help
@click.command("doctor", short_help="Check this node, its agent and the durable tier.")
@click.option("--bandwidth", is_flag=True, help="Measure the speed of an upload of --size to the durable tier.")
@click.option("--size", default="64MiB", show_default=True, help="Size of the upload of --bandwidth.")
@click.option("--gpu", is_flag=True, help="Test the functions of this node's devices that saves and recovery need.")
@click.option(
    "--framework", default="", metavar="NAME", help="Check a framework's version and settings, for example lightning."
)
@tier_options
@pass_output
def doctor_command(
    screen: CommandOutput,
    *,
    bandwidth: bool,
    size: str,
    gpu: bool,
    framework: str,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Check this node, its agent and the durable tier, and list what survives each kind of loss.

    Writes, reads and deletes one small object in the durable tier, from this shell and from the agent. Exit code 1 if
    something is wrong.
    """
    try:
        settings = settings_from_options(agent_dir, durable)
        require_plain_url(settings)
        probe_bytes = parse_size(size)
    except SettingsError as error:
        return _print_report(screen, [check_failed("settings", str(error), "correct these keys")], [])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--size") from error
    found = [_about_settings(settings), *_about_framework(framework, settings)]
    with screen.spinner("looking at this node"):
        agent = _about_agent(settings)
        found += [*_about_node(settings), *agent.found]
    broken = {one.url for one in agent.stores if one not in agent.usable}
    for store in agent.stores if agent.stores and not settings.durable.url else [settings.durable]:
        with screen.spinner(f"trying {store.url}"):
            about_store = _about_durable(store, probe_bytes if bandwidth else 0)
        if any((one.url, one.options) == (store.url, store.options) for one in agent.usable):
            about_store = [_only_this_shell(one) for one in about_store]
        found += about_store
        if any(one.status is CheckStatus.FAILED and one.subject in _STORE for one in about_store):
            broken.add(store.url)
    found.append(about_nccl(os.environ, needed=gpu))
    if gpu:
        from tieredckpt.cli.device_checks import check_devices  # imports torch, which takes seconds

        with screen.spinner("trying this node's devices"):
            found += check_devices()
    return _print_report(screen, found, survivals_by_job(settings, agent.tiers, broken))


def _print_report(screen: CommandOutput, found: Sequence[CheckResult], rows: Sequence[LossSurvival]) -> ExitCode:
    code = ExitCode.FAILED if any(one.status is CheckStatus.FAILED for one in found) else ExitCode.OK
    value = {
        "well": code is ExitCode.OK,
        "findings": [one.as_json() for one in found],
        "survival": [{"lost": row.loss, "jobs": row.jobs or None, "left": row.survives} for row in rows],
    }

    def show(out: Console) -> None:
        _show_findings(out, found)
        if rows:
            out.print()
            out.print(_survival_table(rows))

    screen.result(value, show)
    return code


def _survival_table(rows: Sequence[LossSurvival]) -> Table:
    if any(row.jobs for row in rows):
        cells = [[row.loss, literal(row.jobs or "all"), literal(row.survives)] for row in rows]
        return text_table(["IF THIS IS LOST", "JOBS", "THIS IS LEFT"], cells)
    return text_table(["IF THIS IS LOST", "THIS IS LEFT"], [[row.loss, literal(row.survives)] for row in rows])


def _show_findings(out: Console, found: Sequence[CheckResult]) -> None:
    colours = {CheckStatus.PASSED: "green", CheckStatus.WARNING: "yellow", CheckStatus.FAILED: "bold red"}
    width = max(len(one.subject) for one in found)
    for one in found:
        out.print(f"[{colours[one.status]}]{one.status.value:<4}[/]  {one.subject:<{width}}  {literal(one.message)}")
        if one.hint:
            out.print(
                f"{'':<{width + 8}}{literal(one.hint)}",
                style="dim" if one.status is CheckStatus.WARNING else "bold",
            )


def _about_settings(settings: Settings) -> CheckResult:
    path = os.environ.get("TIEREDCKPT_CONFIG")
    named = sorted(name for name in os.environ if name.startswith("TIEREDCKPT_") and name != "TIEREDCKPT_CONFIG")
    sources = ([path] if path else []) + named
    text = f"from {', '.join(sources)}" if sources else "all defaults"
    if not settings.enabled:
        return check_warning(
            "settings", f"{text}; switched off: scripts write plain checkpoints to {settings.durable.url}"
        )
    return check_passed("settings", text)


def _about_framework(name: str, settings: Settings) -> list[CheckResult]:
    if not name:
        return []
    checks = {point.name: point for point in metadata.entry_points(group=FRAMEWORK_CHECKS)}
    if name not in checks:
        known = ", ".join(sorted(checks))
        raise click.BadParameter(
            f"there is no framework {name!r}.{did_you_mean(name, checks)} Known: {known}", param_hint="--framework"
        )
    point, advice = checks[name], "reinstall or update the package that adds this check"
    owner = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package"
    try:
        check: FrameworkCheck = point.load()
    except Exception as error:  # noqa: BLE001 - from another package's module
        return [check_failed(name, f"the check of {owner} ({point.value}) cannot be loaded: {error!r}", advice)]
    try:
        return check(name, settings, os.environ)
    except Exception as error:  # noqa: BLE001 - likewise
        return [check_failed(name, f"the check of {owner} ({point.value}) failed: {error!r}", advice)]


def _about_node(settings: Settings) -> list[CheckResult]:
    directory = settings.agent_directory
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        if directory.exists():
            ensure_private_directory(directory)
    except RequestError as error:
        return [check_failed("shared memory", str(error), "choose another agent.directory")]
    if not os.access(existing, os.W_OK):
        return [check_failed("shared memory", f"{existing} cannot be written", "choose another agent.directory")]
    state = os.statvfs(existing)
    memory = MemoryMeasurements(
        budget=parse_budget(settings.agent.budget),
        total=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        limit=_cgroup_limit(),
        file_system=file_system_type(existing),
        size=state.f_blocks * state.f_frsize,
        free=state.f_bavail * state.f_frsize,
        arena=_allocated(directory),
    )
    return check_memory(memory, str(directory))


def _cgroup_limit() -> int | None:
    for name in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(name).read_text())
            return limit if limit < 1 << 60 else None
    return None


def _allocated(directory: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory / "slots"))
    return 0


@dataclass(frozen=True)
class _AgentReport:
    """Findings about the agent, and the durable tiers of its jobs."""

    found: list[CheckResult]
    tiers: Mapping[str, DurableSettings] = field(default_factory=dict)
    """The durable tier of each job. Its URL is empty if the job has none."""
    stores: Sequence[DurableSettings] = ()
    """The different durable tiers of the jobs."""
    usable: Sequence[DurableSettings] = ()
    """The durable tiers that the agent can use."""


def _about_agent(settings: Settings) -> _AgentReport:
    paths = settings.agent_place
    try:
        connect_to_agent(paths.socket, named=paths.explicit).close()
        agent = NodeAgentClient(override_settings(settings, agent={"embedded": False}), "")
    except AgentUnreachableError:
        return _AgentReport([_about_no_agent(settings, paths)])
    except PeerStoreError as error:
        return _AgentReport([check_failed("agent", str(error), "end it and start one of this release")])
    with contextlib.closing(agent):
        return _about_running(agent, paths)


def _about_no_agent(settings: Settings, paths: AgentPaths) -> CheckResult:
    left = len(list(paths.directory.glob("slots/*")))
    text = f"none runs in {paths.directory}"
    if left:
        text += f"; {left} slots of the last one are there and are checked and taken over by the next"
    if settings.agent.embedded or not settings.enabled:
        return check_warning("agent", f"{text}; the first trainer starts one")
    return check_failed(
        "agent", text, f"agent.embedded is off: run `tieredckpt agent --dir {paths.directory}` on every node"
    )


def _about_running(agent: NodeAgentClient, paths: AgentPaths) -> _AgentReport:
    from tieredckpt.agent.__main__ import installed_version

    status = agent.store.status()
    arena = status.arena
    http = ""
    with contextlib.suppress(OSError):
        http = (paths.directory / "http").read_text().strip()
    text = (
        f"release {agent.store.server_version} in {paths.directory}, {show_size(arena.sealed_bytes)} sealed of "
        f"{show_size(arena.budget_bytes)}" + (f", {_status_at(http)}" if http else "")
    )
    if agent.store.server_version != installed_version():
        found = [
            check_failed(
                "agent", text, f"this is release {installed_version()}: end the agent and start one of this release"
            )
        ]
    else:
        found = [check_passed("agent", text)]
    for damage in status.damage_reports:
        found.append(
            check_warning("damage", f"{damage.what}: {damage.reason}", "look for failing memory when this repeats")
        )
    for slot in status.unrecognized:
        found.append(
            check_failed(
                "metadata format", f"{slot.name}: {slot.reason}", "run the release that wrote it, or a newer one"
            )
        )
    tiers: dict[str, DurableSettings] = {}
    checked: list[DurableSettings] = []
    usable: list[DurableSettings] = []
    for job in status.jobs:
        found += _about_newest_manifest(agent, job.job)
        durable = agent.list_steps(job.job).durable
        if durable is not None or (jobs_in_use([job]) and not job.job.startswith(".")):
            tiers[job.job] = durable or DurableSettings()
        if durable is not None and durable.url and durable not in checked:
            checked.append(durable)
            found.append(_about_agent_store(agent, job.job, durable, paths))
            if found[-1].status is CheckStatus.PASSED:
                usable.append(durable)
        for drain in agent.drain_status(job.job):
            if drain.state == "failed" or (drain.state == "waiting" and drain.error):
                what = f"{job.job}/step-{drain.version_id.version} is {drain.state}: {drain.error}"
                found.append(check_failed("drain", what, f"see {paths.log}"))
    memory_only = sorted(job for job, durable in tiers.items() if not durable.url)
    if memory_only and checked:
        text = f"none for {', '.join(f'job {job}' for job in memory_only)}: lost with this node's memory"
        found.append(check_warning("durable tier", text, "set durable.url"))
    return _AgentReport(found, tiers, checked, usable)


def _about_agent_store(agent: NodeAgentClient, job: str, durable: DurableSettings, paths: AgentPaths) -> CheckResult:
    """Return whether the agent, which has the credentials it was started with, can upload."""
    try:
        agent.check_durable(job)
    except (TieredCheckpointError, PeerStoreError) as error:
        hint = (
            "the agent uses the environment it was started with: correct the store's permissions, or run `tieredckpt "
            f"agent restart --dir {shlex.quote(str(paths.directory))}` in an environment with the right credentials"
        )
        return check_failed(_AGENT_STORE, str(error), hint)
    return check_passed(_AGENT_STORE, f"{durable.url}: the agent writes, reads and deletes")


def _only_this_shell(finding: CheckResult) -> CheckResult:
    """Return a failure of the store as a warning: the agent can use the store, and this shell cannot."""
    if finding.status is not CheckStatus.FAILED or finding.subject not in ("durable tier", "credentials"):
        return finding
    text = f"{finding.message}. The agent, which uploads, has access"
    return check_warning(finding.subject, text, "commands in this shell that read the durable tier will fail")


def _about_newest_manifest(agent: NodeAgentClient, job: str) -> list[CheckResult]:
    """Return a finding if this release cannot read the job's newest durable step."""
    durable = [view.version_id for view in agent.list_steps(job).views if view.durable]
    try:
        if durable:
            agent.steps.describe(job, max(durable))
    except FormatVersionError as error:
        return [check_failed("metadata format", str(error), "install a newer release")]
    except (TieredCheckpointError, PeerStoreError):
        pass  # other findings and `tieredckpt verify` report these
    return []


def _status_at(http: str) -> str:
    path = http.removeprefix(UNIX)
    return f"http://{http}/status" if path == http else f"curl --unix-socket {path} http://localhost/status"


def _about_durable(durable: DurableSettings, probe_bytes: int) -> list[CheckResult]:
    if not durable.url:
        return [
            check_warning(
                "durable tier", "none: what this node's memory holds is lost with the node", "set durable.url"
            )
        ]
    settings = replace(durable, retry_s=_TIMEOUT_S, timeout_s=min(durable.timeout_s, _TIMEOUT_S), bandwidth="")
    found = _about_credentials(settings) if urlsplit(settings.url).scheme == "s3" else []
    if any(one.status is CheckStatus.FAILED for one in found):
        return found
    try:
        with contextlib.closing(open_store(settings.url, settings)) as store:
            found += _about_store(store, settings)
            if probe_bytes:
                found.append(_about_bandwidth(store, probe_bytes))
    except TieredCheckpointError as error:
        found.append(_about_failure(settings, error))
    return found


def _about_failure(settings: DurableSettings, error: TieredCheckpointError) -> CheckResult:
    if isinstance(error, DurableRefusedError):
        advice = "the store must allow listing, reading, writing and deleting below this URL"
    elif isinstance(error, TierUnavailableError):
        advice = "check the URL, the endpoint (durable.options.endpoint, AWS_ENDPOINT_URL) and the network"
    else:
        advice = "correct durable.url or durable.options"
    return check_failed("durable tier", f"{settings.url}: {error}", advice)


def _about_credentials(settings: DurableSettings) -> list[CheckResult]:
    import botocore.exceptions

    from tieredckpt.durable.s3 import aws_session

    try:
        session = aws_session(settings.options.get("profile", ""))
        credentials = session.get_credentials()
        if credentials is None:
            advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or give the node or pod a role"
            return [check_failed("credentials", f"{settings.url}: the AWS SDK finds no credentials", advice)]
        frozen = credentials.get_frozen_credentials()
        region = settings.options.get("region") or session.get_config_variable("region") or "none set"
    except botocore.exceptions.BotoCoreError as error:
        return [check_failed("credentials", f"{settings.url}: {error}", "correct the AWS configuration")]
    key = f"{frozen.access_key[:4]}...{frozen.access_key[-2:]}"
    return [check_passed("credentials", f"{key} from {credentials.method}, region {region}")]


def _about_store(store: ObjectStore, settings: DurableSettings) -> list[CheckResult]:
    name = f".doctor-{secrets.token_hex(8)}"
    data = secrets.token_bytes(4096)
    began = time.monotonic()
    store.put(name, data)
    try:
        back = store.get(name)
        conditional = store.capabilities().conditional_put
        took = time.monotonic() - began
        moved = next((info.modified_s for info in store.list(name)), None)
    finally:
        store.delete([name])
    if back != data:
        return [
            check_failed(
                "durable tier", f"{store.url} gave back other bytes than were written", "do not use this store"
            )
        ]
    found = [check_passed("durable tier", f"{store.url}: writes, reads, lists and deletes ({took * 1e3:.0f} ms)")]
    if conditional:
        found.append(check_passed("conditional put", "honored: of two writers of one manifest one wins"))
    else:
        found.append(
            check_warning(
                "conditional put", "ignored by this store, which is safe: two writers of one manifest write one step"
            )
        )
    if urlsplit(settings.url).scheme == "s3":
        found += _about_s3(settings)
    elif moved is not None:
        found.append(check_clock_skew(time.time() - moved, signed=False))
    return found


def _about_s3(settings: DurableSettings) -> Iterator[CheckResult]:
    """Check whether S3 verifies checksums of uploads, and the clock skew."""
    from botocore.exceptions import BotoCoreError, ClientError

    from tieredckpt.durable.s3 import S3Account, S3Options
    from tieredckpt.durable.s3_upload import base64_checksum

    parts = urlsplit(settings.url)
    root = parts.path.strip("/")
    options = S3Options.parse(settings.options)
    account = S3Account(parts.netloc, root, options, timeout_s=settings.timeout_s)
    key = f"{root}/.doctor-{secrets.token_hex(8)}".lstrip("/")
    target = {"Bucket": parts.netloc, "Key": key}
    with contextlib.closing(account):
        client = account.connection().client
        kind = options.checksum if options.checksum != "none" else "crc32"
        wrong = {"crc32": "ChecksumCRC32", "md5": "ContentMD5"}[kind]
        try:
            client.put_object(
                **target, **options.encryption(), Body=b"probe", **{wrong: base64_checksum(b"other", kind)}
            )
            yield check_warning(
                "checksums", "not checked by this store on arrival; restores compare every chunk in any case"
            )
        except ClientError:
            yield check_passed("checksums", f"checked by the store on arrival ({kind})")
        except BotoCoreError as error:
            yield check_warning("checksums", f"not known: {error}")
        with contextlib.suppress(ClientError, BotoCoreError):
            answer = client.delete_object(**target)
            server_time = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            yield check_clock_skew((datetime.now(timezone.utc) - server_time).total_seconds(), signed=True)


class _NoJournal:
    """Upload journal that stores nothing: an interrupted probe is not resumed."""

    def get(self, name: str) -> bytes | None:
        del name
        return None

    def put(self, name: str, data: bytes) -> None:
        pass

    def remove(self, name: str) -> None:
        pass


def _about_bandwidth(store: ObjectStore, size_bytes: int) -> CheckResult:
    name = f".doctor-{secrets.token_hex(8)}"
    with tempfile.NamedTemporaryFile(prefix="tieredckpt-doctor-") as file:
        block = secrets.token_bytes(1 << 20)
        for start in range(0, size_bytes, len(block)):
            file.write(block[: size_bytes - start])
        file.flush()
        seconds = _timed(lambda: store.upload(name, Path(file.name), size_bytes, journal=_NoJournal()))
    store.delete([name])
    text = f"{show_size(size_bytes)} in {show_seconds(seconds)}, {show_size(size_bytes / max(seconds, 1e-6))}/s up"
    return check_passed("bandwidth", text)


def _timed(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
