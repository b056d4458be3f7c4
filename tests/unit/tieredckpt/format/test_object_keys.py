"""The meaning of object names, including names that other programs wrote."""

import pytest

from tieredckpt.format import object_keys


@pytest.mark.parametrize("number", ["9" * 19, str(1 << 62), "9" * 5000])
def test_keys_with_overlarge_numbers_are_foreign(number):
    """One foreign object name must not break restores or saves."""
    twelve = number.zfill(12)
    assert object_keys.parse_manifest_key(f"j/manifests/{twelve}.000001.0.a.fresh.manifest", "j") is None
    assert object_keys.parse_manifest_key(f"j/manifests/000000000001.{twelve}.0.a.fresh.manifest", "j") is None
    assert object_keys.parse_manifest_key(f"j/manifests/000000000001.000001.{number}.a.fresh.manifest", "j") is None
    assert object_keys.parse_manifest_key(f"j/manifests/000000000001.000001.0.a.from-{number}.manifest", "j") is None
    assert object_keys.parse_shard_object_key(f"j/steps/000000000001/000001.0.a/{twelve}.index", "j") is None
    assert object_keys.parse_group_stem(f"{twelve}.000001.0.a") is None
