"""``python -m tiered.cli`` is the ``tiered`` command."""

from tiered.cli import run

run()
