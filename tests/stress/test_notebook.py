"""Promise 20 in a notebook, which keeps the last exception with all that its frames refer to.

A kernel trains within the smallest memory that a store takes. An interrupt (SIGINT, as the stop button sends it) ends a cell in
the middle of a step. The next cell calls ``zero.rollback`` and makes two steps. They are bit for bit those of a run that
nothing interrupted.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.quick import quick
from tests.stress.tally import Tally, counts
from tests.test_docs import ROOT, Block, blocks_of
from tests.test_docs import run as run_program

nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel are not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

PROMISE = "20 (an interrupt in a notebook)"
PATIENCE = 150
"""Seconds that a cell may take."""

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from tests.zero.striking import Trainer, innermost_running
trainer = Trainer(Path({folder!r}), {kind!r})
began = time.perf_counter()
loss = trainer.loss(0)  # a variable of the notebook, which keeps the last graph
trainer.step(Trainer.WARM)
seconds = time.perf_counter() - began
trainer.rollback()

def interrupt(*_):
    global where
    where = innermost_running()
    signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGALRM, interrupt)
"""
STRIKE = """
where = None
signal.setitimer(signal.ITIMER_REAL, max(1e-5, {moment} * seconds))
for number in (Trainer.WARM, Trainer.WARM + 1):
    loss = trainer.loss(2 * number)
    loss.backward()
    trainer.step(number)
signal.setitimer(signal.ITIMER_REAL, 0)
"""
RECOVER = """
error = getattr(sys, "last_value", None)
kept = isinstance(error, KeyboardInterrupt)
held = trainer.store.statistics().tiers[0].held
trainer.rollback()
trainer.goes_on()
print([where, kept, held])
"""


@contextmanager
def kernel() -> Iterator[nbclient.NotebookClient]:
    notebook = nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(notebook, timeout=PATIENCE, allow_errors=True, kernel_name="python3")
    with client.setup_kernel():
        yield client


def run(client: nbclient.NotebookClient, source: str) -> tuple[str, str, str]:
    """What a cell prints, what it prints as errors, and the name of the exception that ended it, with its text."""
    cell = nbformat.v4.new_code_cell(source)
    client.nb.cells.append(cell)
    client.execute_cell(cell, len(client.nb.cells) - 1)
    streams = [one for one in cell.outputs if one["output_type"] == "stream"]
    printed, told = ("".join(one["text"] for one in streams if one["name"] == name) for name in ("stdout", "stderr"))
    errors = [f"{one['ename']}: {one['evalue']}" for one in cell.outputs if one["output_type"] == "error"]
    return printed, told, "".join(errors)


@pytest.mark.parametrize("kind", quick(["tight", "tight checkpoint", "tight reentrant"], ["tight"]))
@counts(2, 60)
def test_interrupted_in_a_notebook(tmp_path: Path, kind: str, count: int, tally: Tally) -> None:
    source, places = random.Random(f"{kind} {count}"), Counter[str]()
    holding = ignored = 0
    with kernel() as client:
        assert run(client, BEGIN.format(folder=str(tmp_path / "store"), kind=kind))[::2] == ("", "")
        while places.total() < count:
            _, told, error = run(client, STRIKE.format(moment=source.uniform(0, 1.5)))
            printed, _, problem = run(client, RECOVER)
            assert problem == "", problem
            where, kept, held = ast.literal_eval(printed)
            if where is None:
                continue  # the cell was faster
            if not error and "Exception ignored" in told:
                ignored += 1  # as in each finalizer
                continue
            # IPython's traceback fails where an interrupt struck an instruction without a line, and then it shows that instead.
            shown = error.startswith("KeyboardInterrupt") or "assert isinstance(frame_info.lineno, int)" in told
            assert shown, (where, told, error)
            assert kept, "the kernel keeps no exception"
            place = "in tiered" if where else "in torch or the model"
            tally.count(f"an interrupt {place}", 1)
            places[place] += 1
            holding += held > 0
    print(f"{kind}: {dict(places)}; {holding} tracebacks held memory of the store; Python ignored {ignored} more")


STOP = """
import signal
forwards = []
def stop(*_):
    forwards.append(1)
    if len(forwards) == {at}:
        signal.raise_signal(signal.SIGINT)
hook = model[3].register_forward_pre_hook(stop)
"""


def cells_of_the_page() -> list[str]:
    """Those of docs/notebooks.md: open, train, go back, close."""
    (block, *_) = blocks_of((ROOT / "docs" / "notebooks.md").read_text())
    cells = re.split(r"^# %% .*\n", block.source, flags=re.MULTILINE)[1:]
    assert len(cells) == 4
    return cells


@pytest.mark.parametrize("way", quick(["stopped", "in two kernels"], ["stopped"]))
def test_the_cells_of_the_page_go_on_after_the_stop_button_and_in_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    begin, train, back, end = cells_of_the_page()
    shown = "print([done, [float(p.detach().double().sum()) for p in model.parameters()]])"
    at_once = run_program(Block(1, f"{begin}\n{train}\n{train}\n{shown}\n{end}", ""), Path("notebooks.md"), tmp_path)
    (tmp_path / way).mkdir()
    monkeypatch.chdir(tmp_path / way)
    with kernel() as client:
        assert run(client, begin)[2] == ""
        if way == "stopped":
            assert run(client, STOP.format(at=13)) == ("", "", "")
            _, told, error = run(client, train)
            assert error.startswith("KeyboardInterrupt"), error
            assert "step:" in told, "a bar"
            assert run(client, back) == ("", "", "")
            assert run(client, "print(done); hook.remove()")[0] == "10\n"
            assert run(client, train.replace("done + 20", "20"))[2] == ""
            assert run(client, train)[2] == ""
            assert run(client, shown)[0] == at_once
            assert run(client, end)[2] == ""
        else:
            assert run(client, train.replace("20", "10"))[2] == ""
    if way == "in two kernels":  # the first one died
        with kernel() as client:
            assert run(client, begin)[2] == ""
            assert run(client, begin)[2].startswith("StoreLocked")
            assert run(client, train.replace("20", "30"))[2] == ""
            assert run(client, shown)[0] == at_once
