"""TieredStorageConfig of a cluster: parsed, mapped to settings, and changed through UpdateCluster.

It comes from a file (alone, or a whole response of ``describe-cluster``), from the directory of a mounted ConfigMap, or
from the API. All other sources of settings have precedence over it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from tieredckpt.bounded_yaml import load_yaml
from tieredckpt.cli.exit_codes import CommandError, ExitCode
from tieredckpt.errors import SettingsError, TierUnavailableError

TIERED_STORAGE_KEY = "TieredStorageConfig"
MIN_ADVISED_PERCENT = 20
"""AWS's guide recommends 20 to 100; the API accepts less."""
_MAX_FILE_BYTES = 4 << 20
_SUFFIXES = (".json", ".yaml", ".yml")


class TieredStorageMode(enum.Enum):
    ENABLE = "Enable"
    DISABLE = "Disable"


class TieredStorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="pascal"):
    """The object of CreateCluster, UpdateCluster and DescribeCluster."""

    mode: TieredStorageMode
    instance_memory_allocation_percentage: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None

    @property
    def percent(self) -> int | None:
        return self.instance_memory_allocation_percentage

    @property
    def enabled(self) -> bool:
        return self.mode is TieredStorageMode.ENABLE

    def describe(self) -> str:
        """Return a description for users."""
        if not self.enabled:
            return "off: nothing is kept in the nodes' memory, checkpoints go to the durable tier directly"
        share = "as much as the agent's own settings say" if self.percent is None else f"{self.percent} %"
        return f"on: {share} of each node's memory"


TIERED_STORAGE_DISABLED = TieredStorageConfig(TieredStorageMode.DISABLE)


