pytest_plugins = [
    "tests.support.agents",
    "tests.support.ranks",
    "tests.support.zygote",
    "tests.support.fixtures_s3",
    "tests.support.nothing_left",
]
