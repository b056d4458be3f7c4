"""Access of a command to the node agent and the durable tier. Never starts an agent."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from peerstore.client.agent_launcher import silence_of_agent
from peerstore.errors import AgentUnreachableError, PeerStoreError
from peerstore.settings import StoreSettings
from peerstore.shard_records import VersionId
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from peerstore.suggestions import did_you_mean
from tieredckpt.agent.agent_api import StepDescription
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.durable_catalog import DurableCatalog
from tieredckpt.agent.local_agents import describe_exited_agent, start_command
from tieredckpt.agent.peer_config import peer_transport
from tieredckpt.cli.exit_codes import CommandError, ExitCode
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import ShardIndex
from tieredckpt.location import Location, parse_location
from tieredckpt.memory_service_options import jobs_in_use
from tieredckpt.resolve_step import Tier
from tieredckpt.session.peer_reader import PeerReader
from tieredckpt.settings import DurableSettings, Settings, override_settings
from tieredckpt.step_inventory import LoadChoice, StepInventory, StepStatus

_TIMEOUT_S = 5.0
"""Seconds to wait for the durable tier.
After that it is reported as unreachable: a user waits for the command."""


class TierClient:
    """Client for the checkpoints in all tiers that this process can reach."""

    def __init__(
        self,
        settings: Settings,
        agent: NodeAgentClient | None,
        why_no_agent: str,
        direct: NodeAgentService,
        *,
        agent_advice: str = "",
    ) -> None:
        self.settings = settings
        self.agent = agent
        self.agent_error = why_no_agent
        self.agent_advice = agent_advice
        """Advice about an agent that does not answer. May be empty."""
        self._direct = direct
        self._known: dict[str, DurableSettings] = {}
        self._stores: dict[str, ObjectStore] = {}
        self._peers: dict[str, PeerReader] = {}

    def survey(self, job: str) -> StepInventory:
        """Return all attempts at all steps in the tiers that answer. Other tiers are listed as unreachable."""
        if self.agent is None:
            survey = self._survey_directly(job)
            return msgspec.structs.replace(survey, unreachable={Tier.MEMORY: self.agent_error, **survey.unreachable})
        survey = self.agent.list_steps(job, fresh=True)
        durable = self._choose_durable(job, survey.durable)
        if durable.url and (survey.durable is None or durable.url != survey.durable.url):
            return without_durable_tier(survey).merge(self._survey_directly(job))
        return survey

    def describe(self, job: str, group: VersionId) -> StepDescription:
        """Return the full description of a step, with the nearest tiers of each shard first."""
        found: list[StepDescription] = []
        absent: CheckpointNotFoundError | None = None
        for node in (self.agent, self._direct if self.durable_settings(job).url else None):
            if node is not None:
                try:
                    found.append(node.steps.describe(job, group))
                except CheckpointNotFoundError as error:
                    absent = error
        if not found:
            raise absent or CheckpointNotFoundError(f"job {job} has no step {group.version} here")
        return merge_descriptions(found)

    def attempts_at(self, location: Location, survey: StepInventory) -> list[StepStatus]:
        """Return the attempts that match ``location``, newest last. Raise if none match."""
        views = [view for view in survey.views if location.includes(view.version_id)]
        if not views:
            raise self.not_found_error(location, survey)
        return sorted(views, key=lambda view: (view.version_id.version, *view.version_id))

    def choose(self, location: Location, survey: StepInventory) -> LoadChoice:
        """Return the step that a load of ``location`` would use; a named step may be quarantined."""
        return survey.choose(
            location.step,
            location.epoch,
            avoid_after=self.settings.memory.avoid_after_crashed_loads,
            allow_quarantined=location.step is not None,
        )

    def choose_attempt(self, location: Location, survey: StepInventory) -> StepStatus:
        """Return the attempt that a load of ``location`` would use, or raise the reason why none is complete."""
        choice = self.choose(location, survey)
        if choice.plain is not None:
            other = f", or name one of {location.job}'s own steps: tieredckpt ls {location.job}" if survey.views else ""
            raise UsageError(
                f"The newest step of {location} is {choice.plain}, a plain checkpoint that this command does not read. "
                f"Use DCP's own reader{other}"
            )
        if choice.version_id is None:
            raise self.not_found_error(location, survey)
        return next(view for view in survey.views if view.version_id == choice.version_id)

    def not_found_error(self, location: Location, survey: StepInventory) -> TieredCheckpointError:
        """Return the error for a step that was not found. It suggests a job if the name is misspelled."""
        error = self.choose(location, survey).error(location, advice="")
        if survey.views or self.agent is None or not isinstance(error, CheckpointNotFoundError):
            return error
        return CheckpointNotFoundError(f"{error}.{meant}") if (meant := _suggest_job(self, location.job)) else error

    def with_quarantine_reason(self, job: str, view: StepStatus) -> StepStatus:
        """Return ``view`` with the reason in its durable quarantine mark, if that can be read."""
        if view.quarantined and view.durable:
            with contextlib.suppress(TieredCheckpointError):
                data = self.catalog(job).store.get(object_keys.quarantine_key(job, view.version_id))
                return msgspec.structs.replace(view, quarantined=data.decode(errors="replace"))
        return view

    def delete_attempts(self, job: str, groups: Sequence[VersionId], *, durable: bool = True) -> None:
        """Delete these steps from the memory of all nodes and, if ``durable``, from the durable tier."""
        problem: TierUnavailableError | None = None
        if self.agent is not None:
            try:
                self.agent.drop_steps(job, groups, durable=durable)
            except TierUnavailableError as error:
                problem = error
        if durable and self.durable_settings(job).url:
            self._direct.drop_steps(job, groups)
        if problem is not None:
            raise problem

    def durable_settings(self, job: str) -> DurableSettings:
        """Return the durable tier of ``job``: of the command line or the settings, otherwise of the agent."""
        known = self._known.get(job)
        if known is None:
            seen = None
            if self.agent is not None:
                seen = self.agent.list_steps(job).durable
            known = self._choose_durable(job, seen)
        return known

    def catalog(self, job: str) -> DurableCatalog:
        """Return the catalog of the job's manifests, which this process reads.

        Raise if its durable tier is unknown.
        """
        durable = self.durable_settings(job)
        if not durable.url:
            if self.agent is None:
                raise TierUnavailableError(
                    f"{self.agent_error}, so the durable tier of job {job!r} is unknown: name it with --durable URL or "
                    "durable.url"
                )
            if job not in known_job_names(self):
                raise CheckpointNotFoundError(
                    f"this node's agent has nothing of a job {job!r}, so its durable tier is unknown: name it with "
                    "--durable URL or durable.url"
                )
            raise UsageError(
                f"job {job!r} has no durable tier that this node's agent knows of: its steps are in memory only. Name "
                "a durable tier with --durable URL or durable.url"
            )
        with self._direct.durable.catalog(job) as catalog:  # stays open: the job is configured once
            assert catalog is not None  # noqa: S101 - it was configured with a URL
            return catalog

    def object_store(self, job: str) -> ObjectStore:
        """Return the job's object store, for reading shards."""
        durable = self.durable_settings(job)
        if durable.url not in self._stores:
            self._stores[durable.url] = open_store(durable.url, durable)
        return self._stores[durable.url]

    def peers(self, job: str) -> PeerReader | None:
        """Return a reader of the memory of the job's other nodes.

        ``None``: no agent answers, so they are unknown.
        """
        if self.agent is None:
            return None
        if job not in self._peers:
            agent = self.settings.agent
            transport = peer_transport(agent.interface, agent.tls, agent.transport)
            self._peers[job] = PeerReader(self.agent, job, transport, streams=self.settings.peer.streams)
        return self._peers[job]

    def close(self) -> None:
        for reader in self._peers.values():
            reader.close()
        for store in self._stores.values():
            store.close()
        if self.agent is not None:
            self.agent.close()

    def _choose_durable(self, job: str, seen: DurableSettings | None) -> DurableSettings:
        own = self.settings.durable
        if seen is not None and own.url in ("", seen.url):
            own = seen if not own.options else replace(seen, options=own.options)
        own = replace(own, retry_s=min(own.retry_s, _TIMEOUT_S), bandwidth="")
        self._known[job] = own
        self._direct.configure(job, own)
        return own

    def _survey_directly(self, job: str) -> StepInventory:
        durable = self.durable_settings(job)
        if not durable.url:
            raise TierUnavailableError(
                f"{self.agent_error}, so the durable tier of job {job!r} is unknown: "
                f"{self.agent_advice or 'start an agent (`tieredckpt agent --dir DIR`)'}, or name the store "
                "with --durable URL or durable.url"
            )
        return self._direct.list_steps(job, fresh=True)


