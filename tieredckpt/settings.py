"""Settings from defaults, the platform's plug-in, a YAML file and the environment.

Unknown keys, invalid values and contradictions between values are errors. One exception reports all of them by name.

A plug-in is an entry point of the group ``tieredckpt.platforms``. It is a function that receives the text after
``NAME:`` and returns settings in the form of a configuration file.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml

from peerstore.errors import RequestError
from peerstore.settings import MAX_PARITY_GROUP, AgentPaths, StoreSettings, parse_budget
from peerstore.sizes_and_durations import parse_size
from tieredckpt.bounded_yaml import load_yaml
from tieredckpt.errors import PluginError, SettingsError
from tieredckpt.event_log.log_writer import EVENT_LOG_ENV, STDOUT_EVENTS_ENV
from tieredckpt.memory_service_options import MemoryServiceOptions

log = logging.getLogger(__name__)
_CLOSE = 0.8
"""Similarity (:func:`difflib.get_close_matches`) from which a name counts as misspelled."""
OnBusy = Literal["wait", "skip"]
OnUnreachable = Literal["raise", "continue"]
TCP, NIXL = TRANSPORTS = ("tcp", "nixl")
"""Transports between nodes, for :attr:`AgentSettings.transport`."""
CONFIG_ENV = "TIEREDCKPT_CONFIG"
"""YAML file with settings."""
CLUSTER_CONFIG_ENV = "TIEREDCKPT_CLUSTER"
"""Source of the platform's settings, ``PLATFORM:/path``.

The settings file and the other variables override them.
"""


@dataclass(frozen=True)
class AgentSettings:
    """The node agent of this machine."""

    directory: str = ""
    """Directory of the agent's arena, socket and log, on tmpfs. Empty: ``/dev/shm/tieredckpt-UID``."""
    embedded: bool = True
    """Whether a trainer starts an agent if none answers."""
    budget: str = "50%"
    """Size of the arena, as bytes (``64GiB``) or as a share of this machine's memory (``30%``)."""
    slots_per_rank: int = 2
    """Slots of each rank: one with its newest complete step, and at least one to write the next step."""
    burst_slots: int = 1
    """Extra slots that a rank may use while an upload or a reader holds its older steps."""
    job_ttl_s: float = 86400.0
    """Seconds from the end of a job's last process until the agent deletes its checkpoints from memory.

    If another job needs the memory, the agent deletes them after one hour. A later restore reports the deletion.
    """
    linger_s: float = 60.0
    """Seconds that an embedded agent without connections or shards runs before it exits."""
    http: str = "socket"
    """Address of ``/metrics`` and ``/status``: ``socket``, ``HOST:PORT`` or ``off``.

    ``socket`` is the Unix socket ``http.sock`` in the agent's directory. With port 0 the agent picks a port, which
    ``tieredckpt doctor`` shows.
    """
    node: str = ""
    """Name of this node among the nodes of a job. Empty: the host's name."""
    peers: str = ":0"
    """Address at which other nodes' agents reach this agent: ``HOST:PORT``, or ``off``.

    The agent listens only while a job has several nodes. Without a host it uses the node's outside address. With port 0
    it picks a port.
    """
    interface: str = ""
    """Network interface, or its address, for traffic between nodes. Empty: the routing table decides."""
    tls: str = ""
    """Directory with ``tls.crt``, ``tls.key`` and ``ca.crt``, for mutual TLS between nodes.

    Empty: the job's secret authenticates the connections, and they are not encrypted.
    """
    labels: str = ""
    """Failure domains of this node: ``rack=r1,zone=a``, or ``file:/path`` of its Kubernetes labels.

    The file is the output of ``kubectl get node NAME -o json`` or a file of a downward API volume.
    """
    transport: str = "tcp"
    """Transport between nodes: ``tcp``, ``nixl`` (InfiniBand, by UCX) or ``nixl:LIBFABRIC`` (EFA).

    NIXL needs ``tieredckpt[nixl]``. All nodes of a job need the same value.
    """
    memory_service: str = "off"
    """Address at which the agent serves the memory service over HTTP: ``HOST:PORT``, or ``off``."""
    memory_service_auth: Literal["token", "off", "open"] = "token"
    """Authentication of the memory service's clients: ``token``, ``off`` or ``open``.

    ``token``: clients must send the token. ``off``: no authentication, on loopback addresses only. ``open``: no
    authentication, on any address.
    """
    memory_service_token: str = ""
    """``file:/path`` of the token. Empty: the agent generates a token in its directory."""
    memory_service_tls: str = ""
    """Directory with ``tls.crt`` and ``tls.key``, to serve HTTPS.

    If it also has ``ca.crt``, clients must send certificates.
    """
    memory_service_nodes: str = ""
    """Nodes that replicate the memory service's shards to each other. Empty: only this node.

    The form is that of ``peer.discovery``, without ``world``.
    """
    memory_service_secret: str = ""
    """``file:/path`` of the secret that these nodes share."""
    memory_service_copies: int = 2
    """Copies of every shard in memory, the first node's included."""

    @property
    def memory_service_options(self) -> MemoryServiceOptions:
        return MemoryServiceOptions(
            self.memory_service,
            self.memory_service_auth,
            self.memory_service_token,
            self.memory_service_tls,
            self.memory_service_nodes,
            self.memory_service_secret,
            self.memory_service_copies,
        )


