"""Meanings of errors and metrics, for the generated pages."""

from __future__ import annotations

ERRORS: dict[str, tuple[str, str]] = {
    # tieredckpt
    "TieredCheckpointError": ("Root of the errors of checkpoints", "Catch it to catch all of them"),
    "UsageError": ("The call or the configuration is wrong", "Correct it; a retry fails again"),
    "SettingsError": ("Settings are wrong; the message names every key", "Correct the [settings](settings.md)"),
    "MissingStepError": ("A save does not name its step", "Pass `step=`, or write `tiered://JOB/step-N`"),
    "MismatchError": (
        "The state and the checkpoint differ in names, shapes or data types",
        "Change the state. `strict=False` allows other names, `on_dtype_mismatch` other data types. Shapes must match",
    ),
    "UntrustedObjectError": (
        "An entry would run code when it is loaded",
        "Allow its class, or load only checkpoints that you trust ([security](../explanation/security.md))",
    ),
    "FormatVersionError": ("A newer release wrote the checkpoint", "Upgrade"),
    "PluginError": ("A package that adds commands or platforms cannot be loaded", "Install it again, or remove it"),
    "CheckpointNotFoundError": (
        "Every tier answered, and none has a complete step as requested",
        "`tieredckpt ls JOB`. A new job may start without a checkpoint",
    ),
    "CheckpointTornError": (
        "Steps were begun and none was completed",
        "As above: no complete step was lost. `Checkpointer.restore` returns -1 and warns",
    ),
    "EventLogNotFoundError": ("The directory has no event log", "Set `TIEREDCKPT_EVENT_LOG`, or use `elastic run`"),
    "TierUnavailableError": (
        "A tier did not answer, so its steps are unknown",
        "Retry, and run `tieredckpt doctor`. Do not start fresh",
    ),
    "StoreBusyError": ("The store throttles, or a slot or upload is still in use", "Retry later, or save less often"),
    "PeersLostError": ("The nodes that held the bytes failed during the read", "Load again"),
    "CheckpointDeletedError": ("Retention deleted the step during the read", "Load again: newer steps exist"),
    "CheckpointDamagedError": (
        "Checksums do not match, and no other copy is good",
        "Load an older step. `tieredckpt verify JOB` names the damaged copies",
    ),
    "CheckpointLostError": (
        "A step was complete, and no node that answers has all of it",
        'Bring the missing nodes back, or pass `on_lost="start_fresh"` to `Checkpointer.restore`',
    ),
    "RestoreProofError": (
        "After a restore the live state differs from the saved one",
        "Do not train on it. Correct the `load_state_dict` of the named entries",
    ),
    "DurableRefusedError": (
        "The object store refused: credentials, permission, or no such bucket",
        "`tieredckpt doctor` shows the credentials and the cause",
    ),
    "SaveFailedError": (
        "This save failed; the newest complete step stays",
        'Training may continue; `Checkpointer(on_failure="raise")` stops it. The message has the cause',
    ),
    "JobTakenOverError": (
        "Another process with the same job name has begun to save; `Checkpointer.save` raises it",
        "Stop one of the two. Two trainings need two job names",
    ),
    "NonFiniteStateError": (
        "A tensor has become NaN or infinite",
        "Restore the last step. The save is refused so that a finite step stays",
    ),
    # elastic
    "ElasticError": ("Root of the errors of elastic jobs", "Catch it to catch all of them"),
    "PolicyError": ("A policy, plan or option is impossible; the message names the limit", "Correct it"),
    "UnsupportedBatchError": ("The batch cache cannot store this type", "Convert the batch in `prepare`"),
    "CacheDirectoryError": ("Another user may enter the directory of the batch cache", "Name another directory"),
    "ControlPlaneUnavailableError": ("The coordinator did not answer", "Retry. The ranks continue without it"),
    "ControlPlaneRefusedError": (
        "The coordinator refused: wrong secret, or a member of an earlier world",
        "Use the secret of the job; a retry fails again",
    ),
    "JobNotFoundError": ("No such job runs on this machine", "`elastic status` lists the jobs"),
    "StaleEpochError": (
        "The call belongs to an earlier world",
        "Return from the train function: the next world calls it",
    ),
    "ControlDeadlineError": ("A rank did not reach the others in time", "Raise the timeout that the message names"),
    "NonFiniteLossError": ("A loss is not finite, and all ranks drop the step", "Check data and learning rate"),
    "UnhealthyProcessError": ("The process cannot join another world", "None: `elastic run` starts a new process"),
    "JobFailedError": ("The job cannot continue", "The message has the cause and the command that resumes the job"),
    "CursorError": ("This position of the data would repeat or skip samples", "Restore the cursor with the state"),
    "StepOrderError": ("The loop starts a step before it committed the last one", "Call `work.commit()` in each step"),
    "DataWorkersLostError": ("Worker processes of the data loader died", "Iterate again: new ones start"),
    "CacheFullError": ("The batch cache is required and a batch does not fit", "Enlarge the cache"),
    "ChunkDamagedError": ("A file of an `elastic map` job is damaged", "Remove the named file and repeat the command"),
    "WorldChanged": ("The world of this attempt has ended; not an error", "Do not catch it"),
    # peerstore
    "PeerStoreError": ("Root of the errors of the store in memory", "Catch it to catch all of them"),
    "RequestError": ("The call is wrong", "Correct it; a retry fails again"),
    "InvalidNameError": ("The job name has other characters than `A-Z a-z 0-9 . _ -`", "Rename the job"),
    "MissingPackageError": ("An optional package is missing, or too old", "Install what the message names"),
    "ProtocolError": ("The other side does not follow the protocol", "Use one version on all nodes"),
    "PeerRefusedError": ("Another agent has another secret, job or certificate", "Configure the same on all nodes"),
    "ShardNotFoundError": ("This node has no such shard", "None: the reader uses the next tier"),
    "ShardDamagedError": ("The bytes do not match the checksums of the seal", "None: the reader uses another copy"),
    "UnsupportedFormatError": ("Another version of the agent wrote the shard", "Use that version, or another copy"),
    "UnavailableError": ("The answer is unknown for now", "Retry"),
    "AgentUnreachableError": (
        "The node agent does not answer",
        "`tieredckpt agent ls`, then `tieredckpt agent restart`",
    ),
    "PeerUnreachableError": ("The agent of another node does not answer", "Check that node and the network"),
    "JobNotJoinedError": ("The agent of another node has not joined the job yet", "Retry"),
    "ShardUnreadableError": (
        "The shard exists and cannot be read: open files, memory or I/O",
        "Read `agent.log`; raise the limit that it names",
    ),
    "NoQuorumError": ("This node reaches too few nodes of the job to decide alone", "Restore the network"),
    "ArenaBusyError": ("Every slot is in use", "Save less often, or set `agent.burst_slots`"),
    "AgentBusyError": ("The agent is near its limit of open files", "Raise `ulimit -n` for the agent"),
    "ShardPendingError": ("The shard is not verified yet, or still arriving", "Retry"),
    "ArenaFullError": ("The save does not fit the budget or the memory", "Raise `agent.budget`, or save less"),
    "FencedError": ("A newer run of the job took over", "Stop this process. Two trainings need two job names"),
    "LeaseLostError": ("The slot of a save was taken back", "Save again"),
}
"""By error: when it is raised, and the remedy."""

