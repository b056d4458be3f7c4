"""The ledger's line for a fault that is about to be made."""

from __future__ import annotations

from elastic.inject.record import Injected
from tieredckpt.ledger import events, ledger_from_environ


def tell(what: Injected) -> None:
    """Just before it happens; where no ledger is kept, nothing."""
    ledger_from_environ().write(
        events.Injected(
            at=what.at,
            kind=what.injection.kind.value,
            epoch=what.epoch,
            node=what.node,
            local_rank=what.local_rank,
            rank=what.rank,
            step=what.step,
            words=f"{what.injection.name}: {what.injection}",
        )
    )
