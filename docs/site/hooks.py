"""Adds to the site what lies outside of docs/, or is made: mkdocs calls these functions (``hooks`` in mkdocs.yml).

The README is the home page; the results of bench/, CONTRIBUTING.md and CHANGELOG.md are pages; each example is a page with its
source; the reference is a page for each section of docs/make_reference.py, which mkdocstrings fills. A link in a page is
written for the repository, ``../bench/results/x.md``, and is translated to the place that the file has in the site.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
}
REFERENCE = "reference/index.md"
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
INLINE = re.compile(r"(?<!</span>)<code>[^<]*</code>")
LINK = re.compile(r"(?P<open>\]\(|^\[[\w-]+\]: )(?P<target>[^)\s#]+)(?P<rest>#[^)\s]*)?", re.MULTILINE)


def _make_reference() -> ModuleType:
    """Return docs/make_reference.py, whose list of sections the site's reference has, too."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _in_site(path: str) -> str | None:
    """Return the place in the site of a file of the repository, or None where the site does not have it."""
    if path in MOVED:
        return MOVED[path]
    if path == "docs/reference.md":
        return REFERENCE
    if path.startswith("docs/examples/") and path.endswith(".py"):
        return path.removeprefix("docs/").removesuffix(".py") + ".md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.startswith("bench/results/") and path.endswith(".md") else None


def _in_repository(uri: str) -> str:
    """Return the file of the repository that the page at ``uri`` was read from."""
    for path, moved in MOVED.items():
        if uri == moved:
            return path
    return uri if uri.startswith("bench/") else f"docs/{uri}"


def _examples() -> dict[str, str]:
    """Return the pages of the examples, by their place in the site."""
    pages = {}
    for path in sorted((ROOT / "docs" / "examples").glob("*.py")):
        text = f"# {path.name}\n\n`docs/examples/{path.name}`\n\n```python\n{path.read_text()}```\n"
        pages[f"examples/{path.stem}.md"] = text
    return pages


def _defined(path: str) -> str:
    """Return the path of a public name for mkdocstrings, to which ``tiered.zero.page`` alone is the module of that name."""
    shadowed = (ROOT / path.replace(".", "/")).with_suffix(".py").exists()
    return f"{path}.{path.rpartition('.')[2]}" if shadowed else path


def _reference() -> dict[str, str]:
    """Return the pages of the reference, by their place in the site: one for each section."""
    made = _make_reference()
    exported = set(made.public(made.source_of("tiered")))
    pages, rows = {}, []
    for title, module, names, prefix in made.SECTIONS:
        chosen = made.public(made.source_of(module)) if names is None else names
        paths = [_defined(f"tiered.{name}" if name in exported else f"{module}.{name}") for name in chosen]
        text = f"# {title}\n\n" + "\n\n".join(f"::: {path}" for path in paths) + "\n"
        where = f"reference/{_slug(title)}.md"
        pages[where] = text
        links = ", ".join(f"[`{prefix}{name}`][{path}]" for name, path in zip(chosen, paths, strict=True))
        rows.append(f"| [{title}]({posixpath.basename(where)}) | {links} |")
    introduction = "Sizes are bytes, times are seconds, unless something else is said. [Glossary](../glossary.md) of the words."
    table = "\n".join(["| | |", "|---|---|", *rows])
    return {REFERENCE: f"# Reference\n\n{introduction}\n\n{table}\n", **pages}


@cache
def _entries() -> dict[str, str]:
    """Return where the site has an entry of docs/reference.md, by its anchor there: ``class-zeroadamw`` and ``zeropage``."""
    made = _make_reference()
    exported = set(made.public(made.source_of("tiered")))
    found = {}
    for title, module, names, prefix in made.SECTIONS:
        where = f"reference/{_slug(title)}.md"
        found[_anchor(title)] = where
        for name in made.public(made.source_of(module)) if names is None else names:
            path = _defined(f"tiered.{name}" if name in exported else f"{module}.{name}")
            found[_anchor(prefix + name)] = found[_anchor(f"class {prefix}{name}")] = f"{where}#{path}"
    for heading in re.findall(r"^###+ `(.*)`$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE):
        name = heading.removeprefix("class ").partition("(")[0]
        owner, _, method = name.rpartition(".")
        if (place := found.get(_anchor(f"class {name}"))) is not None:  # whose heading may name what the class derives from
            found[_anchor(heading)] = place
        elif (place := found.get(_anchor(f"class {owner}"))) is not None:
            found[_anchor(heading)] = f"{place}.{method}"
    return found


def _anchor(heading: str) -> str:
    """Return the anchor that the repository's host gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def _titles(results: list[str]) -> list[str]:
    """Return the title of each page of results in the navigation: its name without the machine, and with the date where two
    have the same."""
    short = [re.sub(r"(_2core.*|_\d{4}-.*)?\.md$", "", name) for name in results]
    dates = [re.search(r"\d{4}-\d\d-\d\d", name) for name in results]
    return [f"{one}, {date[0]}" if date and short.count(one) > 1 else one for one, date in zip(short, dates, strict=True)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that are lists of files."""
    results = sorted(path.name for path in (ROOT / "bench" / "results").glob("*.md"))
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    lists: dict[str, list[Any]] = {
        "Reference": list(_reference()),
        "Results": [{title: f"bench/results/{name}"} for title, name in zip(_titles(results), results, strict=True)],
        "Examples": ["examples.md", *_examples()],
        "Decisions": [f"decisions/{name}" for name in decisions],
    }

    def filled(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {title: lists.get(title, filled(value)) for title, value in entry.items()}
        return [filled(one) for one in entry] if isinstance(entry, list) else entry

    config.nav = filled(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not have."""
    for path in [*MOVED, *(f"bench/results/{one.name}" for one in (ROOT / "bench" / "results").glob("*.md"))]:
        uri = _in_site(path)
        assert uri is not None
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for uri, text in {**_examples(), **_reference()}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate relative links from the repository to the site."""
    uri = page.file.src_uri
    if uri.startswith(("bench/", "examples/")):
        page.meta["hide"] = ["toc"]  # wide tables and code have its room
    if uri.startswith("reference/"):
        return markdown
    here = posixpath.dirname(_in_repository(uri))

    def translated(found: re.Match[str]) -> str:
        target = found["target"]
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(here, target))
        place = _in_site(path)
        if place is None or files.get_file_from_path(place) is None:
            raise PluginError(f"{_in_repository(uri)}: {target} is not in the site")
        rest = found["rest"] or ""
        if place == REFERENCE and rest:
            if rest[1:] not in _entries():
                raise PluginError(f"{_in_repository(uri)}: {target}{rest} is not in the site")
            place, _, entry = _entries()[rest[1:]].partition("#")
            rest = f"#{entry}" if entry else ""
        return found["open"] + posixpath.relpath(place, posixpath.dirname(uri) or ".") + rest

    pieces, end = [], 0
    for code in CODE.finditer(markdown):
        pieces += [LINK.sub(translated, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(translated, markdown[end:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep options of commands whole: browsers break a line after the hyphens of ``--dram``."""

    def whole(found: re.Match[str]) -> str:
        return OPTION.sub(r'<span class="option">\g<0></span>', found[0])

    return INLINE.sub(whole, html)
