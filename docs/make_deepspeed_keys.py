"""Writes the tables of keys in docs/from_deepspeed.md from ``tiered.integrations.deepspeed.table``: ``python
docs/make_deepspeed_keys.py``; ``--check`` says whether the page is out of date."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tiered.integrations.deepspeed.table import ALIASES, GROUPS, Key, Verdict

PAGE = Path(__file__).resolve().parent / "from_deepspeed.md"
BEGIN, END = "<!-- made by docs/make_deepspeed_keys.py -->", "<!-- up to here -->"

TITLES = {
    Verdict.HONOURED: ("Honoured", "what it does here"),
    Verdict.UNNEEDED: ("Not needed", "why not"),
    Verdict.REFUSED: ("Refused", "why, and what to do"),
}


def why_of(key: Key) -> str:
    why = re.sub(r'"\w+": \{[^}]*\}', r"`\g<0>`", key.why)
    if key.allowed:
        values = ", ".join(f"`{json.dumps(value)}`" for value in key.allowed)
        why += f" ({values}; other values are refused: {key.otherwise.removeprefix(key.why).lstrip(':; ')})"
    if key.verdict is Verdict.REFUSED:
        harmless = [f"`{json.dumps(value)}`" for value in key.off if value != {}]
        harmless += [f"`{key.switch.removeprefix('*.')}` that is false"] if key.switch else []
        why += f" (fine: {', '.join(harmless)})" if harmless else ""
        why += f". With all below it: `{'`, `'.join(key.inner)}`" if key.inner else ""
    return why


def rows_of(keys: Iterable[Key]) -> list[str]:
    """Return a row for each reason, with all keys that have it."""
    paths: dict[str, list[str]] = {}
    for key in keys:
        paths.setdefault(why_of(key), []).append(f"`{key.path}`")
    return [f"| {', '.join(mine)} | {why} |" for why, mine in paths.items()]


def made() -> str:
    """Return the tables: each group of keys, in it each verdict."""
    parts = []
    for title, mine in GROUPS.items():
        parts.append(f"### {title}")
        for verdict, (name, column) in TITLES.items():
            rows = rows_of(key for key in mine if key.verdict is verdict)
            if rows:
                parts.append("\n".join([f"| {name.lower()} | {column} |", "|---|---|", *rows]))
    others = [f"| `{name}` | `{key}` |" for name, key in ALIASES.items()]
    parts.append("\n".join(["### Other names", "", "| name | is |", "|---|---|", *others]))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    page = f"{before}{BEGIN}\n\n{made()}\n\n{END}{rest.partition(END)[2]}"
    if not parser.parse_args().check:
        PAGE.write_text(page)
    elif text != page:
        print("docs/from_deepspeed.md is out of date: run .venv/bin/python docs/make_deepspeed_keys.py and commit it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