METRICS_START = """
Each node agent serves `/metrics` and `/status` at `agent.http`. By default that is the socket `http.sock` in the
agent's directory. For Prometheus set `agent.http` to `HOST:PORT`.

```bash
curl --unix-socket /dev/shm/tieredckpt-$(id -u)/http.sock http://agent/metrics
```

[Monitoring](../how-to/monitoring.md) has the scrape configuration, alert rules and a Grafana dashboard.

The label `what` of `tieredckpt_trainer_total` names the value: `saves`, `saved_bytes`, `copy_seconds`, `seal_seconds`,
`blocked_seconds`, `skipped`, `failed`, `loads` and `load_seconds`, among others. `begun_absent`, `begun_torn`,
`begun_lost` and `begun_damaged` count the runs that started without a checkpoint.
"""

METRICS: dict[str, str] = {
    "tieredckpt_arena_budget_bytes": "Memory that shards may use",
    "tieredckpt_arena_allocated_bytes": "Memory in slots",
    "tieredckpt_arena_sealed_bytes": "Memory in sealed shards",
    "tieredckpt_arena_slots": "Slots",
    "tieredckpt_arena_free_slots": "Unused slots",
    "tieredckpt_arena_leases": "Slots that a save is writing",
    "tieredckpt_arena_pins": "Reads in progress",
    "tieredckpt_files_open": "Open files and connections of the agent",
    "tieredckpt_files_limit": "Limit of open files",
    "tieredckpt_arena_unrecognized_bytes": "Memory in slots that another version of the agent wrote",
    "tieredckpt_unrecognized_slots": "Slots that another version of the agent wrote",
    "tieredckpt_recovering_shards": "Shards of an earlier agent that are not verified yet",
    "tieredckpt_drain_lag_seconds": "Time from the seal of the last durable step to its manifest",
    "tieredckpt_seals_total": "Sealed shards",
    "tieredckpt_sealed_bytes_total": "Sealed bytes",
    "tieredckpt_seal_seconds_total": "Time spent on checksums",
    "tieredckpt_evictions_total": "Shards evicted for newer ones",
    "tieredckpt_leases_total": "Slots leased to saves",
    "tieredckpt_leases_lost_total": "Leases revoked from dead or fenced writers",
    "tieredckpt_leases_busy_total": "Saves that found every slot in use",
    "tieredckpt_leases_over_budget_total": "Saves that did not fit the budget",
    "tieredckpt_recovered_shards_total": "Shards adopted from an earlier agent",
    "tieredckpt_damaged_copies_total": "Copies with wrong checksums",
    "tieredckpt_unreadable_reads_total": "Failed reads of shards that are kept",
    "tieredckpt_rejected_busy_total": "Requests refused near the limit of open files",
    "tieredckpt_listener_errors_total": "Events of shards that a part of the agent failed to handle",
    "tieredckpt_drained_steps_total": "Steps made durable",
    "tieredckpt_drained_bytes_total": "Uploaded bytes",
    "tieredckpt_drain_seconds_total": "Time spent on uploads",
    "tieredckpt_drain_skips_total": "Steps not uploaded because a newer one was ready",
    "tieredckpt_drain_errors_total": "Failed attempts to make a step durable",
    "tieredckpt_deleted_steps_total": "Durable steps deleted by retention",
    "tieredckpt_peers_alive": "Live nodes of the job, including this one",
    "tieredckpt_peers_quorum": "1 if this node reaches a quorum of them, else 0",
    "tieredckpt_shards_under_replicated": "Shards of this node that lack replicas",
    "tieredckpt_shards_unplaceable": "Shards of this node for whose replicas no node is suitable",
    "tieredckpt_replicated_step": "Newest step with all its replicas; -1: none",
    "tieredckpt_copy_lag_seconds": "Time from the seal of the last replicated shard to its replica",
    "tieredckpt_copies_total": "Replicas made on other nodes",
    "tieredckpt_copied_bytes_total": "Bytes sent for replicas",
    "tieredckpt_copies_unchanged_bytes_total": "Bytes of replicas that were unchanged and not sent",
    "tieredckpt_copy_seconds_total": "Time spent on sending replicas",
    "tieredckpt_copy_errors_total": "Replicas that failed and were retried",
    "tieredckpt_copy_throttled_seconds_total": "Time that `peer.bandwidth` delayed replicas",
    "tieredckpt_shards_repaired_total": "Damaged shards fetched again from other nodes",
    "tieredckpt_shards_taken_over_total": "Shards of lost nodes that this node is now responsible for",
    "tieredckpt_path_bytes_per_second": "Measured speed of replicas to another node",
    "tieredckpt_newest_complete_step": "Newest complete step in memory",
    "tieredckpt_job_epoch": "Epoch of the job",
    "tieredckpt_protected_step": "Newest step that has all its replicas or is durable; -1: none",
    "tieredckpt_unprotected_seconds": "Time for which newer saves have been unprotected; 0: they are protected",
    "tieredckpt_trainer_total": "Values that the trainers report",
    "tieredckpt_memory_service_namespaces": "Namespaces of the memory service",
    "tieredckpt_memory_service_shards": "Shards of the memory service on this node, replicas included",
    "tieredckpt_memory_service_shard_bytes": "Bytes of these shards",
    "tieredckpt_memory_service_requests_total": "Requests by kind",
    "tieredckpt_memory_service_refused_total": "Refused requests",
    "tieredckpt_memory_service_put_bytes_total": "Bytes received from clients",
    "tieredckpt_memory_service_get_bytes_total": "Bytes sent to clients",
    "tieredckpt_memory_service_remote_gets_total": "Shards read from another node for a client",
    "tieredckpt_memory_service_evictions_total": "Evicted shards",
    "tieredckpt_ettr_ratio": "Share of the job's time in steps that count",
    "tieredckpt_goodput_ratio": "The same share of the capacity of the largest world",
    "tieredckpt_job_seconds": "Time of the job, by `category`",
    "tieredckpt_rank_seconds": "Time of all ranks, by `category`",
    "tieredckpt_job_steps": 'Steps by `kind`: `"counted"` or `"lost"`',
    "tieredckpt_job_faults": "Faults of the job",
    "tieredckpt_job_world_changes": "Worlds that were formed",
    "tieredckpt_job_running": "1 if the job has not ended",
    "tieredckpt_mttr_seconds": "Mean time from a fault to the next step",
    "tieredckpt_mtbf_seconds": "Mean time of steps between interruptions",
    "tieredckpt_job_protected_step": "Newest protected step; -1: none",
    "tieredckpt_job_unprotected_seconds": "Time in which newer saves were unprotected",
    "tieredckpt_transition_stage_p50_seconds": "Median time of a rank in a `stage` of a start, resize or recovery",
    "tieredckpt_transition_stage_p99_seconds": "99th percentile of the same",
}
