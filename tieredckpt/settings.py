"""Settings from defaults, the platform's plug-in, a YAML file and the environment, validated as a whole.

A key that is not known, a value that is not valid and values that contradict each other are errors; all of them
are reported at once, by name.

A plug-in is an entry point of the group ``tieredckpt.platforms``: a function that is given what stands behind
``NAME:`` and returns settings, as a configuration file would have them.
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
from tieredckpt.errors import PluginError, SettingsError
from tieredckpt.event_log.log_writer import EVENT_LOG_ENV, STDOUT_EVENTS_ENV
from tieredckpt.memory_service_options import MemoryServiceOptions

log = logging.getLogger(__name__)
_CLOSE = 0.8
"""Similarity (:func:`difflib.get_close_matches`) from which a name is taken for a misspelled one."""
OnBusy = Literal["wait", "skip"]
OnUnreachable = Literal["raise", "continue"]
TCP, NIXL = TRANSPORTS = ("tcp", "nixl")
"""How bytes go between nodes: :attr:`AgentSettings.transport`."""
CLUSTER_CONFIG_ENV = "TIEREDCKPT_CLUSTER"
"""Names the platform's own settings, ``PLATFORM:/path``: see :func:`tieredckpt.settings.platform_settings`."""


@dataclass(frozen=True)
class AgentSettings:
    """The node agent of this machine."""

    directory: str = ""
    """Arena, socket and log; on tmpfs. Default: /dev/shm/tieredckpt-UID."""
    embedded: bool = True
    """Start an agent when none answers."""
    budget: str = "50%"
    """Arena size, as bytes or as a share of this machine's memory."""
    slots_per_rank: int = 2
    burst_slots: int = 1
    job_ttl_s: float = 86400.0
    """A job's memory is given back this long after its last process went away; after an hour already where another job
    needs the room. A restore then says so."""
    linger_s: float = 60.0
    """An embedded agent leaves this long after the last job's memory was given back."""
    http: str = "socket"
    """Where /metrics and /status are served: on the Unix socket ``http.sock`` in the agent's directory, on HOST:PORT
    (for Prometheus; port 0 picks one, ``tieredckpt doctor`` shows it), "off": nowhere."""
    node: str = ""
    """What this node is called among the job's nodes. Default: the host's name."""
    peers: str = ":0"
    """HOST:PORT where agents of other nodes reach this one, opened when a job has several nodes; no host: the address
    other machines see, port 0 picks one, "off": never."""
    interface: str = ""
    """Network interface (or its address) for traffic between nodes; empty: where the routes lead."""
    tls: str = ""
    """A directory with ``tls.crt``, ``tls.key`` and ``ca.crt``: connections between nodes are encrypted, and both sides
    show certificates of that authority. Empty: not encrypted, but still authenticated by the job's secret."""
    labels: str = ""
    """What this node fails together with: ``rack=r1,zone=a``, or ``file:/path`` to the labels of its Kubernetes node
    (``kubectl get node NAME -o json``, or a downward API volume)."""
    transport: str = "tcp"
    """How bytes go between nodes: ``tcp``, or ``nixl`` for InfiniBand (by UCX) and ``nixl:LIBFABRIC`` for EFA, which
    need ``tieredckpt[nixl]``. The same on all nodes of a job."""
    memory_service: str = "off"
    """HOST:PORT where whole shards are served over HTTP to clients of ``/v1/cp``, or "off"."""
    memory_service_auth: Literal["token", "off", "open"] = "token"
    """``token``: clients show it. ``off``: nobody is asked, on a loopback address only. ``open``: nobody is asked."""
    memory_service_token: str = ""
    """``file:/path`` of the token. Empty: one is made and kept in the agent's directory."""
    memory_service_tls: str = ""
    """A directory with ``tls.crt`` and ``tls.key``: HTTPS; with ``ca.crt`` too, clients show certificates."""
    memory_service_nodes: str = ""
    """The nodes that keep copies for each other: as ``peer.discovery``, but not ``world``. Empty: this node alone."""
    memory_service_secret: str = ""
    """``file:/path`` of what those nodes prove to each other."""
    memory_service_copies: int = 2
    """Copies of every shard in memory in all, the first node's included (1 to 3)."""

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
    """Copies of every shard in memory in all, this node's own included (1 to 3), as far as the job has nodes."""
    mode: Literal["mirror", "parity"] = "mirror"
    """``parity``: groups of nodes keep parities of each other's shards instead of copies. That takes less memory, one
    ``group``-th of a shard more than the shard. Any one node of a group may be lost; what it had is rebuilt."""
    parity_group_size: int = 4
    """With parity: a group has one node more than this."""
    discovery: str = "world"
    """Where the job's nodes come from. ``world``: its ranks tell each other through torch.distributed when it has more
    than one node; else ``static:n1=10.0.0.1:7070/rack=r1,...``, ``file:/path.json``, ``dns:name:port``, a source that
    an installed package adds, or ``off``."""
    secret: str = ""
    """What the job's agents prove to each other: the secret, or ``file:/path``. Empty: the first rank makes one and
    shares it through torch.distributed (``world`` only), which asks nobody who he is: that is warned of."""
    levels: str = "zone,rack"
    """Node labels that say what fails together, the outermost first."""
    streams: int = 2
    """Connections one copy is sent over, and one source is read over."""
    require: Literal["sealed", "copied"] = "sealed"
    """Checkpointer: what a save must have reached before the next one begins. ``copied``: its copies; a save that
    would wait longer than ``memory.wait_s`` for that is skipped."""
    bandwidth: str = ""
    """Limit for the copies a node sends, per second ("2GiB"); empty: none."""
    unreachable_timeout_s: float = 30.0
    """Seconds a restore waits for unreachable nodes that continued the job without this node. After them it goes back
    to an older step that this node has."""