def parse_tiered_storage_config(tree: Any, where: str) -> TieredStorageConfig:
    """Parse the configuration: alone, under its name, or in a cluster's description.

    A cluster without one has it disabled.
    """
    if not isinstance(tree, Mapping):
        raise SettingsError(
            f"{where}: expected {TIERED_STORAGE_KEY} or a cluster's description, found {type(tree).__name__}"
        )
    if TIERED_STORAGE_KEY in tree:
        tree = tree[TIERED_STORAGE_KEY]
    elif "Mode" not in tree:
        if "InstanceGroups" in tree:
            return TIERED_STORAGE_DISABLED
        raise SettingsError(
            f"{where}: there is neither {TIERED_STORAGE_KEY} nor Mode, and it describes no cluster either"
        )
    try:
        flag = msgspec.convert(tree, TieredStorageConfig, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {TIERED_STORAGE_KEY}: {error}") from error
    if flag.enabled and flag.percent == 0:
        text = "Enable with 0 percent keeps nothing: write Disable, or 1 to 100 (AWS's guide: from 20 on)"
        raise SettingsError(f"{where}: {TIERED_STORAGE_KEY}: {text}")
    return flag


def read_tiered_storage_config(path: Path) -> TieredStorageConfig:
    """Read the configuration from a file or from the directory of a mounted ConfigMap.

    The directory has one file, or one file for each key.
    """
    if not path.is_dir():
        return parse_tiered_storage_config(_parsed(path), str(path))
    found = sorted(file for file in path.iterdir() if not file.name.startswith(".") and file.is_file())
    keys = {file.name: file for file in found if file.name in _NAMES}
    if keys:
        return parse_tiered_storage_config({name: _text(file).strip() for name, file in keys.items()}, str(path))
    whole = [file for file in found if file.name == TIERED_STORAGE_KEY or file.suffix in _SUFFIXES]
    if len(whole) != 1:
        listed = ", ".join(file.name for file in found) or "nothing"
        raise SettingsError(
            f"{path}: expected one file {TIERED_STORAGE_KEY}, or {' and '.join(_NAMES)}; there is {listed}"
        )
    return parse_tiered_storage_config(_parsed(whole[0]), str(whole[0]))


_NAMES = tuple(field.encode_name for field in msgspec.structs.fields(TieredStorageConfig))


def tiered_storage_settings(flag: TieredStorageConfig) -> dict[str, Any]:
    """Return this project's settings for it, as in a ``$TIEREDCKPT_CONFIG`` file."""
    if not flag.enabled:
        return {"enabled": False}
    return {"enabled": True} if flag.percent is None else {"enabled": True, "agent": {"budget": f"{flag.percent}%"}}


def cluster_settings_from(where: str) -> dict[str, Any]:
    """Return the settings of ``hyperpod:/path`` or ``hyperpod:CLUSTER``.

    ``$TIEREDCKPT_CLUSTER`` and ``--cluster-config`` accept these.
    """
    if where.startswith("/"):
        return tiered_storage_settings(read_tiered_storage_config(Path(where)))

    try:
        return tiered_storage_settings(HyperPodClusterApi().describe(where).tiered_storage)
    except CommandError as error:
        kind = TierUnavailableError if error.code is ExitCode.UNAVAILABLE else SettingsError
        raise kind(f"{error}{': ' if error.advice else ''}{error.advice}") from error


def _parsed(path: Path) -> Any:
    text = _text(path)
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is neither JSON nor YAML: {error}") from error


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise SettingsError(f"{path} is longer than {_MAX_FILE_BYTES} bytes: it is not a cluster description")
        return data.decode()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not text: {error}") from error


NODE_RECOVERY_MODES = ("Automatic", "None")
_CHANGING = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack"})


@dataclass(frozen=True)
class ClusterDescription:
    """The needed parts of a DescribeCluster response."""

    name: str
    arn: str
    status: str
    tiered_storage: TieredStorageConfig
    node_recovery: str | None = None
    failure_message: str = ""


class UpdateProgress(enum.Enum):
    NOT_STARTED = "not begun"
    IN_PROGRESS = "under way"
    DONE = "done"
    FAILED = "failed"


def enabled_config(cluster: ClusterDescription, percent: int | None) -> TieredStorageConfig:
    """Return the enabled configuration with the requested or the current share."""
    share = percent if percent is not None else cluster.tiered_storage.percent
    if not share:
        text = f"cluster {cluster.name} has no share of memory for checkpoints yet"
        raise CommandError(text, code=ExitCode.USAGE, advice="give one: --percent 30")
    return TieredStorageConfig(TieredStorageMode.ENABLE, share)


def has_config(cluster: ClusterDescription, wanted: TieredStorageConfig) -> bool:
    """Return whether the cluster needs no change. The share of a disabled configuration has no meaning."""
    return cluster.tiered_storage == wanted or (not wanted.enabled and not cluster.tiered_storage.enabled)


def update_request(
    cluster: ClusterDescription, wanted: TieredStorageConfig, node_recovery: str | None = None
) -> dict[str, Any]:
    """Return the UpdateCluster request.

    UpdateCluster rejects the configuration alone: it requires instance groups or the node recovery. The node recovery
    is repeated unchanged. Described instance groups are not valid as specifications, and a mistake in them would change
    machines.
    """
    recovery = node_recovery or cluster.node_recovery
    if recovery is None:
        text = (
            f"UpdateCluster needs NodeRecovery beside {TIERED_STORAGE_KEY}, and cluster {cluster.name} does not "
            f"say which it has"
        )
        advice = f"give the one it is to have: --node-recovery {' or '.join(NODE_RECOVERY_MODES)}"
        raise CommandError(text, code=ExitCode.USAGE, advice=advice)
    return {"ClusterName": cluster.name, TIERED_STORAGE_KEY: msgspec.to_builtins(wanted), "NodeRecovery": recovery}


def update_progress(cluster: ClusterDescription, wanted: TieredStorageConfig, *, began: bool) -> UpdateProgress:
    """Return the progress of an update. ``began``: whether the cluster was observed changing since."""
    if cluster.status in _CHANGING:
        return UpdateProgress.IN_PROGRESS
    if cluster.status != "InService":
        return UpdateProgress.FAILED
    if has_config(cluster, wanted):
        return UpdateProgress.DONE
    return UpdateProgress.FAILED if began else UpdateProgress.NOT_STARTED


_REFUSALS = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "NotAuthorized",
        "OptInRequired",
        "SignatureDoesNotMatch",
        "UnauthorizedOperation",
        "UnrecognizedClientException",
    }
)
_RETRYABLE = frozenset({"InternalFailure", "InternalServerError", "RequestTimeout", "ServiceUnavailable", "Throttling"})
_POLL_S = 15.0


