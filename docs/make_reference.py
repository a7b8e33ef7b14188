"""Makes docs/reference.md from the docstrings: ``python docs/make_reference.py``; ``--check`` says whether it is out of date.

It reads the sources without importing them, so what it makes depends on no version of Python or torch. The site has a reference
of its own, by mkdocstrings, with the sections of this file: docs/decisions/0047 says why there are both.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"

# Title, module, names (None: its __all__), prefix of the names in the page.
SECTIONS: list[tuple[str, str, list[str] | None, str]] = [
    ("The store", "tiered.store.store", ["TieredStore"], ""),
    ("The store as a mapping", "tiered.tensors.mapping", ["TensorMapping"], ""),
    ("Tables", "tiered.tables.table", ["Table"], ""),
    ("Small tensors", "tiered.small.tensors", ["SmallTensors"], ""),
    ("Embeddings", "tiered.tables.embedding", ["TieredEmbedding"], ""),
    ("Optimizers of embeddings", "tiered.tables.sparse", None, ""),
    ("Several processes", "tiered.store.readers", None, ""),
    ("How a store is opened", "tiered.store.opening", ["Eviction", "Generation"], ""),
    ("Leases", "tiered.store.lease", ["LeaseOfMany", "LeaseOfOne"], ""),
    ("Values", "tiered.types", ["Access", "Owner", "TensorSpec", "Use"], ""),
    ("An order to follow", "tiered.engine.policy", ["Touch"], ""),
    ("Checking a store", "tiered.store.verify", None, ""),
    ("Importing", "tiered.store.importing", None, ""),
    ("Activations", "tiered.store.activations", ["offload_activations"], ""),
    (
        "Statistics",
        "tiered.telemetry",
        [
            *("ActivationStatistics", "FlowStatistics", "LinkStatistics", "MemoryStatistics", "Offloaded"),
            *("StoreStatistics", "TierStatistics"),
        ],
        "",
    ),
    ("Memory that gets tight", "tiered.store.memory_watch", None, ""),
    (
        "Timelines",
        "tiered.telemetry",
        ["Timeline", "TransferEvent", "LeaseEvent", "StallEvent", "SpanEvent", "PoolEvent", "Span"],
        "",
    ),
    ("A plan before the run", "tiered.planning.plan", None, ""),
    ("What computes again", "tiered.planning.dry_run", ["Repeats"], ""),
    ("Machines", "tiered.planning.machine", None, ""),
    ("Models by numbers", "tiered.planning.sources", ["Numbers", "Workload"], ""),
    ("Errors", "tiered.errors", None, ""),
    ("Warnings", "tiered.errors", ["UncommittedWarning", "SharedMemoryWarning", "QuantizedWarning"], ""),
    ("Training: tiered.zero", "tiered.zero", None, "zero."),
    ("Eviction", "tiered.engine.policy", ["LRU", "NextUse"], ""),
    ("Interfaces", "tiered.interfaces", None, ""),
]

INTRODUCTION = """# Reference

Made from the docstrings by `docs/make_reference.py`; a test says when it is out of date. Sizes are bytes, times are seconds,
unless something else is said. What the words mean is in [glossary.md](glossary.md).
"""

WIDTH = 110
"""Signatures that are longer are broken."""
MADE_BY_CALLERS = (
    "TieredDataset",
    *("AdamW", "GradScaler", "Optimizer", "Elementwise", "SGD", "Adam", "Adafactor", "Adagrad"),
    *("RMSprop", "NAdam", "RAdam", "Adamax", "Lion", "Muon", "AdamW8bit", "AdamW4bit", "Init", "offload_activations"),
    *("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"),
)
"""Classes that are not only handed out: the page shows what they are called with."""
SPECIAL = ("__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__")
"""Methods that are shown beside the public ones."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def source_of(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise SystemExit("a module without __all__")


def definition(module: str, name: str) -> Definition:
    """Where ``name`` is defined, in ``module`` or in the module from which that imports it."""
    tree = source_of(module)
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return node
    for node in ast.walk(tree):  # also under TYPE_CHECKING, of what is imported on first use
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return definition(node.module, name)
    raise SystemExit(f"{module} has no {name}")