@dataclass(frozen=True)
class PeerSettings:
    """The peer tier: copies in the memory of the job's other nodes."""

    copies: int = 2
    """Copies of every shard in memory, this node's included.

    A job with fewer nodes has one copy on each node.
    """
    mode: Literal["mirror", "parity"] = "mirror"
    """Redundancy of shards in memory: ``mirror`` or ``parity``.

    ``mirror``: other nodes hold copies of a shard. ``parity``: groups of nodes hold XOR parities of each other's shards
    instead. Parities need less memory, and a group survives the loss of any one node.
    """
    parity_group_size: int = 4
    """Nodes whose shards one parity protects. A group has one node more."""
    discovery: str = "world"
    """Source of the job's list of nodes.

    ``world``: ranks on several nodes exchange the list through torch.distributed.
    ``static:n1=10.0.0.1:7070/rack=r1,...``, ``file:/path.json`` and ``dns:name:port`` name the nodes themselves.
    ``off``: no peers. Installed packages can add sources.
    """
    secret: str = ""
    """Secret with which the job's agents authenticate each other, or ``file:/path`` of it.

    Empty: with ``world``, rank 0 generates a secret and shares it through torch.distributed. That exchange is not
    authenticated, so rank 0 logs a warning.
    """
    levels: str = "zone,rack"
    """Node labels that name failure domains, the outermost first."""
    streams: int = 2
    """Connections for sending one copy, and for reading from one source."""
    require: Literal["sealed", "copied"] = "sealed"
    """State that a ``Checkpointer`` save must reach before the next save begins.

    ``copied``: all its copies exist. A save that would wait longer than ``memory.wait_s`` for the copies is skipped.
    """
    bandwidth: str = ""
    """Limit for the copies that a node sends, such as ``2GiB``. Empty: no limit."""
    unreachable_timeout_s: float = 30.0
    """Seconds that a restore waits for unreachable nodes that may have newer steps.

    After that, it restores an older step that this node has.
    """


