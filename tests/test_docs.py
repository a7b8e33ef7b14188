"""README.md and docs/*.md: their programs run, their links lead somewhere, the generated part is up to date."""

from __future__ import annotations

import ast
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
from tests.quick import quick
from tests.test_layers import TREE, USES
from tiered import errors, zero

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINKED = sorted([*PAGES, *(ROOT / "docs" / "decisions").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
SKIPPED = "Not run in the tests: "
TORCHRUN = '"torch.distributed.run"'
FORKED = {
    "import subprocess\n": "from tests import programs as subprocess; subprocess.fork_from_here()\n",
    TORCHRUN: '"tests.cli.train.launched"',
}
"""What is put in the place of what, so that torchrun and its ranks are forked."""
NUMBER = r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)"


OPTIONAL = ("transformers", "peft", "accelerate", "lightning", "trl", "datasets", "tqdm")
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


def run(block: Block, page: Path, folder: Path, *, fresh: bool = False) -> str:
    """What the block prints. A file is only written, ``test_*.py`` also run by pytest. ``fresh``: in an interpreter of its own,
    as what it starts is, too."""
    where, source = f"{page.name}:{block.line}", block.source
    if TORCHRUN in source and not fresh:
        for theirs, ours in FORKED.items():
            assert source.count(theirs) == 1, where
            source = source.replace(theirs, ours)
    script = folder / (block.file or f"{page.stem}_{block.line}.py")
    script.write_text(source if block.file else "\n" * (block.line - 1) + source)  # tracebacks show the page's line
    command = [sys.executable, *([] if block.libraries else ["-W", "error"]), str(script)]
    if block.file.startswith("test_"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    elif block.file:
        return ""
    environment = {**programs.ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    common: dict[str, Any] = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    if fresh:
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
            printed = run(block, page, tmp_path, fresh=page.name == "README.md")
            assert printed or page.name != "README.md", f"{page.name}:{block.line} shows nothing"
            rows = [line for line in printed.splitlines() if line.startswith("| ")]
            assert all(row in page.read_text().splitlines() for row in rows), f"{page.name}:{block.line} prints another table"


FIRST = ("README.md", "quickstart.md", "training.md")
"""The pages that a newcomer reads first, in this order."""


@pytest.mark.parametrize("which", quick(["first screens", "all"], ["first screens"]))
def test_programs_can_be_run_again_and_after_each_other(which: str, tmp_path: Path) -> None:
    """In one folder, as somebody does who tries one after the other; each says what its second start means."""
    pages = [next(page for page in PAGES if page.name == name) for name in FIRST]
    pages += [page for page in PAGES if page not in pages] if which == "all" else []
    ran = 0
    for _ in range(2):
        for page in pages:
            runs = [block for block in blocks_of(page.read_text()) if not block.why_not]
            for block in runs if which == "all" else [block for block in runs if not block.libraries][:2]:
                if all(find_spec(name) for name in block.libraries):
                    run(block, page, tmp_path)
                    ran += 1
    assert ran >= (80 if which == "all" else 10)


def test_programs_say_what_their_second_run_means() -> None:
    """Those that put something into a folder: there is ``existing=`` for it, or the folder does not last."""
    makes = {"page", "from_pretrained", "import_model", "export", "export_merged"}
    seen = 0
    for page in PAGES:
        for block in blocks_of(page.read_text()):
            for call in ast.walk(ast.parse(block.source)) if not block.why_not else ():
                if not isinstance(call, ast.Call):
                    continue
                theirs = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) != "zero"
                if ast.unparse(call.func).rpartition(".")[2] in makes and not theirs:
                    said = any(one.arg == "existing" for one in call.keywords)
                    assert said or 'durability="none"' in block.source, f"{page.name}:{block.line + call.lineno - 1}"
                    seen += said
    assert seen > 30


@pytest.mark.soak
def test_a_program_that_starts_torchrun_runs_as_it_is(tmp_path: Path) -> None:
    pages = [page for page in PAGES if TORCHRUN in page.read_text()]
    assert pages
    for page in pages:
        for block in blocks_of(page.read_text()):
            assert run(block, page, tmp_path, fresh=True) or block.file


def test_the_readmes_programs_are_short() -> None:
    blocks = blocks_of((ROOT / "README.md").read_text())
    assert len(blocks) >= 2
    assert all(len(block.source.splitlines()) <= 25 and not block.why_not for block in blocks)


def test_programs_for_an_own_loop_are_short() -> None:
    programs = [block for block in blocks_of((ROOT / "docs" / "your-own-loop.md").read_text()) if not block.why_not]
    assert len(programs) == 5
    assert all(sum(bool(line.strip()) for line in program.source.splitlines()) < 50 for program in programs)


@pytest.mark.parametrize("number", quick(range(5), [2]))
def test_programs_for_an_own_loop_run_over_three_tiers(number: int, tmp_path: Path) -> None:
    page = ROOT / "docs" / "your-own-loop.md"
    block = [block for block in blocks_of(page.read_text()) if not block.why_not][number]
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


def test_the_list_of_results_has_each() -> None:
    listed = re.findall(r"\]\(\.\./bench/results/([\w.-]+)\)", (ROOT / "docs" / "benchmarks.md").read_text())
    assert sorted(set(listed)) == sorted(path.name for path in (ROOT / "bench" / "results").glob("*.md"))


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
        assert row[1].split() == [f"{name}/" if f"{package}.{name}" in TREE else name for name in files], package


def test_the_design_has_a_package_below_those_that_it_may_import() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    rows = [name.replace("/", ".") for name in re.findall(r"^\| `tiered(?:/([\w/]+))?` \|", design, re.MULTILINE)]
    assert sorted(rows) == sorted(TREE.keys() - {"data"})
    for package in rows:
        above = rows[: rows.index(package)]
        assert "." not in package or package.rpartition(".")[0] in above, package
        used = {use.lstrip("=").split(".")[0] for use in USES.get(package, ())} & set(rows)
        assert used <= set(above), package


def test_what_the_design_names_is_there() -> None:
    """Classes by their names, each `Name` in a `file` in that file, and what the diagrams have beside a file."""
    design = (ROOT / "docs" / "design.md").read_text()
    sources = {path: path.read_text() for path in (ROOT / "tiered").rglob("*.py")}
    everywhere = "\n".join([*sources.values(), *(path.read_text() for path in (ROOT / "tests" / "contracts").glob("*.py"))])
    classes = set(re.findall(r"^ *class (\w+)|^(\w+) = ", everywhere, re.MULTILINE))
    known = {name for pair in classes for name in pair}
    named = set(re.findall(r"`(?:tiered\.)?(_?[A-Z][a-z]\w*)[.(`]", design))
    assert named <= known, sorted(named - known)

    places = re.findall(r"((?:`[\w.]+`(?:, | and |, and )?)+) in `(tiered/[\w/]+\.py)`", design)
    places += re.findall(r"(`[\w.]+`) \(`(tiered/[\w/]+\.py)`\)", design)
    drawn = re.findall(r"^ +([A-Z]\w+\.\w+) +((?:\w+/)*\w+\.py)", design, re.MULTILINE)
    places += [(f"`{name}`", f"tiered/{file}") for name, file in drawn]
    assert len(places) > 70
    wrong = [
        f"{name} in {file}"
        for names, file in places
        for name in re.findall(r"`(?!NAME_)([\w.]+)`", names)
        if not all(re.search(rf"\b{part}\b", (ROOT / file).read_text()) for part in name.split("."))
    ]
    assert not wrong


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


# Errors, pictures, examples, the site


@pytest.mark.parametrize("name", errors.__all__)
def test_troubleshooting_has_every_error(name: str) -> None:
    """Each with what it is and what to do: more than a line."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    (entry,) = re.findall(rf"^### `{name}`\n\n(.*?)(?=^### |\Z)", page, re.DOTALL | re.MULTILINE)
    assert len(entry.split()) >= 20, name


def test_troubleshooting_has_no_error_that_there_is_not() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE)) == set(errors.__all__)


def test_the_pictures_are_up_to_date() -> None:
    """Those of numbers show what bench/results/ says."""
    child = programs.run([sys.executable, str(ROOT / "docs" / "make_pictures.py"), "--check"], capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr


def test_pictures_have_colours_for_light_and_dark_pages_and_load_nothing() -> None:
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    numbers = ("memory-by-size", "time-by-budget", "throughput-by-size")
    for name in (*numbers, "training-step", "lease-and-alias", "store-folder", "recording"):
        assert f"(images/{name}.svg)" in concepts
        text = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
        assert "@media (prefers-color-scheme: dark)" in text
        assert ".line {" not in text or ".line { fill: none !important;" in text  # the dark colours fill what they name
        assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
        assert "/tmp/" not in text


EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
SMALL = {
    "data_loader": ["--samples", "32", "--workers", "1"],
    "deepspeed_cifar": None,  # tests/integrations/deepspeed/test_examples.py
    "deepspeed_gpt": None,
    "expert_weights": ["--experts", "8", "--dram", "2MiB", "--batches", "4"],
    "fine_tune": None,  # it needs a package with a model's weights, and minutes
    "generate": ["--tokens", "3"],
    "kv_pager": ["--conversations", "3", "--tokens", "192", "--dram", "1MiB"],
    "lora": ["--steps", "2"],
    "many_ranks": ["--width", "64", "--steps", "2"],
    "own_loop": ["--size", "512", "--dram", "1MiB", "--rounds", "3"],
    "serve": None,  # tests/integrations/test_serve.py
    "several_drives": ["--layers", "4"],
    "train": ["--layers", "2", "--steps", "2", "--dram", "4MiB"],
}
"""What each example is run with."""
COSTLY = ("lora", "generate", "many_ranks")


def test_examples_are_short_and_listed() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert {path.stem for path in EXAMPLES} == set(SMALL)
    for path in EXAMPLES:
        assert f"(examples/{path.name})" in page
        assert len(path.read_text().splitlines()) <= (130 if path.stem == "serve" else 60), path.name
        assert f"python docs/examples/{path.name}" in path.read_text() or "torchrun" in path.read_text()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in COSTLY else ()) for name in SMALL if SMALL[name] is not None],
)
def test_examples_run(name: str, tmp_path: Path) -> None:
    script = ROOT / "docs" / "examples" / f"{name}.py"
    if missing := [library for library in Block(1, script.read_text(), "").libraries if not find_spec(library)]:
        pytest.skip(f"needs {missing}")
    command = [sys.executable, str(script), *(SMALL[name] or [])]
    if name == "many_ranks":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**programs.ONE_THREAD, "PYTHONPATH": str(ROOT)}
    for _ in range(2):  # the second time with what the first one left
        done = programs.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip()
        if name in ("many_ranks", "train"):
            command[command.index("--steps") + 1] = "3"
        if name == "train":
            command += ["--hbm", "4MiB", "--device", "cpu"]
    if name in ("many_ranks", "train"):  # it went on
        assert re.findall(r"step (\d)", done.stdout) == ["2"]


def test_what_a_page_loads_is_found(tmp_path: Path) -> None:
    """docs/site/check.py, which `make docs` runs."""
    check = ROOT / "docs" / "site" / "check.py"
    clean = '<a href="https://example.org/">a</a><link rel="canonical" href="https://example.org/"><img src="x.svg">'
    (tmp_path / "index.html").write_text(clean)
    command = [sys.executable, str(check), str(tmp_path)]
    assert programs.run(command, capture_output=True, text=True).returncode == 0
    for text in (
        '<script src="https://example.org/x.js"></script>',
        '<link rel="stylesheet" href="//example.org/x.css">',
        "<style>@import 'https://example.org/x.css';</style>",
        '<p style="background: url(https://example.org/x.png)">',
    ):
        (tmp_path / "index.html").write_text(clean + text)
        done = programs.run(command, capture_output=True, text=True)
        assert done.returncode == 1, text
        assert "example.org/x" in done.stdout


@pytest.mark.parametrize("page", [page.name for page in PAGES if page.name not in ("README.md", "reference.md")])
def test_every_page_has_a_place_in_the_site(page: str) -> None:
    places = (ROOT / "mkdocs.yml").read_text()
    assert page == "examples.md" or re.search(rf"^ +- (?:[^:]+: )?{re.escape(page)}$", places, re.MULTILINE)


def test_lists_and_tables_stand_apart() -> None:
    """An empty line stands before each list and after each table: without it the site makes a paragraph, or rows. A table in a
    block of code would stay text."""
    wrong = []
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench" / "results").glob("*.md")):
        before, code = "", False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code ^= line.startswith("```")
            text = before.strip() and not re.match(r"\s*[-*] |\s\s", before) and line.startswith(("- ", "* "))
            if (text and not code) or (before.startswith("|") and line.strip() and not line.startswith("|")):
                wrong.append(f"{path.relative_to(ROOT)}:{number}")
            before = line
    assert not wrong


@pytest.mark.soak
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None:
        pytest.skip("needs what make docs installs: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    wanted = wanted - {"reference.html"} | {"reference/index.html", "index.html", "examples/train.html", "contributing.html"}
    assert wanted <= names
    training = (tmp_path / "site" / "reference" / "training-tiered-zero.html").read_text()
    assert 'id="tiered.zero.page.page"' in training  # the function, and not what else is in the module of its name
    assert "page_filling" not in training
    assert "tier: str | None = None" in (tmp_path / "site" / "reference" / "an-order-to-follow.html").read_text()
    done = subprocess.run([sys.executable, "docs/site/check.py", str(tmp_path / "site")], cwd=ROOT, check=False)
    assert done.returncode == 0
