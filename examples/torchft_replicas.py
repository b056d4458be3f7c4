"""Two replicas with torchft: one is killed, and its successor recovers the state from the other."""

import multiprocessing
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from integration.torchft import TieredTransport

STEPS = 6


def train(replica: int, lighthouse: str, killed_at: int = -1) -> None:
    torch.manual_seed(replica)
    model = torch.nn.Linear(16, 16)
    adam = torch.optim.Adam(model.parameters())

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=2,
        replica_id=f"replica{replica}",
        lighthouse_addr=lighthouse,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
        checkpoint_transport=TieredTransport(),
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
    while manager.current_step() < STEPS:
        if manager.current_step() == killed_at:
            os._exit(1)
        optimizer.zero_grad()
        parallel(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
    print(f"replica {replica}: step {manager.current_step()}, weights {model.weight.double().sum().item():.12f}")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    spawn = multiprocessing.get_context("spawn")
    replicas = [spawn.Process(target=train, args=(0, lighthouse.address()))]
    replicas.append(spawn.Process(target=train, args=(1, lighthouse.address(), 3)))
    for process in replicas:
        process.start()
    replicas[1].join()
    print("replica 1 was killed")
    replicas[1] = spawn.Process(target=train, args=(1, lighthouse.address()))
    replicas[1].start()
    for process in replicas:
        process.join()
    lighthouse.shutdown()