def docstring(node: ast.AST) -> str:
    text = inspect.cleandoc(ast.get_docstring(node) or "") if isinstance(node, Definition) else ""
    parts = re.split(r"::\n\n((?:(?:    .*)?\n)*(?:    .*))", text)  # what is indented is shown as it is
    for at, part in enumerate(parts):
        if at % 2:
            parts[at] = "\n\n```text\n" + inspect.cleandoc(part).strip("\n") + "\n```"
        else:
            parts[at] = re.sub(r"``(.+?)``", r"`\1`", part) + (":" if at + 1 < len(parts) else "")
    return "".join(parts).strip()


def decorators(node: Definition) -> set[str]:
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, *, method: bool) -> str:
    """``name(arguments) -> result``, without self; one argument a line where it would be long."""
    returns = ast.unparse(node.returns) if node.returns else ""
    if "property" in decorators(node):
        return f"{name}: {returns}"
    arguments = node.args
    if method:
        (arguments.posonlyargs or arguments.args).pop(0)
    flat = ast.unparse(arguments)
    end = f") -> {returns}" if returns and node.name != "__init__" else ")"
    start = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{name}("
    if len(start + flat + end) <= WIDTH:
        return start + flat + end
    return "\n".join([start, *(f"    {line}," for line in separate(arguments)), end])


def separate(arguments: ast.arguments) -> list[str]:
    """Each argument by itself, as it would be written."""
    found, without = [], len(arguments.args) - len(arguments.defaults)
    for at, argument in enumerate(arguments.args):
        default = f" = {ast.unparse(arguments.defaults[at - without])}" if at >= without else ""
        found.append(ast.unparse(argument) + default)
    if arguments.kwonlyargs:
        found.append("*")
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(ast.unparse(argument) + (f" = {ast.unparse(value)}" if value else ""))
    return found


def entries(node: Definition, name: str, depth: int) -> Iterator[str]:
    """``name`` and, of a class, its public members: a heading, the signature, the docstring."""
    head = "#" * depth
    if not isinstance(node, ast.ClassDef):
        yield f"{head} `{name}`\n\n```text\n{signature(node, name, method=False)}\n```\n\n{docstring(node)}"
        return
    bases = ", ".join(ast.unparse(base) for base in node.bases if not ast.unparse(base).startswith("_"))
    members = [member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)]
    made = ""
    if node.name in MADE_BY_CALLERS:
        initializer = next(member for member in members if member.name == "__init__")
        made = f"```text\n{signature(initializer, name, method=True)}\n```"
    parts = [f"{head} `class {name}{f'({bases})' if bases else ''}`", made, docstring(node), fields(node)]
    yield "\n\n".join(part for part in parts if part)
    for member in members:
        if "overload" in decorators(member) or not ast.get_docstring(member):
            continue
        if not member.name.startswith("_") or member.name in SPECIAL:
            where = f"{name}.{member.name}"
            yield f"{head}# `{where}`\n\n```text\n{signature(member, where, method=True)}\n```\n\n{docstring(member)}"


def fields(node: ast.ClassDef) -> str:
    """Annotated and assigned names, as a list, each with the text that stands below it."""
    lines = []
    for at, member in enumerate(node.body):
        if not isinstance(member, ast.AnnAssign | ast.Assign):
            continue
        line = f"- `{ast.unparse(member)}`"
        following = node.body[at + 1] if at + 1 < len(node.body) else None
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            line += ": " + re.sub(r"``(.+?)``", r"`\1`", " ".join(str(following.value.value).split()))
        lines.append(line)
    return "\n".join(lines)


def page() -> str:
    parts = [INTRODUCTION.strip()]
    for title, module, names, prefix in SECTIONS:
        tree = source_of(module)
        parts.append(f"## {title}")
        if title == "Errors":
            block, _, after = (ast.get_docstring(tree) or "").partition("::\n\n")[2].partition("\n\n")
            parts.append("```text\n" + textwrap.dedent(block).strip("\n") + "\n```")
            parts += [re.sub(r"``(.+?)``", r"`\1`", after)] * bool(after)
        for name in public(tree) if names is None else names:
            parts += entries(definition(module, name), prefix + name, 3)
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print("docs/reference.md is out of date: run .venv/bin/python docs/make_reference.py and commit what it writes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