@dataclass(frozen=True)
class MemorySettings:
    """The memory tier, as the trainer uses it."""

    every: int = 1
    """Checkpointer: save steps divisible by this."""
    on_busy: OnBusy = "skip"
    """Checkpointer: when no slot can be given up, skip this save or wait for one."""
    wait_s: float = 60.0
    """How long "wait" (and a plain ``dcp.save``) waits."""
    staging: Literal["overlapped", "blocking"] = "overlapped"
    """Checkpointer: ``overlapped`` copies parameters and moments while the next gradients are computed, and the next
    optimizer's step waits for the copies. ``blocking``: a save returns when everything is copied."""
    avoid_after_crashed_loads: int = 5
    """When so many loads of a step have ended their process on a node (killed in the load, or before the next step),
    ranks there prefer an older step, for an hour and while there is one; 0: never."""
    live: bool = True
    """In a loop that goes on after faults (``elastic.run``): note every step boundary, so that replicas that survive a
    fault can go on from the last one, however seldom steps are saved."""
    trust_objects: bool = False
    """Unpickle entries that are more than data when a step is loaded, from any tier. Whoever can write to the durable
    tier then runs code on every node that restores. Off: such an entry is an error that names it."""
    proof: bool = True
    """After a restore read the live state once more and compare it with what the save recorded: what differs is a
    :class:`~tieredckpt.errors.RestoreProofError` that names the entries. Costs one read of the state."""
    nonfinite: Literal["refuse", "save"] = "refuse"
    """Checkpointer: what becomes of a state with NaN in it, or with infinities that were not there at this process's
    first save. ``refuse``: it is not saved, so the last finite step is kept. Costs one read of what was staged, in the
    background. Plain ``dcp.save`` saves what it is given; ``TieredWriter(finite=True)`` refuses there, too."""
    copy_threads: int = 0
    """Threads that move bytes in a trainer; 0: this process's share of the node's cores, between 1 and 8."""


@dataclass(frozen=True)
class DurableSettings:
    """The durable tier: an object store or a directory."""

    url: str = ""
    """``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path`` or any other fsspec scheme. Empty: none."""
    every: int = 1
    """Drain steps divisible by this."""
    on_busy: OnBusy = "skip"
    """When the last drain is still running: leave this step out of the durable tier, or make the save wait."""
    keep_last: int = 0
    """Delete whole steps older than the newest so many; 0 keeps all. The newest whole step is never deleted."""
    keep_every: int = 0
    """Of the older ones, keep steps divisible by this."""
    part_size: str = "32MiB"
    concurrency: int = 4
    """Parts in flight."""
    bandwidth: str = ""
    """Upload limit per node and second ("500MiB"); empty: none."""
    on_unreachable: OnUnreachable = "raise"
    """If the store does not answer at the first save of a run that restored no step: raise, or continue in memory."""
    retry_s: float = 300.0
    """How long one operation is retried while the store is slow, throttles or is away."""
    timeout_s: float = 60.0
    """How long one request may go without an answer."""
    compress: Literal["none", "zstd"] = "none"
    """Compress shards that gain from it on their way to the store."""
    hashed_keys: bool = False
    """Put a hash in front of object names, so that a store that splits its load by prefix can."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For the store's own client: endpoint, region, profile, and what obstore or the fsspec file system takes."""