@dataclass(frozen=True)
class MemorySettings:
    """The memory tier, as the trainer uses it."""

    every: int = 1
    """Interval of ``Checkpointer`` saves: they save the steps divisible by this number."""
    on_busy: OnBusy = "skip"
    """Behavior of a ``Checkpointer`` save if no slot is free: ``skip`` the step, or ``wait`` for a slot."""
    wait_s: float = 60.0
    """Seconds that a save may wait for a slot or for copies.

    A save waits for a slot with ``on_busy: wait`` and in plain ``dcp.save``, and for copies with ``peer.require``.
    """
    staging: Literal["overlapped", "blocking"] = "overlapped"
    """Staging of a ``Checkpointer`` save: ``overlapped`` or ``blocking``.

    ``overlapped``: the save copies parameters and moments during the next forward and backward pass. The next optimizer
    step waits for the copies. ``blocking``: the save returns after all copies.
    """
    avoid_after_crashed_loads: int = 5
    """Crashed loads of a step on one node after which its ranks prefer an older step. 0: no limit.

    A load counts as crashed if its process dies before the next step. A node remembers crashed loads for an hour.
    """
    live: bool = True
    """Whether the recovery loop (``elastic.run``) records every step boundary.

    After a fault, surviving replicas then continue from the last boundary, even without a save of that step.
    """
    trust_objects: bool = False
    """Whether a load unpickles objects that are more than data.

    If true, any writer to the durable tier can run code on the nodes that restore. If false, the load fails with an
    error that names the object.
    """
    proof: bool = True
    """Whether a restore reads the live state again and compares it with the loaded bytes.

    A difference raises :class:`~tieredckpt.errors.RestoreProofError`, which names the entries.
    """
    nonfinite: Literal["refuse", "save"] = "refuse"
    """Behavior of a ``Checkpointer`` save if the state has NaN or new infinities.

    Infinities that this process's first save had are not new. ``refuse``: the save fails, and the last finite step
    stays the newest. ``save``: the state is saved. The check reads the staged bytes once, in the background. For plain
    ``dcp.save``, use ``TieredWriter(finite=True)``.
    """
    copy_threads: int = 0
    """Threads that copy bytes in a trainer. 0: this rank's share of the node's cores, from 1 to 8."""


@dataclass(frozen=True)
class DurableSettings:
    """The durable tier: an object store or a directory."""

    url: str = ""
    """URL of the object store or directory. Empty: no durable tier.

    Schemes: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path`` or another fsspec scheme.
    """
    every: int = 1
    """Interval of uploads: steps divisible by this number are uploaded.

    It must be a multiple of ``memory.every``.
    """
    on_busy: OnBusy = "skip"
    """Behavior of a save while an earlier upload runs: ``skip`` or ``wait``.

    ``skip``: the save does not wait, and a newer step replaces a step that waits for its upload. ``wait``: the save
    waits for the upload, at most ``retry_s``.
    """
    keep_last: int = 0
    """Number of complete steps to keep. 0: keep all steps.

    The agent deletes older steps, but never the newest complete one. Plain checkpoints, which a disabled package
    writes, are neither counted nor deleted: ``tieredckpt rm`` deletes them.
    """
    keep_every: int = 0
    """Of the older steps, keep those divisible by this number. 0: keep none of them. Needs ``keep_last``."""
    part_size: str = "32MiB"
    """Size of one part of a multipart upload, and of one request of a download."""
    concurrency: int = 4
    """Parts of an upload that are sent at the same time."""
    bandwidth: str = ""
    """Upload limit of each node, such as ``500MiB``. Empty: no limit."""
    on_unreachable: OnUnreachable = "raise"
    """Behavior of the first save if the store does not answer.

    ``raise``: the save fails, unless the run restored a step. ``continue``: the step is saved in memory and uploaded
    when the store answers.
    """
    retry_s: float = 300.0
    """Seconds for which an operation is retried while the store is slow, throttles or does not answer."""
    timeout_s: float = 60.0
    """Seconds that one request waits for an answer."""
    compress: Literal["none", "zstd"] = "none"
    """Compression of uploaded shards. A shard that would not shrink is uploaded uncompressed."""
    hashed_keys: bool = False
    """Whether object names begin with a hash, for stores that partition their load by prefix."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the store's client: ``endpoint``, ``region``, ``profile`` and options of its library.

    The library is obstore or the fsspec file system. In the variable: ``key=value,key=value``.
    """


