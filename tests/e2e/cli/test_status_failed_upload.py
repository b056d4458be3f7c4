"""``tieredckpt status`` after a failed upload of a step."""

import pytest
import torch

from tieredckpt import Checkpointer

pytestmark = pytest.mark.e2e


def test_failed_upload_is_shown_and_is_a_failure(cli, agent_dir, tmp_path):
    folder = tmp_path / "failing"
    with Checkpointer("tiered://failing", durable=str(folder), durable_every=1) as ckpt:
        ckpt.save({"w": torch.zeros(8)}, 0).wait("durable")
        assert cli("status").code == 0
        folder.rename(tmp_path / "away")
        folder.write_bytes(b"")
        ckpt.save({"w": torch.zeros(8)}, 1).wait()
        assert not ckpt.wait("durable")
        folder.unlink()
        (tmp_path / "away").rename(folder)
        said = cli("status")
        assert said.code == 1
        assert "step 1 is not durable" in said.out
        assert cli("status", "failing", "--cluster").code == 1
        ckpt.save({"w": torch.zeros(8)}, 2).wait("durable")
        assert cli("status").code == cli("status", "failing", "--cluster").code == 0
