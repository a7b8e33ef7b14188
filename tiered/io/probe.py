"""Why libaio does not work here, found without importing its backend: a reason is an answer, not an exception."""

from __future__ import annotations

import errno
import os

__all__ = ["libaio_unavailable"]


def libaio_unavailable() -> str | None:
    """Return why ``tiered.io.libaio`` does not work here, in one line with advice, or None. Opens a small ring to find out."""
    try:
        from tiered.io._aio import ffi, lib
    except ImportError as error:
        return (
            f"not built ({error}); install a C compiler and libaio's headers (Debian, Ubuntu: "
            "apt-get install gcc libc6-dev python3-dev libaio-dev), then install tiered again"
        )
    opened = ffi.new("aio_ring **")
    code = -lib.aio_ring_open(1, opened)
    if code == 0:
        lib.aio_ring_close(opened[0])
        return None
    if code == errno.EAGAIN:
        return "all of fs.aio-max-nr is in use on this machine; raise it (sysctl fs.aio-max-nr=1048576)"
    return f"the kernel or container refuses io_setup: {os.strerror(code)} (errno {code})"
