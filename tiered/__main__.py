"""``python -m tiered`` is the ``tiered`` command."""

from tiered.cli import run

run()