@dataclass(frozen=True)
class Settings:
    enabled: bool = True
    """False: the same scripts write plain DCP checkpoints to the durable URL, without agent and memory tier."""
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
    """Defaults, then ``$TIEREDCKPT_CLUSTER`` (what the platform says), ``$TIEREDCKPT_CONFIG`` (YAML), and at last
    ``$TIEREDCKPT_ENABLED`` and ``$TIEREDCKPT_<SECTION>_<KEY>``.
    """
    tree: dict[str, Any] = {}
    problems: list[str] = []
    path = environ.get("TIEREDCKPT_CONFIG")
    if path:
        tree, problems = _read_file(Path(path))
    for name, value in sorted(environ.items()):
        if name.startswith("TIEREDCKPT_") and name not in (
            CLUSTER_CONFIG_ENV,
            "TIEREDCKPT_CONFIG",
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
        return _build(_beneath(tree, platform_settings(source)), problems)
    except SettingsError as error:
        raise SettingsError(f"{error} (beneath the other settings: ${CLUSTER_CONFIG_ENV}={source})") from error


RUN_DIRECTORY_VARIABLE = "ELASTIC_RUN_DIRECTORY"


def run_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory that holds the agents of simulated nodes, at ``JOB/NODE/agent``, and the files of runs."""
    named = environ.get(RUN_DIRECTORY_VARIABLE)
    return Path(named) if named else Path("/dev/shm") / f"elastic-{os.getuid()}"  # noqa: S108


def cluster_config_source(environ: Mapping[str, str] = os.environ) -> str:
    """Where the platform's settings are; "" when nobody says."""
    return environ.get(CLUSTER_CONFIG_ENV, "")


def _beneath(tree: dict[str, Any], platform: dict[str, Any]) -> dict[str, Any]:
    """``platform``'s keys where ``tree`` has none."""
    merged = {**platform, **{name: value for name, value in tree.items() if value is not None}}
    for name, keys in platform.items():
        if isinstance(keys, dict) and isinstance(merged[name], dict):
            merged[name] = {**keys, **merged[name]}
    return merged


def copy_thread_count(settings: Settings, environ: Mapping[str, str] = os.environ) -> int:
    """How many threads move bytes in this process; the other ranks of the node move theirs at the same time."""
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // (int(ranks) if ranks.isdigit() and int(ranks) else 1)
    return settings.memory.copy_threads or max(1, min(8, share))


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """How many ranks are on this node; 0 where no launcher that starts several nodes has said so."""
    return int((os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "0"))


def is_local_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process does what one rank of a node does for all of them."""
    return environ.get("LOCAL_RANK", "0") == "0"


def settings_from_mapping(tree: Mapping[str, Any]) -> Settings:
    """Settings from a nested mapping, checked the same way."""
    return _build(dict(tree), [])


def override_settings(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """``settings`` with some keys changed: ``override_settings(s, durable={"url": "s3://b"})``, checked the same
    way.
    """
    tree = dataclasses.asdict(settings)
    for section, changes in sections.items():
        tree[section] = {**tree.get(section, {}), **changes}
    return _build(tree, [])


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"TIEREDCKPT_CONFIG={path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"TIEREDCKPT_CONFIG={path} is not YAML: {error}") from error
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
        known |= {"enabled": "TIEREDCKPT_ENABLED", "config": "TIEREDCKPT_CONFIG", "cluster": CLUSTER_CONFIG_ENV}
        near = [known[one] for one in known if one.startswith(f"{section}_")]
        near = near or [f"TIEREDCKPT_{one.upper()}_..." for one in _SECTIONS]
        problems.append(f"{name}: no such setting; {_suggestion(key, known, near)}")
        return
    if tree.get(section) is None:  # a section that the file only names
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
    """Log a warning, once for each process and variable, if ``name`` is almost one of ours."""
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
    """Put ``value`` into ``into`` under the last part of ``key``; a bad one is told and leaves the default."""
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
    except (ValueError, RecursionError):  # thousands of digits, thousands of brackets
        return f"a {type(value).__name__} too large to show"


_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LONGEST_S = 1e6
"""A wait longer than this (12 days) is more than sockets and locks can count."""
_MOST = 10**9
_SOCKET_PATH_BYTES = 107
_Problem = tuple[tuple[str, ...], str]
"""The keys it concerns, and what is wrong."""


def _contradictions(settings: Settings) -> list[_Problem]:
    """What is wrong with values that are of the right type: the keys it concerns, and why."""
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
    if not settings.enabled and not durable.url:
        text = "false needs durable.url, the place plain checkpoints are written to"
        problems.append((("enabled", "durable.url"), text))
    return problems


def _bad_agent(agent: AgentSettings) -> list[_Problem]:
    problems: list[_Problem] = []
    host, _, port = agent.http.rpartition(":")
    if agent.http not in ("socket", "off") and not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        problems.append((("agent.http",), f"{agent.http!r} is neither socket, HOST:PORT nor off"))
    problems += [((f"agent.{key}",), text) for key, text in agent.memory_service_options.problems()]
    if agent.directory and (not agent.directory.startswith("/") or "\0" in agent.directory):
        # The agent does not run where the trainer does.
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


def _out_of_range(settings: Settings) -> list[_Problem]:
    agent, memory, peer, durable = settings.agent, settings.memory, settings.peer, settings.durable
    problems: list[_Problem] = []
    for key, number, least, most in (
        ("agent.slots_per_rank", agent.slots_per_rank, 2, _MOST),
        ("agent.burst_slots", agent.burst_slots, 0, _MOST),
        ("agent.job_ttl_s", agent.job_ttl_s, 1, _MOST),
        ("agent.linger_s", agent.linger_s, 0, _MOST),
        ("memory.every", memory.every, 1, _MOST),
        ("memory.wait_s", memory.wait_s, 0, _LONGEST_S),
        ("memory.avoid_after_crashed_loads", memory.avoid_after_crashed_loads, 0, _MOST),
        ("memory.copy_threads", memory.copy_threads, 0, _MOST),
        ("peer.copies", peer.copies, 1, 3),
        ("peer.parity_group_size", peer.parity_group_size, 1, MAX_PARITY_GROUP),
        ("peer.streams", peer.streams, 1, 64),
        ("peer.unreachable_timeout_s", peer.unreachable_timeout_s, 0, _LONGEST_S),
        ("durable.every", durable.every, 1, _MOST),
        ("durable.keep_last", durable.keep_last, 0, _MOST),
        ("durable.keep_every", durable.keep_every, 0, _MOST),
        ("durable.concurrency", durable.concurrency, 1, _MOST),
        ("durable.retry_s", durable.retry_s, 0, _LONGEST_S),
        ("durable.timeout_s", durable.timeout_s, 1, _LONGEST_S),
    ):
        if not number >= least:  # so that NaN is below everything
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
    """Settings that ``NAME:WHERE`` says, in sections; what is said elsewhere goes before them."""
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


MAX_YAML_VALUES = 200_000
"""Every value as often as an alias repeats it. The largest recipes have some thousands."""


class BoundedYamlLoader(yaml.SafeLoader):
    """A few lines of aliases of aliases say more values than there is memory for; those are a ``YAMLError``."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._count = 0
        self._counts: dict[str | None, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._add(self._counts.get(event.anchor, 1))
            return super().compose_node(parent, index)
        before = self._count
        self._add(1)
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._counts[event.anchor] = self._count - before
        return node

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_YAML_VALUES} values, those of its aliases included")


def load_yaml(text: str, loader: type[BoundedYamlLoader] = BoundedYamlLoader) -> Any:
    """Return the values of ``text``, or raise ``yaml.YAMLError`` with the line and column of the mistake."""
    try:
        return yaml.load(text, loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        began = error.context_mark
        if began is not None and mark is not None and began.line != mark.line:
            context = f" {error.context} that begins in line {began.line + 1}"
        else:
            context = f" {error.context}" if error.context else ""
        raise yaml.YAMLError(f"{where}{error.problem or 'syntax error'}{context}") from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise yaml.YAMLError(
            f"line {line}, column {column}: the character {chr(error.character)!r} is not allowed"
        ) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML lets through whatever its constructors meet: a 99th of May, a number that is none, a thousand brackets.
        raise yaml.YAMLError(str(error) or type(error).__name__) from error
