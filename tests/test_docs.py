"""README.md and docs/*.md: their programs run, their links lead somewhere, the generated part is up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tiered
from tests import programs
from tests.test_layers import TREE
from tiered import zero

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINKED = sorted([*PAGES, *(ROOT / "docs" / "decisions").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
SKIPPED = "Not run in the tests: "
NUMBER = r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)"


OPTIONAL = ("transformers", "peft", "accelerate", "lightning", "trl", "datasets")
"""Libraries that adapters are for. Programs that import one are run where it is installed, and its warnings are not ours."""


@dataclass(frozen=True)
class Block:
    """Python in a page. ``line`` is that of its first line; ``why_not``: why it is not run, empty where it is."""

    line: int
    source: str
    why_not: str

    @property
    def libraries(self) -> list[str]:
        """The optional libraries that the program imports."""
        return [name for name in OPTIONAL if re.search(rf"^\s*(import|from) {name}\b", self.source, re.MULTILINE)]

    @property
    def file(self) -> str:
        """The name that stands alone in its first line (``# pooled.py``): then it is kept, for later ones to import."""
        named = re.match(r"# (\w+\.py)\n", self.source)
        return named[1] if named else ""


def blocks_of(text: str) -> list[Block]:
    """A block is skipped where the paragraph before it says so, and why: for readers, not only for this test."""
    found = []
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        why_not = before.removeprefix(SKIPPED) if before.startswith(SKIPPED) else ""
        found.append(Block(text[: match.start()].count("\n") + 2, match[1], why_not))
    return found


def run(block: Block, page: Path, folder: Path) -> str:
    """What the block prints. A file is only written, ``test_*.py`` also run by pytest."""
    where = f"{page.name}:{block.line}"
    script = folder / (block.file or f"{page.stem}_{block.line}.py")
    script.write_text(block.source if block.file else "\n" * (block.line - 1) + block.source)  # tracebacks show the page's line
    command = [sys.executable, *([] if block.libraries else ["-W", "error"]), str(script)]
    if block.file.startswith("test_"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    elif block.file:
        return ""
    environment = {**programs.ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    common: dict[str, Any] = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    if page.name == "README.md":  # in interpreters of their own
        done = subprocess.run(command, check=False, **common)
    else:
        done = programs.run(command, imported=programs.LIBRARIES if block.libraries else (), **common)
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page.read_text())], ids=lambda page: page.stem)
def test_programs_run(page: Path, tmp_path: Path) -> None:
    """A page's blocks in order, in one folder; each is a program of its own, or a file that later ones import."""
    for block in blocks_of(page.read_text()):
        if not block.why_not and all(find_spec(name) for name in block.libraries):
            printed = run(block, page, tmp_path)
            assert printed or page.name != "README.md", f"{page.name}:{block.line} shows nothing"
            rows = [line for line in printed.splitlines() if line.startswith("| ")]
            assert all(row in page.read_text().splitlines() for row in rows), f"{page.name}:{block.line} prints another table"


def test_the_readmes_programs_are_short() -> None:
    blocks = blocks_of((ROOT / "README.md").read_text())
    assert len(blocks) >= 2
    assert all(len(block.source.splitlines()) <= 25 and not block.why_not for block in blocks)


def test_programs_for_an_own_loop_are_short() -> None:
    programs = [block for block in blocks_of((ROOT / "docs" / "your-own-loop.md").read_text()) if not block.why_not]
    assert len(programs) == 4
    assert all(sum(bool(line.strip()) for line in program.source.splitlines()) < 50 for program in programs)


def test_programs_for_an_own_loop_run_over_three_tiers(tmp_path: Path) -> None:
    page = ROOT / "docs" / "your-own-loop.md"
    for block in blocks_of(page.read_text()):
        if not block.why_not:
            three, found = re.subn(r'dram="(\d)MiB"', r'hbm="\1MiB", device="cpu", dram="12MiB"', block.source)
            assert found
            run(Block(block.line, three, ""), page, tmp_path)


def test_no_line_of_code_is_hidden_from_the_tests() -> None:
    """A fence that is indented, or named otherwise, would not be found above."""
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall(r"```\s*(?:py|python|pycon)\b", text, re.IGNORECASE)) == len(blocks_of(text)), page.name


def test_a_block_is_skipped_only_with_a_reason() -> None:
    text = "a\n\nNot run in the tests: needs a GPU.\n\n```python\n1/0\n```\n\nb\n\n```python\n# x.py\n2\n```\n"
    first, second = blocks_of(text)
    assert (first.line, first.source, first.why_not, first.file) == (6, "1/0\n", "needs a GPU.", "")
    assert (second.line, second.why_not, second.file) == (12, "", "x.py")


def test_a_block_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:7[\s\S]*line 7"):
        run(Block(7, "1/0\n", ""), Path("page.md"), tmp_path)


# Links


def anchors_of(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"^\[\w+\]: (\S+)$", prose, re.MULTILINE):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors_of(found.read_text()), f"{page.name}: {target}"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    """``tiered/io/posix.py`` in a text is a path from the root; what stands for many has a star or capitals."""
    for name in re.findall(r"`((?:tiered|tests|bench|docs|libaio_ext)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_readmes_numbers_stand_in_the_results_that_it_names() -> None:
    text = (ROOT / "README.md").read_text()
    results = dict(re.findall(r"^\[(\w+)\]: (bench/results/\S+)$", text, re.MULTILINE))
    paragraphs = re.split(r"\n\n|\n(?=[-|] ?)", text)  # a row and an item each by themselves
    named = [(paragraph, name) for paragraph in paragraphs for name in set(re.findall(r"\]\[(\w+)\]", paragraph))]
    assert {name for _, name in named} == set(results)
    for paragraph, name in named:
        found = re.findall(NUMBER, (ROOT / results[name]).read_text())
        assert set(re.findall(NUMBER, paragraph)) <= set(found), f"{results[name]}: {paragraph}"


# Tables that the code knows better


def test_the_design_has_the_tree_that_is_enforced() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    for package, files in TREE.items():
        if package == "data":
            continue
        row = re.search(rf"^\| `{('tiered/' + package.replace('.', '/')).rstrip('/')}` \| `([^|]*)` \|", design, re.MULTILINE)
        assert row, package
        assert row[1].split() == [name for name in files if f"{package}.{name}" not in TREE], package


# The generated page


def test_the_reference_is_up_to_date() -> None:
    child = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_reference.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("name", sorted({*tiered.__all__, *(f"zero.{name}" for name in zero.__all__)} - {"zero"}))
def test_the_reference_has_every_public_name(name: str) -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    assert re.search(rf"^#+ `(?:class )?{re.escape(name)}\b", text, re.MULTILINE), name
