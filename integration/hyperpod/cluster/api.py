"""DescribeCluster and UpdateCluster through boto3, and what their refusals mean."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from integration.hyperpod.cluster.flag import KEY, TieredStorageConfig, flag_in
from integration.hyperpod.cluster.updating import Cluster, Progress, progress
from tieredckpt.cli.exits import CommandError, Exit

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
_LATER = frozenset({"InternalFailure", "InternalServerError", "RequestTimeout", "ServiceUnavailable", "Throttling"})
_POLL_S = 15.0


@dataclass(frozen=True)
class Clusters:
    """The clusters of one account and region."""

    region: str | None = None
    profile: str | None = None
    endpoint_url: str | None = None
    client: Any = None
    """Of boto3, where the caller has one."""
    _clients: dict[str | None, Any] = field(default_factory=dict, repr=False)
    """By region; one costs a second."""

    def describe(self, name: str) -> Cluster:
        answer = self._call("DescribeCluster", name, {"ClusterName": name})
        return Cluster(
            name=answer.get("ClusterName", name),
            arn=answer["ClusterArn"],
            status=answer["ClusterStatus"],
            flag=flag_in(answer, f"cluster {name}"),
            node_recovery=answer.get("NodeRecovery"),
            failure=answer.get("FailureMessage", ""),
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
    ) -> Cluster:
        """The cluster when it has what is wanted; raises when it went back to what it had, or when time is up."""
        deadline = clock() + timeout_s
        began = False
        while True:
            cluster = self.describe(name)
            stands = progress(cluster, wanted, began=began)
            if stands is Progress.DONE:
                return cluster
            if stands is Progress.FAILED:
                why = f": {cluster.failure}" if cluster.failure else ""
                raise CommandError(f"cluster {name} did not take {KEY}: it is {cluster.status}{why}")
            began = began or stands is Progress.UNDER_WAY
            if clock() + _POLL_S > deadline:
                text = f"cluster {name} is still {cluster.status} after {timeout_s:g} s"
                raise CommandError(text, code=Exit.UNAVAILABLE, advice=f"`tieredckpt cluster show --cluster {name}`")
            sleep(_POLL_S)

    def _call(self, operation: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
        from botocore import exceptions as boto

        try:
            client = self.client if self.client is not None else self._client(name)
            method = "describe_cluster" if operation == "DescribeCluster" else "update_cluster"
            answer: dict[str, Any] = getattr(client, method)(**request)
            return answer
        except boto.ClientError as error:
            raise refused(operation, name, error.response) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError) as error:
            raise _no_credentials(str(error)) from error
        except (boto.ProfileNotFound, boto.TokenRetrievalError, boto.SSOError) as error:
            raise _no_credentials(str(error)) from error
        except boto.NoRegionError as error:
            raise CommandError(
                "no AWS region is set", code=Exit.USAGE, advice="give --region, $AWS_REGION, or the cluster's whole ARN"
            ) from error
        except (boto.ParamValidationError, boto.InvalidRegionError, ValueError) as error:
            raise CommandError(f"{operation} of {name!r}: {error}", code=Exit.USAGE) from error
        except (boto.HTTPClientError, boto.ConnectionError) as error:
            raise CommandError(
                f"{operation} of {name}: SageMaker cannot be reached: {error}",
                code=Exit.UNAVAILABLE,
                advice="what the cluster has is not known; look at the network, the region and --endpoint-url",
            ) from error
        except boto.BotoCoreError as error:
            raise CommandError(f"{operation} of {name}: {error}") from error

    def _client(self, name: str) -> Any:
        import boto3
        from botocore.config import Config

        region = self.region or region_of(name)
        if region not in self._clients:
            config = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 4})
            session = boto3.Session(profile_name=self.profile, region_name=region)
            self._clients[region] = session.client("sagemaker", endpoint_url=self.endpoint_url, config=config)
        return self._clients[region]


def region_of(name: str) -> str | None:
    """The region that a cluster's ARN names."""
    parts = name.split(":")
    return parts[3] if len(parts) == 6 and parts[0] == "arn" else None


def refused(operation: str, name: str, response: dict[str, Any]) -> CommandError:
    """What an error's answer means, and what to do next."""
    said = response.get("Error", {})
    code, message = said.get("Code", ""), said.get("Message") or "no reason is given"
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = f"{operation} of {name}: {code}: {message}"
    if code in ("ResourceNotFound", "ResourceNotFoundException"):
        advice = "`aws sagemaker list-clusters` shows which there are; a region and an account have their own"
        return CommandError(f"there is no cluster {name}: {message}", code=Exit.NOT_FOUND, advice=advice)
    if code in _REFUSALS or status in (401, 403):
        advice = f"it needs sagemaker:{operation} on the cluster; `aws sts get-caller-identity` shows who is asking"
        return CommandError(text, code=Exit.REFUSED, advice=advice)
    if code.startswith("ConflictException"):
        return CommandError(text, advice="it is being changed already: try again when `cluster show` says InService")
    if any(code.startswith(one) for one in _LATER) or status >= 500:
        return CommandError(text, code=Exit.UNAVAILABLE, advice="what the cluster has is not known; try again")
    if code.startswith("ValidationException"):
        return CommandError(text, code=Exit.USAGE)
    return CommandError(text)


def _no_credentials(why: str) -> CommandError:
    return CommandError(
        f"AWS credentials cannot be used: {why}",
        code=Exit.REFUSED,
        advice="`aws configure`, `aws sso login`, --profile NAME or a role; `aws sts get-caller-identity` tests them",
    )
