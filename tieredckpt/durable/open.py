from tieredckpt.durable.store import ObjectStore
from tieredckpt.errors import UsageError
from tieredckpt.settings import DurableSettings


def open_store(url: str, settings: DurableSettings) -> ObjectStore:
    raise UsageError(f"{url} {settings}")
