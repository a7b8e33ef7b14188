"""Use paged models with other libraries, and with scripts that were written for them.

Each file of ``transformers``, ``accelerate``, ``lightning`` and ``axolotl`` imports that library; ``deepspeed`` imports none.
Nothing below imports these files; ``tiered.zero`` has the names of ``deepspeed``, and imports them when one is used.
"""
