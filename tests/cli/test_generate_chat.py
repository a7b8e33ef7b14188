"""``tiered generate`` with a chat template, and conversations at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests import programs
from tests.cli.test_generate import PROMPT, UNIT, llama, quiet, write_tokenizer
from tests.programs import MODELS, ONE_THREAD
from tiered import TieredStore
from tiered.cli.generate.live import Display
from tiered.cli.main import main
from tiered.cli.output import Progress
from tiered.integrations.transformers import TieredCache, open_tokenizer

__all__ = ["quiet"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<{{ one.role }}>{{ one.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NOTE = "note: the prompt is a message in the model's chat template (--raw: the text as it is)"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores with a model that has a chat template, with one that refuses all, and with none; the model's folders are gone."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, template in ("template", TEMPLATE), ("refusing", TEMPLATE.replace("'system'", "'user'")), ("plain", None):
        llama().save_pretrained(folder / name)
        write_tokenizer(folder / name)
        (folder / name / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        if template is not None:
            (folder / name / "chat_template.jinja").write_text(template)
        assert main(["import", str(folder / name), str(folder / f"{name}-store"), "--unit", UNIT]) == 0
        shutil.rmtree(folder / name)
        found[name] = folder / f"{name}-store"
    return found


def rendered(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{one['role']}>{one['content']}\n" for one in messages) + "<assistant>"


def answers(store: Path, said: list[str], tokens: int) -> list[str]:
    """What the model in memory answers to one message after the other."""
    model, messages, found = llama().eval(), list[dict[str, str]](), []
    with TieredStore.open(store, dram="1MiB", access="read") as opened:
        tokenizer = open_tokenizer(opened)
    for one in said:
        messages.append({"role": "user", "content": one})
        ids = torch.tensor([tokenizer.encode(rendered(messages), add_special_tokens=False)])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def given(store: Path, *options: str) -> list[str]:
    return ["generate", str(store), "--dram", "2MiB", "--tokens", "6", *options]


def test_a_prompt_is_a_message_where_there_is_a_template(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = stores["template"]
    (expected,) = answers(store, [PROMPT], 6)
    assert main(given(store, "--prompt", PROMPT)) == 0
    shown = capsys.readouterr()
    assert shown.out.rstrip("\n") == expected.rstrip("\n")
    assert NOTE in shown.err
    (tmp_path / "prompts").write_text(f"{PROMPT}\n{PROMPT}\n")
    assert main(given(store, "--prompts", str(tmp_path / "prompts"), "--json")) == 0
    assert [one["text"] for one in json.loads(capsys.readouterr().out)["answers"]] == [expected, expected]
    texts = []
    for name, options in ("template", ["--raw"]), ("plain", []), ("plain", ["--raw"]):
        assert main(given(stores[name], "--prompt", PROMPT, *options, "--json")) == 0
        shown = capsys.readouterr()
        assert "template" not in shown.err
        texts.append(json.loads(shown.out)["text"])
    assert len(set(texts)) == 1
    assert texts[0] != expected


def test_a_kept_conversation_has_all_messages(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, said = tmp_path / "store", [PROMPT, "and the sky", "it is deep"]
    shutil.copytree(stores["template"], store)
    for one, expected in zip(said, answers(store, said, 6), strict=True):
        assert main(given(store, "--prompt", one, "--keep", "talk", "--json")) == 0
        assert json.loads(capsys.readouterr().out)["text"] == expected
    assert main(given(store, "--prompt", "x", "--keep", "talk", "--raw")) == 1
    told = capsys.readouterr().err
    assert "the conversation 'talk' was begun with the model's chat template: leave --raw out, or give --keep another" in told
    for _ in range(2):  # one that is begun as a text goes on as one
        assert main(given(store, "--prompt", PROMPT, "--keep", "text", *([] if _ else ["--raw"]))) == 0
        assert "template" not in capsys.readouterr().err


def test_kept_conversations_are_listed_and_deleted(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(stores["template"], store)
    with TieredStore.open(store, dram="2MiB") as opened:
        opened.put("talk/of/somebody", torch.ones(2))  # which is no part of the conversation
        opened.commit()
    for name in ("talk", "text"):
        assert main(given(store, "--prompt", PROMPT, "--keep", name)) == 0
    capsys.readouterr()
    assert main(["ls", str(store), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["conversations"]] == ["talk", "text"]
    before = sum(one["bytes"] for one in found["tensors"])
    assert main(["ls", str(store)]) == 0
    shown = capsys.readouterr().out
    assert "conversation" in shown
    assert "talk/of/somebody" in shown
    assert "/kv/" not in shown
    assert main(["generate", str(store), "--forget", "talk"]) == 0
    assert "the conversation 'talk' is deleted" in capsys.readouterr().err
    assert main(["ls", str(store), "--json"]) == 0
    left = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in left["conversations"]] == ["text"]
    assert before - sum(one["bytes"] for one in left["tensors"]) == found["conversations"][0]["bytes"] > 0
    assert "talk/of/somebody" in [one["name"] for one in left["tensors"]]
    assert main(["generate", str(store), "--forget", "talk"]) == 1
    assert "keeps no conversation named 'talk' (there are: 'text')" in capsys.readouterr().err
    assert main(["generate", str(store), "--forget", "text", "--keep", "talk"]) == 2
    assert "--forget deletes a conversation" in capsys.readouterr().err


def test_what_a_template_refuses_is_one_line(stores: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given(stores["refusing"], "--prompt", PROMPT)) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == (
        "tiered: the chat template of this model does not take this (no system here): --raw gives the prompt as it is"
    )
    without = "import sys; sys.modules['jinja2'] = None; from tiered.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", without, *given(stores["template"], "--prompt", PROMPT)]
    done = programs.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "the chat template of this model needs jinja2 (" in done.stderr.splitlines()[-1]
    assert done.stderr.endswith("): pip install -U jinja2, or give --raw, for the prompt as it is\n")


@pytest.mark.parametrize("keep", [[], ["--keep", "talk"]])
def test_lines_of_stdin_are_a_conversation(
    keep: list[str],
    stores: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, said = tmp_path / "store", [PROMPT, "and the sky", "it is deep"]
    shutil.copytree(stores["template"], store)
    expected = answers(store, said, 6)
    shown = ""
    for lines in (said[:2], said[2:]) if keep else (said,):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n".join(lines) + "\n"))
        assert main(given(store, "--chat", *keep)) == 0
        now = capsys.readouterr()
        shown += now.out
        assert ("the conversation 'talk' is kept: the same command goes on with it" in now.err) == bool(keep)
        assert now.err.count("tokens/s)") == len(lines)
    assert shown.split("\n") == "\n".join([*expected, ""]).split("\n")
    assert main(given(store, "--chat", "--json")) == 2
    assert "--json is of one answer, or of several: give --prompt or --prompts" in capsys.readouterr().err


def test_without_a_template_a_text_goes_on(
    stores: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n and the sky\n"))
    store = stores["plain"]
    assert main(given(store, "--chat")) == 0
    shown = capsys.readouterr()
    assert "without a chat template: what you say is text that the model goes on with" in shown.err
    with TieredStore.open(store, dram="1MiB", access="read") as opened:
        tokenizer = open_tokenizer(opened)
    model, ids, expected = llama().eval(), list[int](), ""
    for one in PROMPT, " and the sky":
        ids += tokenizer.encode(one, add_special_tokens=False)
        all_ = torch.tensor([ids])
        made = model.generate(all_, attention_mask=torch.ones_like(all_), max_new_tokens=6, do_sample=False, pad_token_id=0)
        expected += tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True) + "\n"
        ids = made[0].tolist()
    assert shown.out == expected


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_answer_and_keeps_it(
    signum: int,
    code: int,
    stores: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    shutil.copytree(stores["template"], store)
    text, left = Display.text, [3]

    def and_stop(display: Display, more: str) -> None:
        text(display, more)
        left[0] -= bool(more)
        if more and not left[0]:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(Display, "text", and_stop)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\nand the sky\n"))
    assert main([*given(store, "--chat", "--keep", "talk"), "--tokens", "20"]) == code
    shown = capsys.readouterr()
    assert "(stopped after " in shown.err
    with TieredStore.open(store, dram="2MiB", access="read") as opened:
        note = TieredCache.kept(opened)
    assert note == ["talk"]
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(given(store, "--prompt", "it is deep", "--keep", "talk", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prompt_tokens"] > len("it is deep")


TAKES_THE_TERMINAL = """if True:
    import fcntl, runpy, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    runpy.run_module("tiered", run_name="__main__", alter_sys=True)
