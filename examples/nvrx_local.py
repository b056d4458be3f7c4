"""Local checkpoints of NVRx on CPUs: run it twice, and the second run continues."""

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

from integration.nvrx import TieredLocalCheckpointManager


class HostState(BasicTensorAwareStateDict):
    """State with tensors on the CPU, which NVRx's own class refuses."""

    def __init__(self, state: dict) -> None:
        self.state_dict, self._is_hollow = state, False

    def restore_tensor_device(self, **_: bool) -> None:
        pass


torch.serialization.add_safe_globals([HostState])
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(16, 16)
adam = torch.optim.Adam(model.parameters())
manager = TieredLocalCheckpointManager("nvrx-local")

last = manager.find_latest()
if last >= 0:
    state, _ = manager.load()
    model.load_state_dict(state.state_dict["model"])
    adam.load_state_dict(state.state_dict["optimizer"])
print(f"rank {dist.get_rank()}: found step {last}")

for step in range(last + 1, last + 4):
    adam.zero_grad()
    model(torch.ones(16)).pow(2).mean().backward()
    adam.step()
    manager.save(HostState({"model": model.state_dict(), "optimizer": adam.state_dict()}), step)
print(f"rank {dist.get_rank()}: saved step {step}")
manager.close()
dist.destroy_process_group()
