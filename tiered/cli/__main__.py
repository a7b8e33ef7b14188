"""``python -m tiered.cli`` is the ``tiered`` command."""

import sys

from tiered.cli import main

sys.exit(main())
