"""``python -m integration.hyperpod.operator``: hyperpod-operator-sim."""

import sys

from integration.hyperpod.operator.sim_cli import main

sys.exit(main())
