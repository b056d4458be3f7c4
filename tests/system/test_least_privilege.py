"""The DaemonSet's init container and agent with only the manifest's users and capabilities."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig

import pytest

from tests.support.agents import agent_pid
from tests.support.manifest_agent import agent_command, config_map, daemon_pod, plugged

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to drop it"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)"),
]


def confined_command(container, pod):
    """Return a command prefix that permanently drops to the container's user and capabilities."""
    may = {**pod["securityContext"], **container["securityContext"]}
    user, group = str(may["runAsUser"]), str(may["runAsGroup"])
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in may["capabilities"].get("add", []))])
    limits = [f"--bounding-set={kept}", f"--inh-caps={kept}", "--no-new-privs", "--clear-groups"]
    return ["setpriv", f"--reuid={user}", f"--regid={group}", *limits]


def test_agent_serves_from_a_directory_that_root_created(agent_dir, tmp_path):
    pod = daemon_pod()
    (init,), (agent,) = pod["initContainers"], pod["containers"]
    agent_dir.mkdir(mode=0o755)  # as the kubelet does
    for _ in range(2):  # the second time as after a restart of the pod
        command = [word.replace("/dev/shm/tieredckpt", str(agent_dir)) for word in init["command"]]
        subprocess.run([*confined_command(init, pod), *command], check=True, timeout=200)
        found = agent_dir.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (10001, 10001, 0o700)

    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    (tmp_path / "labels").write_text('topology.kubernetes.io/zone="a"\n')
    config = config_map(tmp_path / "cluster", Mode="Enable", InstanceMemoryAllocationPercentage=2)
    env = plugged(tmp_path / "site", {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"})
    user = confined_command(agent, pod)
    assert agent["securityContext"]["readOnlyRootFilesystem"] is True
    alone = ["unshare", "--mount", "--propagation=private"]
    packages = tmp_path / "packages"  # this environment's packages may be in a private directory
    packages.mkdir()
    env["PYTHONPATH"] += f":{packages}"
    mounted = f"mount --bind {sysconfig.get_paths()['purelib']} {packages} && mount -o remount,bind,ro /"
    closed = [*alone, "sh", "-c", f'{mounted} && exec "$@"', "sh"]
    assert subprocess.run([*closed, "touch", str(tmp_path / "x")], capture_output=True, timeout=200).returncode != 0
    process = subprocess.Popen(
        [*closed, *user, *agent_command(agent_dir, config, tmp_path / "labels")],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert any(" serves " in line for line in process.stderr)
        assert agent_pid(agent_dir) == process.pid
        looking = [sys.executable, "-m", "tieredckpt", "ls", "--json", "--agent-dir", str(agent_dir)]
        ours = subprocess.run([*closed, *user, *looking], capture_output=True, text=True, env=env, timeout=200)
        assert json.loads(ours.stdout) == {"jobs": [], "agent": True, "unreachable_agents": {}}
        other = [*closed, "setpriv", "--reuid=10002", "--regid=10002", "--clear-groups", *looking]
        theirs = subprocess.run(other, capture_output=True, text=True, env=env, timeout=200)
        assert theirs.returncode != 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
