import hypothesis

# How long one example takes says more about the machine than about the code.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

pytest_plugins = [
    "tests.support.zygote",
    "tests.support.agents",
    "tests.support.ranks",
    "tests.support.clusters",
    "tests.support.fixtures_s3",
    "tests.support.hosts",
    "tests.support.nothing_left",
    "tests.support.workers",
]