@contextlib.contextmanager
def open_tier_client(settings: Settings, *, memory: bool = True) -> Iterator[TierClient]:
    """Open a client that uses this node's agent.

    Without its answer, or without ``memory``, it only reads the store.
    """
    place = settings.agent_place
    arena = MemfdArena()
    with contextlib.ExitStack() as cleanup:
        agent, why, advice = None, "", ""
        try:
            why = silence_of_agent(place) if memory else "memory is not asked"
            if not why:
                agent = NodeAgentClient(override_settings(settings, agent={"embedded": False}), "")
            elif memory:
                directory = shlex.quote(str(place.directory))
                advice = (
                    f"replace it with `tieredckpt agent restart --dir {directory}` (its checkpoints stay in memory)"
                )
        except AgentUnreachableError:
            why = describe_exited_agent(place.directory)
            advice = f"start it with {start_command(place.directory)}" if why else ""
            why = why or f"no agent answers in {place.directory}"
        except PeerStoreError as error:
            why = f"the agent in {place.directory} cannot be used: {error}"
        cleanup.callback(arena.purge)
        store = NodeStore(arena, StoreSettings(budget="64MiB"), threads=1)
        cleanup.callback(store.close)
        direct = NodeAgentService(store)
        cleanup.callback(direct.close)
        client = TierClient(settings, agent, why, direct, agent_advice=advice)
        cleanup.callback(client.close)
        yield client


