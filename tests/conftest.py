import hypothesis

# How long one example takes says more about the machine than about the code. Most examples are for the night.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.register_profile("push", deadline=None, max_examples=30)
hypothesis.settings.load_profile("push")

pytest_plugins = [
    "tests.support.forked_starts",
    "tests.support.zygote",
    "tests.support.agents",
    "tests.support.ranks",
    "tests.support.clusters",
    "tests.support.fixtures_s3",
    "tests.support.hosts",
    "tests.support.nothing_left",
    "tests.support.workers",
]
