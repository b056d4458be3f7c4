import os

import hypothesis

# No deadline: an example's duration depends on the machine. Most examples run only in the nightly run.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.register_profile("push", deadline=None, max_examples=20)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10)
hypothesis.settings.load_profile("push")

# torch's store resolves the name of each client in its serving thread. A lost packet would block all ranks for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
for _name in [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_", "PET_"))]:
    del os.environ[_name]  # tests that run in a scheduler's job start jobs of their own

pytest_plugins = [
    "tests.support.forked_starts",
    "tests.support.zygote",
    "tests.support.agents",
    "tests.support.ranks",
    "tests.support.clusters",
    "tests.support.fixtures_s3",
    "tests.support.hosts",
    "tests.support.leak_checks",
    "tests.support.workers",
]
