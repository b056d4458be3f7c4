import sys

from integration.hyperpod.operator.command import main

sys.exit(main())
