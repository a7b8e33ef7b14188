"""Filesystems that tests mount for themselves, as root: small ones, and ones without O_DIRECT."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@contextmanager
def mounted(where: Path, *words: str) -> Iterator[Path]:
    where.mkdir()
    done = subprocess.run(["mount", *words, str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield where
    finally:  # lazily: also where a failed test still has files open there
        subprocess.run(["umount", "--lazy", str(where)], check=True)


@contextmanager
def small_ext4(tmp_path: Path, nbytes: int) -> Iterator[Path]:
    """An ext4 filesystem of ``nbytes`` in a file."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(nbytes)
    try:
        done = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs mkfs.ext4")
    assert done.returncode == 0, done.stderr
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
        yield disk


@contextmanager
def two_ext4(tmp_path: Path, first: int, second: int) -> Iterator[list[Path]]:
    """Two ext4 filesystems of ``first`` and ``second`` bytes."""
    for name in "xy":
        (tmp_path / name).mkdir()
    with small_ext4(tmp_path / "x", first) as x, small_ext4(tmp_path / "y", second) as y:
        yield [x, y]


def fill(disk: Path) -> None:
    """A neighbour takes all the space that is left."""
    with (disk / "neighbour").open("wb", buffering=0) as file:
        block = bytes(1 << 20)
        while block:
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]


def instead(file: Path, kind: str) -> None:
    """Put something else in the place of a file: a "fifo", "socket", "device" or "folder"."""
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(file.parent, os.O_PATH)
            made.bind(f"/proc/self/fd/{here}/{file.name}")  # a path of a socket has at most 107 characters
            os.close(here)
    elif kind == "device":
        if os.geteuid():
            pytest.skip("making a device needs root")
        os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    else:
        file.mkdir()