@dataclass(frozen=True)
class Settings:
    """All settings of a process."""

    enabled: bool = True
    """Whether the agent and the memory tier are used.

    If not, the same scripts write plain DCP checkpoints to ``durable.url``.
    """
    agent: AgentSettings = AgentSettings()
    memory: MemorySettings = MemorySettings()
    peer: PeerSettings = PeerSettings()
    durable: DurableSettings = field(default_factory=DurableSettings)

    @property
    def store(self) -> StoreSettings:
        return StoreSettings(
            budget=self.agent.budget,
            slots_per_part=self.agent.slots_per_rank,
            burst_slots=self.agent.burst_slots,
            job_ttl_s=self.agent.job_ttl_s,
        )

    @property
    def agent_place(self) -> AgentPaths:
        return AgentPaths(self.agent_directory, explicit=bool(self.agent.directory))

    @property
    def agent_directory(self) -> Path:
        named = self.agent.directory
        return Path(named) if named else Path("/dev/shm") / f"tieredckpt-{os.getuid()}"  # noqa: S108


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings, or raise :class:`SettingsError` with all problems.

    Later sources override earlier ones: defaults, the platform of ``$TIEREDCKPT_CLUSTER``, the YAML file of
    ``$TIEREDCKPT_CONFIG``, ``$TIEREDCKPT_ENABLED`` and ``$TIEREDCKPT_<SECTION>_<KEY>``.
    """
    tree: dict[str, Any] = {}
    problems: list[str] = []
    path = environ.get(CONFIG_ENV)
    if path:
        tree, problems = _read_file(Path(path))
    for name, value in sorted(environ.items()):
        if name.startswith("TIEREDCKPT_") and name not in (
            CLUSTER_CONFIG_ENV,
            CONFIG_ENV,
            EVENT_LOG_ENV,
            STDOUT_EVENTS_ENV,
        ):
            _set_from_environment(tree, name, value, problems)
        elif name.startswith("T") and not name.startswith("TIEREDCKPT_"):
            _warn_of_misspelled_prefix(name)
    source = cluster_config_source(environ)
    if not source:
        return _build(tree, problems)
    try:
        return _build(_with_platform_defaults(tree, platform_settings(source)), problems)
    except SettingsError as error:
        raise SettingsError(f"{error} {_beneath(source)}") from error


def _beneath(source: str) -> str:
    return f"(beneath the other settings: ${CLUSTER_CONFIG_ENV}={source})"


RUN_DIRECTORY_VARIABLE = "ELASTIC_RUN_DIRECTORY"
"""Directory for sockets and files of runs, and for agents of simulated nodes.

Default: ``/dev/shm/elastic-UID``.
"""


def run_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory with the files of runs and the agents of simulated nodes.

    A simulated node's agent is at ``JOB/NODE/agent``.
    """
    named = environ.get(RUN_DIRECTORY_VARIABLE)
    return Path(named) if named else Path("/dev/shm") / f"elastic-{os.getuid()}"  # noqa: S108


def cluster_config_source(environ: Mapping[str, str] = os.environ) -> str:
    """Return the source of the platform's settings. Empty: none."""
    return environ.get(CLUSTER_CONFIG_ENV, "")


