"""Records a run of `tiered train` in a terminal as docs/images/recording.svg: ``python docs/make_recording.py``.

It runs the program in a terminal of its own, keeps what the terminal showed and when, and draws one screen after the other. The
picture needs no script and no network; where a reader's system asks for less motion it shows the last screen. pyte plays
the terminal (``pip install '.[docs]'``).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from html import escape
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "tiered train my-store --layers 6 --width 256 --heads 4 --dram 16MiB --steps 30 --lr 1e-3"
COLUMNS, MOST_ROWS = 96, 48
LONGEST, LAST, LEAST = 0.8, 5.0, 0.12
"""Seconds: a screen is shown no longer than the first, the last one as long as the second, and shorter ones are left out."""
COLOURS = {"green": "g", "cyan": "c", "blue": "b", "magenta": "m", "red": "r", "brown": "y", "yellow": "y"}
STYLE = """
  text { white-space: pre; fill: #1d2430; } rect { fill: #f6f7f9; stroke: #c5cbd6; } .soft { fill: #687385; }
  .bold { font-weight: bold; } .g { fill: #22753f; } .c { fill: #14707f; } .b { fill: #2f6db5; } .m { fill: #8a4fb0; }
  .r { fill: #b3261e; } .y { fill: #8a5a00; }
  @media (prefers-color-scheme: dark) {
    rect { fill: #171a20; stroke: #4a5261; } text { fill: #e8ebf0; } .soft { fill: #9aa4b4; }
    .g { fill: #6cc795; } .c { fill: #6fd0de; } .b { fill: #74aef0; } .m { fill: #d0a8f0; } .r { fill: #ff8f87; }
    .y { fill: #f0c060; }
  }
"""

Span = tuple[int, str, str]
Screen = tuple[tuple[Span, ...], ...]


def recorded(command: list[str], folder: str) -> list[tuple[float, bytes]]:
    """Run ``command`` in a terminal, in ``folder``; return what it wrote, and when."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", MOST_ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(MOST_ROWS)}
    child = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    written, began = [], time.monotonic()
    while True:
        select.select([ours], [], [])
        try:
            found = os.read(ours, 1 << 16)
        except OSError:  # EIO: no process has the other end
            break
        if not found:
            break
        for place in (f"{folder}/", f"{ROOT}/"):  # of the machine that recorded
            found = found.replace(place.encode(), b"")
        written.append((time.monotonic() - began, found))
    os.close(ours)
    if child.wait() != 0:
        raise SystemExit(f"{shlex.join(command)} ended with {child.returncode}")
    return written


def screen_of(terminal: pyte.Screen) -> Screen:
    """Return the rows of a terminal, each as pieces of one colour."""
    rows = []
    for y in range(terminal.lines):
        spans: list[Span] = []
        for x in range(terminal.columns):
            cell = terminal.buffer[y][x]
            kind = " ".join(filter(None, [COLOURS.get(cell.fg, ""), "bold" if cell.bold else ""]))
            if spans and spans[-1][2] == kind and spans[-1][0] + len(spans[-1][1]) == x:
                spans[-1] = (spans[-1][0], spans[-1][1] + cell.data, kind)
            else:
                spans.append((x, cell.data, kind))
        rows.append(tuple((x, text.rstrip(), kind) for x, text, kind in spans if text.strip()))
    return tuple(rows)


def screens(written: list[tuple[float, bytes]]) -> list[tuple[float, Screen]]:
    """Return what the terminal showed, and for how many seconds."""
    terminal = pyte.Screen(COLUMNS, MOST_ROWS)
    stream = pyte.ByteStream(terminal)
    found: list[tuple[float, Screen]] = []
    for when, data in written:
        stream.feed(data)
        if found and when - found[-1][0] < LEAST:
            found[-1] = (found[-1][0], screen_of(terminal))
        elif not found or found[-1][1] != screen_of(terminal):
            found.append((when, screen_of(terminal)))
    ends = [*(when for when, _ in found[1:]), found[-1][0] + LAST]
    return [
        (LAST if at == len(found) - 1 else min(LONGEST, end - when), screen)
        for at, ((when, screen), end) in enumerate(zip(found, ends, strict=True))
    ]


def drawn(shown: list[tuple[float, Screen]], command: str) -> str:
    """Return the SVG."""
    rows = 2 + max(at + 1 for _, screen in shown for at, row in enumerate(screen) if row)
    width, height = COLUMNS * 8 + 32, rows * 18 + 24
    total = sum(seconds for seconds, _ in shown)
    frames, rules, before = [], [], 0.0
    for at, (seconds, screen) in enumerate(shown):
        start, end = 100 * before / total, 100 * (before + seconds) / total
        last = at == len(shown) - 1
        first = "" if at == 0 else "0% { opacity: 0; } "
        then = "" if last else f" {end:.3f}% {{ opacity: 0; }} 100% {{ opacity: 0; }}"
        rules.append(f"@keyframes f{at} {{ {first}{start:.3f}% {{ opacity: 1; }}{then} }}")
        style = f"opacity: {int(last)}; animation: f{at} {total:.2f}s step-end infinite"
        texts = [
            f'<text x="{16 + x * 8}" y="{28 + (y + 1) * 18}" class="{kind}" textLength="{8 * len(text)}">{escape(text)}</text>'
            for y, row in enumerate(screen)
            for x, text, kind in row
        ]
        before += seconds
        frames.append(f'<g class="frame" style="{style}">{"".join(texts)}</g>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13" role="img" '
            'aria-labelledby="title desc">',
            f'<title id="title">A terminal: {escape(command)}</title>',
            '<desc id="desc">The progress of a training, and its summary.</desc>',
            "<style>",
            STYLE,
            *rules,
            "@media (prefers-reduced-motion: reduce) { .frame { animation: none !important; } }",
            "</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            f'<text x="16" y="28" class="soft">$ {escape(command)}</text>',
            *frames,
            "</svg>\n",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default=ROOT / "docs" / "images" / "recording.svg", type=Path, help="default: %(default)s")
    parser.add_argument("--command", default=COMMAND, help="default: %(default)s")
    options = parser.parse_args()
    name, *arguments = shlex.split(options.command)
    with tempfile.TemporaryDirectory() as folder:
        shown = screens(recorded([sys.executable, "-m", name, *arguments], folder))
    options.out.write_text(drawn(shown, options.command))
    print(f"{options.out}: {len(shown)} screens, {sum(seconds for seconds, _ in shown):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
