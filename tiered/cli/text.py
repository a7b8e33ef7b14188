"""The text that ``tiered train`` learns."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from importlib.resources import as_file, files

import torch

from tiered import MisuseError

__all__ = ["Text", "open_text"]


class Text:
    """A file of bytes to learn, read as needed."""

    def __init__(self, path: str, context: int) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MisuseError(f"cannot read the text {path}: {error.strerror}; name a file with --text") from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise MisuseError(f"the text {path} is not a file; name one with --text")
            if found.st_size <= context:
                what = f"has {found.st_size:,} bytes" if found.st_size else "is empty"
                raise MisuseError(
                    f"the text {path} {what}, a context of {context} needs {context + 1:,}: name a longer one, or "
                    "lower --context"
                )
        except BaseException:
            os.close(self._fd)
            raise
        self.path, self.nbytes, self._context = path, found.st_size, context

    def batch(
        self, size: int, generator: torch.Generator, rank: int = 0, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes at random places and those that follow them: two int64 tensors of shape (size, context). All ``ranks`` draw the
        same places, and each has its part of them."""
        starts = torch.randint(0, self.nbytes - self._context, (ranks * size,), generator=generator)
        rows = []
        for start in starts[rank * size : (rank + 1) * size].tolist():
            row = os.pread(self._fd, self._context + 1, start)
            if len(row) <= self._context:
                raise MisuseError(f"the text {self.path} became shorter while it was read; leave it alone until the end")
            rows.append(torch.frombuffer(bytearray(row), dtype=torch.uint8))
        whole = torch.stack(rows).long()
        return whole[:, :-1], whole[:, 1:]

    def close(self) -> None:
        os.close(self._fd)


def open_text(path: str | None, context: int, stack: ExitStack) -> Text:
    """The text in file ``path``, or that which ships with this; closed with ``stack``. Raises MisuseError."""
    if path is None:
        path = str(stack.enter_context(as_file(files("tiered.data") / "shakespeare.txt")))
    text = Text(path, context)
    stack.callback(text.close)
    return text
