"""``python -m tiered.cli`` is the ``tiered`` command."""

from tiered.cli.main import run

run()
