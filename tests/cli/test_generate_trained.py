"""``tiered generate`` with a store that ``tiered train`` made: text of a model of bytes, which needs no tokenizer."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.cli.train.trainings import TINY
from tiered.cli.main import main
from tiered.cli.output import UNPRINTABLE, Progress
from tiered.cli.train import run
from tiered.cli.train.model import GPT, Shape, build, go_on
from tiered.cli.train.report import TEMPERATURE, TOP_P

safetensors_torch = pytest.importorskip("safetensors.torch")

SHAPE = Shape(layers=2, width=64, heads=4, context=16)
TOKENS = 40
WRITTEN = 80
"""Bytes at the end of a training whose text is compared: the model sees the second half of what it saw again and again."""


def trained(folder: Path) -> dict[str, object]:
    """Of a training whose store is ``folder``, the report."""
    report = folder.with_suffix(".json")
    assert main(["train", str(folder), *TINY, "--steps", "6", "--lr", "1e-2", "--json", str(report)]) == 0
    return dict(json.loads(report.read_text()))


def in_memory(folder: Path, tmp_path: Path) -> GPT:
    """The model with the weights that an export of the store has, to which all updates are applied."""
    assert main(["export", str(folder), "--out", str(tmp_path / "weights")]) == 0
    (file,) = (tmp_path / "weights").glob("*.safetensors")
    model = build(SHAPE).to_empty(device="cpu").eval()
    missing, unexpected = model.load_state_dict(safetensors_torch.load_file(file), strict=False)
    assert not unexpected
    assert missing in ([], ["head.weight"])
    model.head.weight = model.embed.weight
    return model


class Trained(NamedTuple):
    """A store that no test writes to, the report of its training, and its model."""

    folder: Path
    report: dict[str, object]
    model: GPT


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SAMPLE", WRITTEN)
        report = trained(folder)
    return Trained(folder, report, in_memory(folder, folder.parent))


def likeliest(model: GPT, prompt: bytes, count: int) -> list[int]:
    """Each byte by a forward of all that the model sees."""
    text, window = [*prompt], [*prompt][-SHAPE.context :]
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([window]))[0, -1].argmax()))
            window = text[-SHAPE.context // 2 :] if len(window) == SHAPE.context else [*window, text[-1]]
    return text[len(prompt) :]


def generated(folder: Path, capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["generate", str(folder), "--dram", "1MiB", "--tokens", str(TOKENS), *given, "--json"]) == 0
    shown = capsys.readouterr()
    assert "tokenizer" not in shown.err
    return dict(json.loads(shown.out))


@pytest.mark.parametrize("prompt", ["R", "ROMEO: what light through yonder window"])
def test_bytes_are_those_of_the_model_in_memory(prompt: str, one: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    told = generated(one.folder, capsys, "--prompt", prompt)
    assert told["tokens"] == likeliest(one.model, prompt.encode(), TOKENS)
    assert told["prompt_tokens"] == len(prompt)
    drawn = generated(one.folder, capsys, "--prompt", prompt, "--temperature", "0.8", "--top-p", "0.9", "--seed", "3")
    assert drawn["tokens"] == list(itertools.islice(go_on(one.model, prompt.encode(), 0.8, 0.9, 3), TOKENS))
    assert drawn["tokens"] != told["tokens"]


def test_the_text_of_a_training_is_that_of_the_model_in_memory(one: Trained) -> None:
    """As much of it as there was time for."""
    written = bytes(itertools.islice(go_on(one.model, b"\n", TEMPERATURE, TOP_P, 0), WRITTEN))
    sample = written.decode(errors="replace").translate(UNPRINTABLE)
    assert isinstance(one.report["sample"], str)
    assert len(one.report["sample"]) > 10
    assert sample.startswith(one.report["sample"].rstrip("\N{REPLACEMENT CHARACTER}"))


def test_a_training_that_was_stopped_has_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last updates are applied to what is generated with, and the store stays as it is."""
    stepped = Progress.stepped

    def and_stop(progress: Progress, step: int, *given: object, **options: object) -> None:
        stepped(progress, step, *given, **options)  # type: ignore[arg-type]
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "stepped", and_stop)
    folder = tmp_path / "store"
    assert main(["train", str(folder), *TINY, "--steps", "100", "--lr", "1e-2"]) == 130
    assert "step 4" in capsys.readouterr().err
    monkeypatch.undo()
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("manifest*")}
    expected = likeliest(in_memory(folder, tmp_path), b"ROMEO:", TOKENS)
    assert generated(folder, capsys, "--prompt", "ROMEO:")["tokens"] == expected
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("manifest*")} == before
    assert main(["train", str(folder), "--existing", "resume", "--steps", "6"]) == 0


def test_a_stop_ends_the_text_and_not_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is committed when its model writes."""

    def and_stop(model: GPT, text: Sequence[int], *given: float) -> Iterator[int]:
        for number, byte in enumerate(go_on(model, text, *given)):  # type: ignore[arg-type]
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield byte

    monkeypatch.setattr("tiered.cli.train.run.go_on", and_stop)
    report = trained(tmp_path / "store")
    assert report["steps"] == 6
    assert len(str(report["sample"]).encode(errors="replace")) <= 3 * 5
    assert report["generation"] == 1


def test_several_prompts_a_conversation_and_what_cannot_be(
    one: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, model = one
    (tmp_path / "prompts").write_text("ROMEO:\nJULIET:\n")
    answers = generated(folder, capsys, "--prompts", str(tmp_path / "prompts"))["answers"]
    assert isinstance(answers, list)
    assert [answer["tokens"] for answer in answers] == [likeliest(model, asked, TOKENS) for asked in (b"ROMEO:", b"JULIET:")]

    monkeypatch.setattr(sys, "stdin", io.StringIO("ROMEO:\nJULIET:\n"))
    assert main(["generate", str(folder), "--dram", "1MiB", "--chat", "--tokens", "5"]) == 0
    said: Sequence[int] = []
    expected = ""
    for asked in b"ROMEO:", b"JULIET:":
        made = likeliest(model, bytes([*said, *asked]), 5)
        said = [*said, *asked, *made]
        text = bytes(made).decode(errors="replace")
        expected += text if text.endswith("\n") else f"{text}\n"
    assert capsys.readouterr().out == expected
    assert main(["generate", str(folder), "--prompt", "R", "--keep", "chat"]) == 1
    assert "--keep works with imported models only, and this one is of tiered train: leave it out" in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "R", "--model", "other"]) == 1
    assert "of a model named 'other'" in capsys.readouterr().err
