"""Looks through a built site for what a browser would load from elsewhere: ``python docs/site/check.py build/site``.

A page may link to other sites. It may load nothing from them: no script, style, font, picture or frame, in HTML, CSS or SVG.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADED = {
    **dict.fromkeys(("audio", "embed", "iframe", "script"), ("src",)),
    **dict.fromkeys(("img", "source", "video"), ("src", "srcset", "poster")),
    **dict.fromkeys(("image", "use"), ("href", "xlink:href")),
    "object": ("data",),
}
NOT_LOADED = {"canonical", "prev", "next", "alternate"}
"""``rel`` of link elements that name pages."""
FOREIGN = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
CSS = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


class Loads(HTMLParser):
    """Collects the addresses that a page loads from other sites."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        names = LOADED.get(tag, ())
        if tag == "link" and not set(values.get("rel", "").split()) & NOT_LOADED:
            names = ("href",)
        self.found += [f"<{tag} {name}={values[name]}>" for name in names if FOREIGN.match(values.get(name, ""))]
        self.found += CSS.findall(values.get("style", ""))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.found += CSS.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def loads(path: Path) -> list[str]:
    """Return what ``path`` would load from other sites."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        return CSS.findall(text)
    parser = Loads()
    parser.feed(text)
    return parser.found


def main() -> int:
    site = Path(sys.argv[1])
    files = [path for path in sorted(site.rglob("*")) if path.suffix in (".html", ".css", ".svg")]
    foreign = [f"{path.relative_to(site)}: {what}" for path in files for what in loads(path)]
    pages = sum(path.suffix == ".html" for path in files)
    print("\n".join([*foreign, f"{site}: {pages} pages, {len(foreign)} loads from elsewhere; open {site}/index.html"]))
    return 1 if foreign or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