"""


class Terminal:
    """A command of ``tiered`` in a terminal of its own: what it shows, and what is typed."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        environment = {**ONE_THREAD, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = programs.Popen(
            [sys.executable, "-c", TAKES_THE_TERMINAL, *command],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, imported=MODELS,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, said: Callable[[str], bool], seconds: float = 120.0, again: str = "") -> str:
        """Return what is shown from here until ``said`` is true of it. Types ``again`` after each second without anything new:
        input() of CPython looks for signals only when it is woken, and a signal may arrive just before it waits."""
        began, now = time.monotonic(), ""
        while not said(now):
            assert time.monotonic() - began < seconds, self.shown + now
            if not select.select([self._master], [], [], 1)[0]:
                self.type(again)
            else:
                try:
                    now += os.read(self._master, 4096).decode(errors="replace")
                except OSError:  # it has ended
                    break
        self.shown += now
        return now

    def close(self) -> int:
        self.until(lambda _: self.process.poll() is not None)
        code = self.process.wait(60)
        os.close(self._master)
        return code


def test_a_conversation_at_a_terminal(stores: dict[str, Path], tmp_path: Path) -> None:
    """It goes on with what is kept. Ctrl-C gives up a line, Ctrl-D ends the conversation."""
    store = tmp_path / "store"
    shutil.copytree(stores["template"], store)
    assert main(given(store, "--prompt", PROMPT, "--keep", "talk")) == 0
    command = [*given(store, "--chat", "--keep", "talk"), "--tokens", "60"]
    terminal = Terminal(command)
    begun = terminal.until(lambda now: now.endswith("> "))
    assert "The conversation 'talk' goes on after 2 messages. Ctrl-C stops an answer, Ctrl-D ends the conversation." in begun
    terminal.type("and the sky\r")
    terminal.until(lambda now: "tokens/s)" in now and now.endswith("> "))
    terminal.type("something that is never sent\x03")
    terminal.until(lambda now: "(Ctrl-D ends the conversation)" in now and now.endswith("> "), again="\x03")
    terminal.type("\x04")
    assert terminal.close() == 0, terminal.shown
    assert "the same command goes on with it" in terminal.shown