def list_epochs(epochs: Sequence[int]) -> str:
    """Return the epochs as text: ``epochs 3, 5``."""
    return f"epoch{'s' * (len(epochs) > 1)} {', '.join(map(str, epochs))}"


def describe_other_branches(location: Location, chosen: VersionId, survey: StepInventory) -> str:
    """Return which epoch is used, if ``location`` names none and several saved its step completely.

    Otherwise "".
    """
    others = sorted(
        {
            view.version_id.epoch
            for view in survey.views
            if view.version_id.version == chosen.version and view.candidate.is_complete
        }
        - {chosen.epoch}
    )
    if not others or location.step is None or location.epoch is not None:
        return ""
    return (
        f"step {chosen.version} of job {location.job!r} was saved by {list_epochs(sorted([*others, chosen.epoch]))}: "
        f"using that of epoch {chosen.epoch}. To name another one: {location.job}/step-{chosen.version}@{others[-1]}"
    )


def without_durable_tier(survey: StepInventory) -> StepInventory:
    """Return ``survey`` without its durable tier, if another one is used."""
    views = (msgspec.structs.replace(view, durable=False) for view in survey.views if view.found)
    unreachable = dict(survey.unreachable)
    unreachable.pop(Tier.DURABLE, None)
    return msgspec.structs.replace(
        survey, views=tuple(views), unreachable=unreachable, plain=(), plain_incomplete=(), durable=None
    )


def merge_descriptions(found: Sequence[StepDescription]) -> StepDescription:
    """Merge descriptions of one step: each part has all of its tiers, nearest first."""
    shards: dict[int, ShardIndex] = {}
    for shard in (shard for one in found for shard in one.manifest.shards):
        known = shards.get(shard.key.part)
        if known is not None and known.checksums != shard.checksums:
            raise CheckpointDamagedError(f"{shard.key}: two copies of it have different checksums")
        # Only the index of a durable copy names its object.
        if known is None or not known.object:
            shards[shard.key.part] = shard
    places: dict[int, set[Tier]] = {}
    for one in found:
        for part, tiers in one.found.items():
            places.setdefault(part, set()).update(tiers)
    manifest = msgspec.structs.replace(
        found[-1].manifest,
        shards=tuple(shards[part] for part in sorted(shards)),
        layouts={k: v for one in found for k, v in one.manifest.layouts.items()},
        tables={k: v for one in found for k, v in one.manifest.tables.items()},
    )
    return StepDescription(
        manifest,
        {part: tuple(t for t in Tier if t in tiers) for part, tiers in places.items()},
        {part: sources for one in found for part, sources in one.sources.items()},
    )


def require_agent(client: TierClient) -> NodeAgentClient:
    """Return the agent, or raise if none answers."""
    if client.agent is None:
        why = f"{client.agent_error}, so what it has is unknown"
        if client.agent_advice:
            raise CommandError(why, code=ExitCode.UNAVAILABLE, advice=client.agent_advice)
        raise AgentUnreachableError(why)
    return client.agent


def known_job_names(client: TierClient) -> list[str]:
    """Return the jobs with checkpoints or processes at this node's agent."""
    known = require_agent(client).store.status().jobs
    return sorted(one.job for one in jobs_in_use(known))


def _suggest_job(client: TierClient, job: str) -> str:
    """Return a suggestion of this node's job with the closest name. Empty: the node has ``job``."""
    known = known_job_names(client)
    return "" if job in known else did_you_mean(job, known)


def resolve_job_name(client: TierClient, named: str | None) -> str:
    """Return the job that ``named`` names.

    Without a name, this node's only job; raise unless it has exactly one.
    """
    known = known_job_names(client)
    if named is not None:
        job = str(parse_location(named).job)
        if (
            job not in known and not require_agent(client).cluster_status(job).member_list_version
        ):  # the job may exist on other nodes only
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise CheckpointNotFoundError(
                f"this node's agent keeps nothing for a job {job}: {there}.{did_you_mean(job, known)}"
            )
        return job
    if not known:
        raise CheckpointNotFoundError("this node's agent has no job")
    if len(known) > 1:
        raise UsageError(f"this node's agent has several jobs, name one: {', '.join(known)}")
    return known[0]
