"""Command line of the HyperPod demo."""

import argparse
import sys
from pathlib import Path

from elastic.errors import ElasticError
from integration.hyperpod.demo import main

parser = argparse.ArgumentParser(prog="make demo-hyperpod", description=main.__doc__)
parser.add_argument("--json", action="store_true", help="Print JSON.")
parser.add_argument("--keep", type=Path, help="Keep the demo's files in this folder.")
given = parser.parse_args()
try:
    sys.exit(main(as_json=given.json, keep=given.keep))
except ElasticError as error:
    sys.exit(f"{parser.prog}: {error}")
