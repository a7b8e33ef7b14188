"""Where answers of ``tiered generate`` end, and the answers to several prompts together."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests.cli.test_generate import DRAM, PROMPT, UNIT, in_memory, llama, quiet
from tiered.cli.generate.text import ByteText
from tiered.cli.main import main
from tiered.integrations.stop_strings import StopStrings

__all__ = ["quiet"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder / "llama")
    assert main(["import", str(folder / "llama"), str(folder / "store"), "--unit", UNIT]) == 0
    return folder / "store"


def generated(store: Path, capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", str(store), "--dram", DRAM, "--tokens", "24", *given, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("strings", "pieces", "shown", "found"),
    [
        (["ab"], ["xa", "b", "c"], ["x", "", ""], True),
        (["ab"], ["xa", "c", "a"], ["x", "ac", "", "a"], False),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], True),
        (["bc", "b"], ["ab", "c"], ["a", ""], True),
        (["\n\nUser:"], ["Yes.\n", "\nUs", "ual"], ["Yes.", "", "\n\nUsual"], False),
        ([], ["a", "b"], ["a", "b"], False),
    ],
)
def test_what_may_begin_a_stop_string_waits(strings: list[str], pieces: list[str], shown: list[str], found: bool) -> None:
    stop = StopStrings(strings)
    assert [stop.add(piece) for piece in pieces] + ([stop.end()] if len(shown) > len(pieces) else []) == shown
    assert stop.found == found
    assert found or stop.end() == ""


def test_an_answer_ends_before_a_stop_string(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = generated(store, capsys, "--prompt", PROMPT)
    assert whole["ended"] in ("length", "token")
    at = len(whole["text"]) // 2
    stop = whole["text"][at : at + 2]
    cut = generated(store, capsys, "--prompt", PROMPT, "--stop", "never", "--stop", stop)
    assert cut["ended"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]
    assert len(cut["tokens"]) < len(whole["tokens"])
    assert main(["generate", str(store), "--prompt", PROMPT, "--stop", ""]) == 2
    assert "--stop: a text that ends the answer is not empty" in capsys.readouterr().err


def test_several_prompts_are_one_batch(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the tokens of the model in memory, which is given all of them with padding at the left."""
    prompts = [PROMPT, "and", "the sky is high, and"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n\n")
    ids = [list(prompt.encode()) for prompt in prompts]
    longest, model = max(map(len, ids)), llama().eval()
    rows = torch.tensor([[299] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    expected = model.generate(rows, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=299)
    told = generated(store, capsys, "--prompts", str(tmp_path / "prompts.txt"))
    for answer, row, prompt in zip(told["answers"], expected[:, longest:].tolist(), ids, strict=True):
        until = row.index(299) + 1 if 299 in row else len(row)
        assert answer["tokens"] == row[:until]
        assert answer["prompt_tokens"] == len(prompt)
    assert told["answers"][0]["tokens"] == in_memory(model, ids[0])["greedy"]

    text = told["answers"][1]["text"]
    stopped = generated(store, capsys, "--prompts", str(tmp_path / "prompts.txt"), "--stop", text[3:6])
    assert stopped["answers"][1] | {"ended": ""} != told["answers"][1] | {"ended": ""}
    assert stopped["answers"][1]["text"] == text[: text.index(text[3:6])]
    others = [answer["text"] for answer in told["answers"]]
    assert [answer["text"] for answer in stopped["answers"]] == [one.partition(text[3:6])[0] for one in others]

    class Given(io.StringIO):
        buffer = io.BytesIO("\n".join(prompts).encode())

    monkeypatch.setattr(sys, "stdin", Given())
    assert main(["generate", str(store), "--dram", DRAM, "--tokens", "24", "--prompts", "-"]) == 0
    shown = capsys.readouterr()
    for number, (prompt, other) in enumerate(zip(prompts, others, strict=True), 1):
        assert f"[{number}] {prompt}\n{other}\n" in shown.out
    assert f": {sum(map(len, ids))} tokens of 3 prompts, " in shown.err


def test_prompts_that_cannot_be(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["generate", str(store), "--dram", DRAM]
    (tmp_path / "empty").write_text("\n \n")
    assert main([*here, "--prompts", str(tmp_path / "empty")]) == 1
    assert "has no lines: write one prompt on each" in capsys.readouterr().err
    assert main([*here, "--prompts", str(tmp_path / "none")]) == 1
    assert "cannot read the prompts in" in capsys.readouterr().err
    assert main([*here, "--prompts", "x", "--prompt", "y"]) == 2
    assert main([*here, "--prompts", "x", "--keep", "chat"]) == 2
    assert "--keep: a conversation has one prompt at a time: give --prompt" in capsys.readouterr().err
    (tmp_path / "long").write_text("the sea\n" + "x" * 200)
    assert main([*here, "--prompts", str(tmp_path / "long")]) == 1
    assert "the model has 128 positions, and prompt 2 is 200 tokens long: shorten it" in capsys.readouterr().err


def test_text_of_another_answer_begins_anew() -> None:
    text = ByteText()
    assert text.add(0xC3) == ""
    assert text.another().add(ord("a")) == "a"
    assert text.add(0xA9) == "é"
