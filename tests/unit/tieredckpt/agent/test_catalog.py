import threading

import pytest

from tieredckpt.agent.catalog import Catalog
from tieredckpt.durable.open import open_store
from tieredckpt.errors import DurableRefusedError, TierUnavailableError
from tieredckpt.settings import DurableSettings


class Away:
    """A store that is away until told otherwise, and counts who asks."""

    def __init__(self, store, error=TierUnavailableError):
        self._store, self._error = store, error
        self.url = store.url
        self.asked = 0
        self.patience_s = []
        self.back = False

    def list(self, prefix, *, patience_s):
        self.asked += 1
        self.patience_s.append(patience_s)
        if not self.back:
            raise self._error("away")
        return self._store.list(prefix)


@pytest.fixture
def directory(tmp_path):
    url = f"file://{tmp_path}"
    store = open_store(url, DurableSettings(url=url))
    yield store
    store.close()


@pytest.mark.parametrize("error", [TierUnavailableError, DurableRefusedError])
def test_the_ranks_of_a_node_wait_for_one_failure_together(directory, error):
    store, now = Away(directory, error), [100.0]
    catalog = Catalog(store, "job", clock=lambda: now[0])
    failures = []

    def ask():
        with pytest.raises(error, match="away"):
            catalog.listing()
        failures.append(1)

    ranks = [threading.Thread(target=ask) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(failures) == 8
    assert store.asked == 1
    store.back = True
    now[0] += 6
    assert catalog.listing().manifests == {}


def test_a_listing_has_an_end(directory):
    store = Away(directory)
    store.back = True
    Catalog(store, "job").listing()
    assert max(store.patience_s) <= 60