@dataclass(frozen=True)
class HyperPodClusterApi:
    """The clusters of one account and region."""

    region: str | None = None
    profile: str | None = None
    endpoint_url: str | None = None
    client: Any = None
    """Existing boto3 client of the caller."""
    _clients: dict[str | None, Any] = field(default_factory=dict, repr=False)
    """Clients by region; the creation of one takes a second."""

    def describe(self, name: str) -> ClusterDescription:
        answer = self._call("DescribeCluster", name, {"ClusterName": name})
        return ClusterDescription(
            name=answer.get("ClusterName", name),
            arn=answer["ClusterArn"],
            status=answer["ClusterStatus"],
            tiered_storage=parse_tiered_storage_config(answer, f"cluster {name}"),
            node_recovery=answer.get("NodeRecovery"),
            failure_message=answer.get("FailureMessage", ""),
        )

    def update(self, name: str, request: dict[str, Any]) -> None:
        self._call("UpdateCluster", name, request)

    def wait(
        self,
        name: str,
        wanted: TieredStorageConfig,
        *,
        timeout_s: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> ClusterDescription:
        """Wait until the cluster has the configuration, and return the cluster.

        Raise :class:`CommandError` after a rollback or a timeout.
        """
        deadline = clock() + timeout_s
        began = False
        while True:
            cluster = self.describe(name)
            progress = update_progress(cluster, wanted, began=began)
            if progress is UpdateProgress.DONE:
                return cluster
            if progress is UpdateProgress.FAILED:
                reason = f": {cluster.failure_message}" if cluster.failure_message else ""
                raise CommandError(f"cluster {name} did not take {TIERED_STORAGE_KEY}: it is {cluster.status}{reason}")
            began = began or progress is UpdateProgress.IN_PROGRESS
            if clock() + _POLL_S > deadline:
                text = f"cluster {name} is still {cluster.status} after {timeout_s:g} s"
                raise CommandError(
                    text, code=ExitCode.UNAVAILABLE, advice=f"`tieredckpt cluster show --cluster {name}`"
                )
            sleep(_POLL_S)

    def _call(self, operation: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
        from botocore import exceptions as boto

        try:
            client = self.client if self.client is not None else self._client(name)
            method = "describe_cluster" if operation == "DescribeCluster" else "update_cluster"
            answer: dict[str, Any] = getattr(client, method)(**request)
            return answer
        except boto.ClientError as error:
            raise error_for_response(operation, name, error.response) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError) as error:
            raise _no_credentials(str(error)) from error
        except (boto.ProfileNotFound, boto.TokenRetrievalError, boto.SSOError) as error:
            raise _no_credentials(str(error)) from error
        except boto.NoRegionError as error:
            raise CommandError(
                "no AWS region is set",
                code=ExitCode.USAGE,
                advice="give --region, $AWS_REGION, or the cluster's whole ARN",
            ) from error
        except (boto.ParamValidationError, boto.InvalidRegionError, ValueError) as error:
            raise CommandError(f"{operation} of {name!r}: {error}", code=ExitCode.USAGE) from error
        except (boto.HTTPClientError, boto.ConnectionError) as error:
            raise CommandError(
                f"{operation} of {name}: SageMaker cannot be reached: {error}",
                code=ExitCode.UNAVAILABLE,
                advice="the cluster's configuration is unknown. Check the network, the region and --endpoint-url",
            ) from error
        except boto.BotoCoreError as error:
            raise CommandError(f"{operation} of {name}: {error}") from error

    def _client(self, name: str) -> Any:
        import boto3
        from botocore.config import Config

        region = self.region or region_of_arn(name)
        if region not in self._clients:
            config = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 4})
            session = boto3.Session(profile_name=self.profile, region_name=region)
            self._clients[region] = session.client("sagemaker", endpoint_url=self.endpoint_url, config=config)
        return self._clients[region]


def region_of_arn(name: str) -> str | None:
    """Return the region in a cluster's ARN, or None."""
    parts = name.split(":")
    return parts[3] if len(parts) == 6 and parts[0] == "arn" else None


def error_for_response(operation: str, name: str, response: dict[str, Any]) -> CommandError:
    """Return the error for an AWS error response, with advice."""
    details = response.get("Error", {})
    code, message = details.get("Code", ""), details.get("Message") or "no reason is given"
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = f"{operation} of {name}: {code}: {message}"
    if code in ("ResourceNotFound", "ResourceNotFoundException"):
        advice = "`aws sagemaker list-clusters` shows which there are; a region and an account have their own"
        return CommandError(f"there is no cluster {name}: {message}", code=ExitCode.NOT_FOUND, advice=advice)
    if code in _REFUSALS or status in (401, 403):
        advice = f"it needs sagemaker:{operation} on the cluster; `aws sts get-caller-identity` shows who is asking"
        return CommandError(text, code=ExitCode.REFUSED, advice=advice)
    if code.startswith("ConflictException"):
        return CommandError(text, advice="it is being changed already: try again when `cluster show` says InService")
    if any(code.startswith(prefix) for prefix in _RETRYABLE) or status >= 500:
        return CommandError(text, code=ExitCode.UNAVAILABLE, advice="what the cluster has is not known; try again")
    if code.startswith("ValidationException"):
        return CommandError(text, code=ExitCode.USAGE)
    return CommandError(text)


def _no_credentials(why: str) -> CommandError:
    return CommandError(
        f"AWS credentials cannot be used: {why}",
        code=ExitCode.REFUSED,
        advice="`aws configure`, `aws sso login`, --profile NAME or a role; `aws sts get-caller-identity` tests them",
    )
