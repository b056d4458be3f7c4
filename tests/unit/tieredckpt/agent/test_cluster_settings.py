"""Changes of cluster settings that a running agent applies, and its report of the others."""

import pytest

from peerstore.errors import RequestError
from peerstore.shard_records import ShardKey
from peerstore.testing import memory_store
from tieredckpt.agent.cluster_settings import SettingsChange, settings_change

AT_3 = {"enabled": True, "agent": {"budget": "3%"}}


@pytest.mark.parametrize(
    ("now", "fixed", "expected"),
    [
        (AT_3, (), SettingsChange(None, ())),
        ({"enabled": True, "agent": {"budget": "9%"}}, (), SettingsChange("9%", ())),
        ({"enabled": True, "agent": {"budget": "9%"}}, ("budget",), SettingsChange(None, ())),
        ({"enabled": True}, (), SettingsChange("50%", ())),
        ({"enabled": False}, (), SettingsChange(None, ("enabled",))),
        ({"agent": {"budget": "3%", "peers": "off", "tls": "/x"}}, ("tls",), SettingsChange(None, ("agent.peers",))),
    ],
    ids=["the same", "a share", "the command line says it", "no share any more", "switched off", "others"],
)
def test_settings_change_is_computed(now, fixed, expected):
    assert settings_change(AT_3, now, budget="3%", default="50%", fixed=fixed) == expected


def test_smaller_budget_frees_empty_slots_and_keeps_shards():
    with memory_store("64MiB") as store:
        lease = store.lease(ShardKey("job", 0, store.claim("job", "a"), "a", 0, 0), 8 << 20, 2)
        store.reserve("job", 1, 16 << 20, slots=2)
        held = store.status().arena
        assert held.allocated_bytes >= 40 << 20
        store.set_budget("16MiB")
        now = store.status().arena
        assert (now.budget_bytes, now.free_slots) == (16 << 20, 0)
        assert now.allocated_bytes < 10 << 20, "what somebody writes to stays"
        store.set_budget("64MiB")
        assert len(store.reserve("job", 1, 16 << 20, slots=2)) == 2
        with pytest.raises(RequestError, match="keeps nothing"):
            store.set_budget("0")
        store.release(lease.id)
