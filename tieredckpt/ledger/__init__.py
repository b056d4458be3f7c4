"""What happens to a run, written down by every process of it, a line an event. Never imports torch."""

from tieredckpt.ledger.reading import Read, read_ledger
from tieredckpt.ledger.writer import LEDGER, Ledger, LedgerWriter, NullLedger, ledger_from_environ

__all__ = ["LEDGER", "Ledger", "LedgerWriter", "NullLedger", "Read", "ledger_from_environ", "read_ledger"]