def test_a_store_that_is_written_to(stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    shutil.copytree(stores["plain"], store)
    with TieredStore.open(store, dram="2MiB"):
        assert main(given(store, "--prompt", PROMPT, "--keep", "talk")) == 1
        told = capsys.readouterr().err
        assert "; or leave out --keep, which writes to the store" in told
        assert "access=" not in told
        assert main(given(store, "--prompt", PROMPT)) == 0


def test_the_models_that_there_are_are_named(stores: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given(stores["plain"], "--prompt", PROMPT, "--model", "modal")) == 1
    assert "of a model named 'modal': there is 'model'" in capsys.readouterr().err


def test_keys_during_an_answer_are_not_shown(tmp_path: Path) -> None:
    """The rows that are drawn again are as many as were drawn: what the terminal shows of keys, and ^C, would move them."""
    llama(max_position_embeddings=1 << 17, eos_token_id=None).save_pretrained(tmp_path / "endless")
    write_tokenizer(tmp_path / "endless")
    assert main(["import", str(tmp_path / "endless"), str(tmp_path / "store"), "--unit", UNIT]) == 0
    command = [*given(tmp_path / "store", "--chat"), "--tokens", "100000"]
    terminal = Terminal(command)
    terminal.until(lambda now: now.endswith("> "))
    terminal.type("and the sky\r")
    terminal.until(lambda now: "tokens/s" in now)
    terminal.type("keys\x03")
    answered = terminal.until(lambda now: "tokens/s)" in now and now.endswith("> "))
    assert "(stopped after " in answered
    assert "^C" not in answered
    assert "keys" not in answered
    terminal.type("\x04")
    assert terminal.close() == 0, terminal.shown


@pytest.mark.parametrize("shown", [lambda stream: Display(stream, stream), Progress])
def test_a_terminal_shows_keys_again_after_rows_that_are_drawn_again(
    shown: Callable[[TextIO], Display | Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with os.fdopen(master, "wb"), os.fdopen(slave, "w") as stream:
        before = termios.tcgetattr(slave)
        assert before[3] & termios.ECHO
        with suppress(MemoryError), shown(stream):
            assert not termios.tcgetattr(slave)[3] & termios.ECHO
            raise MemoryError
        assert termios.tcgetattr(slave) == before
