"""The node agent as its DaemonSet starts it, with the values that Kubernetes would insert."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

import integration.hyperpod
from integration.hyperpod.job_manifest import ARENA_DIRECTORY

FOLDER = Path(integration.hyperpod.__file__).parent / "manifests"
REPOSITORY = FOLDER.parents[2]


def daemon_pod():
    document = yaml.safe_load((FOLDER / "node-agent" / "daemonset.yaml").read_text(encoding="utf-8"))
    return document["spec"]["template"]["spec"]


def agent_command(directory, config, labels):
    """Return the container's command with local paths and any free ports."""
    (container,) = daemon_pod()["containers"]
    put = {
        ARENA_DIRECTORY: str(directory),
        "/etc/tieredckpt/cluster": str(config),
        "/etc/tieredckpt/pod/labels": str(labels),
        "$(POD_IP)": "127.0.0.1",
        "$(NODE_NAME)": "ip-10-0-0-1",
        ":9464": ":0",
        ":7070": ":0",
    }
    words = list(container["args"])
    for name, value in put.items():
        words = [word.replace(name, value) for word in words]
    assert container["command"] == ["tieredckpt", "agent"]
    return [sys.executable, "-m", "tieredckpt", "agent", *words]


def config_map(folder, **flag):
    """Write a ConfigMap with a key for each field, as it is mounted."""
    folder.mkdir()
    for name, value in flag.items():
        (folder / name).write_text(f"{value}\n")
    return folder


def plugged(folder, environ=os.environ):
    """Return an environment in which the platform's entry point is found."""
    info = folder / "manifest_agent-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: manifest-agent\nVersion: 1\n")
    points = (
        "[tieredckpt.platforms]\nhyperpod = integration.hyperpod.cluster.tiered_storage_config:cluster_settings_from\n"
    )
    (info / "entry_points.txt").write_text(points)
    path = os.pathsep.join(filter(None, (str(folder), str(REPOSITORY), environ.get("PYTHONPATH", ""))))
    return {**environ, "PYTHONPATH": path}
