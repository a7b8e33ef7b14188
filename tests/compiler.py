"""A C compiler for builds whose speed nobody measures."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

__all__ = ["quick_compiler"]


def quick_compiler(folder: Path) -> str:
    """Return the path of a program in ``folder``, for ``CC``: the compiler that there is, which optimises nothing. setup.py
    asks for -O3 after what CFLAGS say, and that is two thirds of a build."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    program = folder / "cc"
    program.write_text(
        f'#!/bin/sh\nfor one; do shift; [ "$one" = -O3 ] && one=-O0; set -- "$@" "$one"; done\nexec {compiler} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)
