"""Live state after a restore, compared entry by entry with the evidence of the load."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from peerstore.client.store_api import Store
from tieredckpt.restore.proof import (
    ABSENT_REASON,
    LoadEvidence,
    RestoreProof,
    RestoreProver,
    target_lookup,
)
from tieredckpt.restore.tensor_bytes import inner_tensors, tensor_bytes
from tieredckpt.restore.verified_reads import PinnedShards
from tieredckpt.tensors.state_dict import archive_object, flatten_state, resolve_stateful

log = logging.getLogger(__name__)


def top_level_name(state: Mapping[str, Any], fqn: str) -> str:
    """Return the top-level name in ``state``, which may have dots, of a flattened name."""
    end = fqn.find(".")
    while end >= 0:
        if fqn[:end] in state:
            return fqn[:end]
        end = fqn.find(".", end + 1)
    return fqn


class RestoredState:
    """State after a restore, flattened again and compared with the load."""

    def __init__(
        self,
        state: Mapping[str, Any],
        evidence: LoadEvidence,
        store: Store,
        exclude_from_proof: Collection[str],
        is_selective: Callable[[object], bool],
    ) -> None:
        """``is_selective`` returns whether a part of the state restores only some of its saved entries."""
        self._state = state
        self._evidence = evidence
        self._store = store
        self._excluded = exclude_from_proof
        self._is_selective = is_selective
        self._flat: dict[str, Any] = {}
        self.proof = RestoreProof()
        """Result of the comparisons so far."""

    def prove(self) -> None:
        """Compare all entries with the saved ones."""
        excluded: dict[str, str] = dict.fromkeys(self._excluded, "as said")
        self._flat = self._flatten(sorted(self._state), excluded)
        skip = {}
        if excluded or any(map(self._is_selective, self._state.values())):
            skip = {fqn: why for fqn in self._names() if (why := self._skip_reason(fqn, excluded))}
        pinned = PinnedShards(self._store, self._evidence.step.version_id)
        try:
            self.proof = RestoreProver(self._evidence, target_lookup(self._flat), pinned).run(skip)
        finally:
            pinned.release()
        compare_objects(self._evidence, self._flat, skip, self.proof)

    def mark_unproven(self, why: str) -> None:
        """Replace the result: no entry was compared, because of ``why``."""
        self.proof = RestoreProof(not_compared=dict.fromkeys(self._names(), why))

    def _names(self) -> Iterator[str]:
        yield from (brought.fqn for brought in self._evidence.brought)
        yield from self._evidence.objects

    def _skip_reason(self, fqn: str, excluded: Mapping[str, str]) -> str:
        top = self._top_of(fqn)
        if top in excluded:
            return excluded[top]
        if fqn not in self._flat and self._is_selective(self._state.get(top)):
            return "its part of the state selects the entries that it restores"
        return ""

    def _top_of(self, fqn: str) -> str:
        return top_level_name(self._state, fqn)

    def _flatten(self, names: Sequence[str], excluded: dict[str, str]) -> dict[str, Any]:
        """Return the flattened state of these names, in the given order, which is the same on every rank."""
        flattened: dict[str, Any] = {}
        for name in names:
            if name not in self._state or name in excluded:
                continue
            value = self._state[name]
            if type(value) is torch.Tensor:
                flattened[name] = value
                continue
            try:
                flattened.update(flatten_state(resolve_stateful({name: value})))
            except Exception as error:
                log.warning("the state_dict() of %s failed after it was restored", name, exc_info=True)
                excluded[name] = f"its state_dict() failed: {error!r}"
        return flattened

    @property
    def mismatched_names(self) -> list[str]:
        """Top-level names with entries that seem to differ from the saved ones."""
        return sorted({self._top_of(fqn) for fqn in self.proof.mismatched})

    def recheck(self, names: Sequence[str]) -> None:
        """Flatten the state again, and exclude entries that change at every call, such as a clock."""
        other = self._flatten(names, dict.fromkeys(self._excluded, ""))
        for fqn in [*self.proof.mismatched]:
            is_present = fqn in self._flat
            if is_present != (fqn in other) or (is_present and _is_equal(self._flat[fqn], other[fqn]) is False):
                del self.proof.mismatched[fqn]
                self.proof.not_compared[fqn] = "changes at every call of state_dict()"


def compare_objects(
    evidence: LoadEvidence, live: Mapping[str, Any], skip: Mapping[str, str], proof: RestoreProof
) -> None:
    for fqn, data in evidence.objects.items():
        if fqn in skip:
            proof.not_compared[fqn] = skip[fqn]
        elif data is None:
            proof.not_compared[fqn] = "an object of more than 4 MiB"
        elif fqn not in live:
            if any(name.startswith(f"{fqn}.") for name in live):
                proof.not_compared[fqn] = "is taken apart into its entries now"
            else:
                proof.mismatched[fqn] = ABSENT_REASON
        else:
            same = object_matches(live[fqn], data)
            if same is None:
                proof.not_compared[fqn] = f"a {type(live[fqn]).__name__} that cannot be compared"
            elif same:
                proof.objects += 1
            else:
                proof.mismatched[fqn] = f"is {_abbreviate(live[fqn])}, saved was {_abbreviate(_unpickle(data))}"


def object_matches(live: Any, data: bytes) -> bool | None:
    """Return whether an object equals the saved one; ``None`` if its class cannot compare it."""
    try:
        saved = _unpickle(data)
        same = _is_equal(live, saved)
        # NaNs of any class compare as different and have the same archive.
        return True if same is not True and archive_object(live) == archive_object(saved) else same
    except Exception:  # noqa: BLE001 - the object's own comparison or pickling may raise any exception
        return None


def _unpickle(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # the load has checked and unpickled these bytes before


def _is_equal(a: Any, b: Any) -> bool | None:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return tensors_match(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and _all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and _all(map(_is_equal, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:  # noqa: PLR0124 - both are NaN
        return True
    equal = a == b
    if not isinstance(equal, bool):
        equal = bool(equal.all()) if hasattr(equal, "all") else bool(equal)
    kind: Any = type(a)
    tells = kind.__eq__ is not object.__eq__ or kind is not type(b)
    return equal if equal or tells else None


def _all(answers: Iterable[bool | None]) -> bool | None:
    unknown = False
    for answer in answers:
        if answer is False:
            return False
        unknown |= answer is None
    return None if unknown else True


def tensors_match(a: Any, b: Any) -> bool | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    inner_a, inner_b = inner_tensors(a), inner_tensors(b)
    if not inner_a or not inner_b:
        return None
    return list(map(tensor_bytes, inner_a)) == list(map(tensor_bytes, inner_b))


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
