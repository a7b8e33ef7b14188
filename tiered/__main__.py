"""``python -m tiered`` is the ``tiered`` command."""

from tiered.cli.main import run

run()