def _with_platform_defaults(tree: dict[str, Any], platform: dict[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with the keys of ``platform`` as defaults."""
    merged = {**platform, **{name: value for name, value in tree.items() if value is not None}}
    for name, keys in platform.items():
        if isinstance(keys, dict) and isinstance(merged[name], dict):
            merged[name] = {**keys, **merged[name]}
    return merged


def copy_thread_count(settings: Settings, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of copy threads of this process. The ranks of a node share its cores."""
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // (int(ranks) if ranks.isdigit() and int(ranks) else 1)
    return settings.memory.copy_threads or max(1, min(8, share))


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Return ``$LOCAL_WORLD_SIZE``, the number of ranks on this node. 0: no launcher has set it."""
    return int((os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "0"))


def is_local_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process has local rank 0, or no launcher has set ``$LOCAL_RANK``."""
    return environ.get("LOCAL_RANK", "0") == "0"


def settings_from_mapping(tree: Mapping[str, Any]) -> Settings:
    """Return the settings of a nested mapping, validated as in :func:`load_settings`."""
    return _build(dict(tree), [])


def override_settings(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """Return ``settings`` with some keys changed, validated as in :func:`load_settings`.

    Example: ``override_settings(s, durable={"url": "s3://b"})``.
    """
    tree = dataclasses.asdict(settings)
    for section, changes in sections.items():
        tree[section] = {**tree.get(section, {}), **changes}
    return _build(tree, [])


def require_plain_url(settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`SettingsError` if the package is disabled and plain checkpoints have no place.

    Scripts may name the place in an argument, so :func:`load_settings` does not know it.
    """
    if settings.enabled or settings.durable.url:
        return
    problem = "enabled: false needs durable.url, the place plain checkpoints are written to"
    source = cluster_config_source(environ)
    raise SettingsError(f"{problem} {_beneath(source)}" if source else problem)


def load_complete_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings for code that has no arguments to complete them."""
    settings = load_settings(environ)
    require_plain_url(settings, environ)
    return settings


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{CONFIG_ENV}={path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{CONFIG_ENV}={path} is not YAML: {error}") from error
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        return {}, [f"{path}: expected sections ({', '.join(_SECTIONS)}), found {type(tree).__name__}"]
    return tree, []


def _set_from_environment(tree: dict[str, Any], name: str, value: str, problems: list[str]) -> None:
    key = name.removeprefix("TIEREDCKPT_").lower()
    if key == "enabled":
        tree["enabled"] = value
        return
    section, _, rest = key.partition("_")
    if section not in _SECTIONS or rest not in _SECTIONS[section]:
        known = {f"{section}_{key}": f"TIEREDCKPT_{section}_{key}".upper() for section, key in _KEYS}
        known |= {"enabled": "TIEREDCKPT_ENABLED", "config": CONFIG_ENV, "cluster": CLUSTER_CONFIG_ENV}
        near = [known[one] for one in known if one.startswith(f"{section}_")]
        near = near or [f"TIEREDCKPT_{one.upper()}_..." for one in _SECTIONS]
        problems.append(f"{name}: no such setting; {_suggestion(key, known, near)}")
        return
    if tree.get(section) is None:  # the file has the section without keys
        tree[section] = {}
    part = tree[section]
    if isinstance(part, dict):
        part[rest] = _pairs(name, value, problems) if rest == "options" else value


def _suggestion(wrong: str, known: Mapping[str, str], listed: Iterable[str]) -> str:
    """Return the name that was meant, or ``listed`` if no key of ``known`` is close."""
    close = difflib.get_close_matches(wrong, known, 1, _CLOSE)
    return f"did you mean {known[close[0]]}?" if close else f"known are {', '.join(listed)}"


@functools.cache
def _warn_of_misspelled_prefix(name: str) -> None:
    """Log a warning, once per process and variable, if the prefix of ``name`` resembles ``TIEREDCKPT``."""
    prefix, _, rest = name.partition("_")
    if difflib.get_close_matches(prefix, ["TIEREDCKPT"], 1, _CLOSE) and is_local_rank_zero():
        log.warning("$%s is ignored: did you mean $TIEREDCKPT_%s?", name, rest)


def _pairs(name: str, text: str, problems: list[str]) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    problems += [f"{name}: {key!r} has no value; write key=value,key=value" for key, found, _ in pairs if not found]
    return {key: value for key, _, value in pairs}


def _build(tree: dict[str, Any], problems: list[str]) -> Settings:
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name == "enabled":
            _convert(name, value, bool, values, problems)
        elif name in _SECTIONS:
            values[name] = _section(name, value, problems)
        else:
            known = {one: one for one in ("enabled", *_SECTIONS)}
            problems.append(f"{name}: no such key; {_suggestion(str(name), known, known)}")
    settings = Settings(**values)
    wrong = {problem.partition(":")[0] for problem in problems}
    problems += [f"{keys[0]}: {text}" for keys, text in _contradictions(settings) if not wrong.intersection(keys)]
    if problems:
        raise SettingsError("; ".join(problems))
    return settings


def _section(name: str, tree: Any, problems: list[str]) -> Any:
    kind = _SECTION_TYPES[name]
    if tree is None:
        return kind()
    if not isinstance(tree, Mapping):
        problems.append(f"{name}: expected keys and values, found {type(tree).__name__}")
        return kind()
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in _SECTIONS[name]:
            known = {f"{section}.{one}": f"{section}.{one}" for section, one in _KEYS}
            hint = _suggestion(f"{name}.{key}", known, _SECTIONS[name])
            problems.append(f"{name}.{key}: no such key; {hint}")
        else:
            _convert(f"{name}.{key}", value, _SECTIONS[name][key], values, problems)
    return kind(**values)


def _convert(key: str, value: Any, kind: Any, into: dict[str, Any], problems: list[str]) -> None:
    """Store ``value`` in ``into`` under the last part of ``key``, or add to ``problems``."""
    name = key.rpartition(".")[2]
    if isinstance(value, int) and value.bit_length() > 64:
        problems.append(f"{key}: the number has {value.bit_length()} bits, at most 64 make sense")
        return
    try:
        if kind is bool and isinstance(value, str):
            into[name] = _TRUTHS[value.strip().lower()]
        elif kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            into[name] = str(value)
        else:
            into[name] = msgspec.convert(value, kind, strict=False)
    except KeyError:
        problems.append(f"{key}: {_shown(value)} is neither true nor false (1, 0)")
    except msgspec.ValidationError as error:
        problems.append(f"{key}: {error} (found {_shown(value)})")


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except (ValueError, RecursionError):  # thousands of digits or nested brackets
        return f"a {type(value).__name__} too large to show"


_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LONGEST_S = 10**6
"""Longest wait, 12 days: sockets and locks cannot represent much longer ones."""
UNLIMITED = 10**9
"""Maximum of numbers that need no limit."""
_SOCKET_PATH_BYTES = 107
_Problem = tuple[tuple[str, ...], str]
"""The affected keys, and the problem."""


def _contradictions(settings: Settings) -> list[_Problem]:
    """Return the problems of values that have the right type."""
    memory, durable = settings.memory, settings.durable
    problems = [
        *_bad_agent(settings.agent),
        *_bad_transport(settings.agent),
        *_bad_sizes(settings),
        *_out_of_range(settings),
    ]
    if durable.url and not _is_url(durable.url):
        text = f"{durable.url!r} is neither a URL (s3://bucket/prefix) nor an absolute path"
        problems.append((("durable.url",), text))
    if memory.every > 0 and durable.every % memory.every:
        text = (
            f"{durable.every} is not a multiple of memory.every ({memory.every}), so those steps are never in memory "
            "to be drained"
        )
        problems.append((("durable.every", "memory.every"), text))
    if durable.keep_every and not durable.keep_last:
        problems.append((("durable.keep_every", "durable.keep_last"), "has no effect without durable.keep_last"))
    if settings.peer.mode == "parity" and settings.peer.copies != PeerSettings.copies:
        text = (
            f"{settings.peer.copies} copies and parity exclude each other: leave peer.copies out, or set peer.mode to "
            "mirror"
        )
        problems.append((("peer.copies", "peer.mode"), text))
    return problems


def _bad_agent(agent: AgentSettings) -> list[_Problem]:
    problems: list[_Problem] = []
    host, _, port = agent.http.rpartition(":")
    if agent.http not in ("socket", "off") and not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        problems.append((("agent.http",), f"{agent.http!r} is neither socket, HOST:PORT nor off"))
    problems += [((f"agent.{key}",), text) for key, text in agent.memory_service_options.problems()]
    if agent.directory and (not agent.directory.startswith("/") or "\0" in agent.directory):
        # The agent may run in another working directory than the trainer.
        problems.append((("agent.directory",), f"{agent.directory!r} is not an absolute path"))
    elif len(os.fsencode(agent.directory)) + len("/agent.sock") > _SOCKET_PATH_BYTES:
        most = _SOCKET_PATH_BYTES - len("/agent.sock")
        problems.append((("agent.directory",), f"{agent.directory!r} is too long for a socket in it: {most} bytes"))
    return problems


def _bad_transport(agent: AgentSettings) -> list[_Problem]:
    kind, colon, backend = agent.transport.partition(":")
    if kind not in TRANSPORTS or (colon and (kind != NIXL or not backend.isidentifier())):
        return [(("agent.transport",), f"{agent.transport!r} is neither tcp, nixl nor nixl:BACKEND")]
    if kind == NIXL and agent.tls:
        text = "NIXL does not encrypt what it moves: leave agent.tls out, or use tcp"
        return [(("agent.transport", "agent.tls"), text)]
    return []


def _bad_sizes(settings: Settings) -> list[_Problem]:
    durable = settings.durable
    problems: list[_Problem] = []
    for key, text, parse in (
        ("agent.budget", settings.agent.budget, parse_budget),
        ("durable.part_size", durable.part_size, parse_size),
        ("durable.bandwidth", durable.bandwidth or "1", parse_size),
        ("peer.bandwidth", settings.peer.bandwidth or "1", parse_size),
    ):
        try:
            if parse(text) <= 0:
                problems.append(((key,), "must be above 0"))
        except (ValueError, RequestError) as error:
            problems.append(((key,), str(error)))
    return problems


RANGES: dict[str, tuple[float, float]] = {
    "agent.slots_per_rank": (2, UNLIMITED),
    "agent.burst_slots": (0, UNLIMITED),
    "agent.job_ttl_s": (1, UNLIMITED),
    "agent.linger_s": (0, UNLIMITED),
    "agent.memory_service_copies": (1, 3),
    "memory.every": (1, UNLIMITED),
    "memory.wait_s": (0, _LONGEST_S),
    "memory.avoid_after_crashed_loads": (0, UNLIMITED),
    "memory.copy_threads": (0, UNLIMITED),
    "peer.copies": (1, 3),
    "peer.parity_group_size": (1, MAX_PARITY_GROUP),
    "peer.streams": (1, 64),
    "peer.unreachable_timeout_s": (0, _LONGEST_S),
    "durable.every": (1, UNLIMITED),
    "durable.keep_last": (0, UNLIMITED),
    "durable.keep_every": (0, UNLIMITED),
    "durable.concurrency": (1, UNLIMITED),
    "durable.retry_s": (0, _LONGEST_S),
    "durable.timeout_s": (1, _LONGEST_S),
}
"""Minimum and maximum of each number."""


def _out_of_range(settings: Settings) -> list[_Problem]:
    problems: list[_Problem] = []
    for key, (least, most) in RANGES.items():
        section, _, name = key.partition(".")
        number = getattr(getattr(settings, section), name)
        if not number >= least:  # true for NaN as well
            problems.append(((key,), f"{number} is below {least}"))
        elif number > most:
            problems.append(((key,), f"{number} is above {most:.0f}"))
    return problems


def _is_url(text: str) -> bool:
    try:
        return text.startswith("/") or bool(urlsplit(text).scheme)
    except ValueError:
        return False


_SECTION_TYPES: dict[str, Any] = {
    "agent": AgentSettings,
    "memory": MemorySettings,
    "peer": PeerSettings,
    "durable": DurableSettings,
}
_SECTIONS: dict[str, dict[str, Any]] = {name: get_type_hints(kind) for name, kind in _SECTION_TYPES.items()}
_KEYS = [(section, key) for section, keys in _SECTIONS.items() for key in keys]


PLATFORM_ENTRY_POINTS = "tieredckpt.platforms"
PlatformPlugin = Callable[[str], Mapping[str, Any]]


def platform_settings(source: str) -> dict[str, Any]:
    """Return the settings of the platform ``NAME:WHERE``, by section. All other sources override them."""
    name, colon, where = source.partition(":")
    points = list(metadata.entry_points(group=PLATFORM_ENTRY_POINTS, name=name)) if colon and where else []
    if not points:
        known = (
            ", ".join(f"{known}:..." for known in sorted(metadata.entry_points(group=PLATFORM_ENTRY_POINTS).names))
            or "none"
        )
        raise SettingsError(f"cluster configuration {source!r}: there is no such platform; known are: {known}")
    try:
        answer: PlatformPlugin = points[0].load()
    except Exception as error:
        raise PluginError(f"platform {name!r} ({points[0].value}) cannot be loaded: {error!r}") from error
    return {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in answer(where).items()}
