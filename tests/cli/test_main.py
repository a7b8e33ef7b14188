"""The command line itself: help, errors of usage, and how errors of the library are printed."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

import pytest

from tiered.cli.arguments import Parser, add_paths
from tiered.cli.main import build_parser, main
from tiered.cli.output import counted, rate, rate_unit


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


PARSERS = {parser.prog: parser for parser in parsers(build_parser())}


@pytest.mark.parametrize(("words", "usage"), [([], "usage: tiered "), (["bench"], "usage: tiered bench ")])
def test_without_a_command_the_help_is_printed(words: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(usage)
    assert "examples:" in shown.out
    assert not shown.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "tiered: unknown command 'trian', did you mean train? (help: tiered --help)"),
        (["nonsense"], "tiered: unknown command 'nonsense'; the commands are info, plan, bench, train, "),
        (["bench", "stor"], "tiered bench: unknown command 'stor', did you mean store? (help: tiered bench --help)"),
        (["train", "--layer", "3"], "tiered train: unknown option --layer, did you mean --layers? (help: tiered train --help)"),
        (["train", "st", "--memory", "1GiB"], "tiered train: unknown option --memory, did you mean --dram?"),
        (["train", "st", "--vram=1GiB"], "tiered train: unknown option --vram, did you mean --hbm?"),
        (["train", "--step=3"], "tiered train: unknown option --step, did you mean --steps? "),
        (["generate", "store/", "--promt", "The sea"], "tiered generate: unknown option --promt, did you mean --prompt?"),
        (["ls", "state", "--gen", "7"], "tiered ls: unknown option --gen"),
        (["ls", "--store", "s"], "unknown option --store: STORE is given without an option, as in tiered ls store/ "),
        (["train", "--path", "s"], "unknown option --path: STORE is given without an option, as in tiered train store/ "),
        (["bench", "io", "--path", "/mnt"], "tiered bench io: unknown option --path, did you mean --drive?"),
        (["verify", "state", "other"], "tiered verify: unexpected argument 'other' "),
        (["verify"], "tiered verify: the following arguments are required: STORE "),
        (["train", "--backend", "libiao"], "tiered train: --backend: 'libiao' is none of auto, libaio, "),
        (["train", "--steps", "0"], "tiered train: --steps: '0' is not a whole number from 1 on (help: tiered train --help)"),
    ],
)
def test_a_usage_error_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert says in line
    assert not shown.out


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("info --dir /mnt/nvme --no-measure", "info --drive /mnt/nvme --no-measure"),
        ("bench io --fio --dir=/mnt/nvme", "bench io --fio --drive /mnt/nvme"),
        ("bench store --dir /mnt/nvme", "bench store --drive /mnt/nvme"),
        ("bench step --dir /mnt/nvme --dram 1GiB", "bench step --drive /mnt/nvme --dram 1GiB"),
        ("bench train --dir /mnt/nvme", "bench train --drive /mnt/nvme"),
        ("plan --model my-llama --context 2048 --dir .", "plan my-llama --context 2048 --drive ."),
        ("plan --ranks 1,8 --model my-llama", "plan my-llama --ranks 1,8"),
        ("train --steps 3 --dir my-store --no-prefetch", "train my-store --steps 3 --no-prefetch"),
        ("train --resume --dir 'my store' --steps 100", "train 'my store' --existing resume --steps 100"),
        ("train --resume", "train --existing resume"),
        ("train --resume my-store", "train my-store --existing resume"),
        ("train --dir -", "train ./-"),
        ("generate --dir llama/ --prompt 'The sea is' --name second", "generate llama/ --prompt 'The sea is' --model second"),
        ("generate --prompt=-1 --dir llama/", "generate llama/ --prompt -1"),
        ("generate llama/ --prompt a --name second", "generate llama/ --prompt a --model second"),
        ("import model.safetensors --dir state/", "import model.safetensors state/ --as tensors"),
        ("import --dir state/ --paths /a /b --model llama/", "import llama/ state/ --paths /a /b --as model"),
        (
            "import llama/ --dir state/ --model --name second --quantize int8",
            "import llama/ state/ --as model --model second --quantize int8",
        ),
        (
            "import checkpoints/ --deepspeed --tag step1 --dir state/",
            "import checkpoints/ state/ --as deepspeed --tag step1",
        ),
        ("import llama/ state/ --model", "import llama/ state/ --as model"),
        ("import llama/ state/ --model --verify", "import llama/ state/ --as model --verify"),
    ],
)
def test_an_earlier_spelling_is_told_the_whole_line(words: str, now: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command with an option that it had before; and the corrected line is of today's grammar."""
    assert main(shlex.split(words)) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    expected = shlex.join(["tiered", *shlex.split(now)])
    assert line.endswith(f" written differently now: {expected} (help: tiered {' '.join(command_of(words))} --help)")
    assert not shown.out
    again = build_parser().parse_args(shlex.split(now))
    assert again.parser.prog == " ".join(["tiered", *command_of(words)])


def command_of(words: str) -> list[str]:
    first, second, *_ = words.split()
    return [first, second] if first == "bench" else [first]


def test_every_earlier_spelling_is_tried() -> None:
    """Above, by command."""
    (tried,) = (mark.args[1] for mark in test_an_earlier_spelling_is_told_the_whole_line.pytestmark)  # type: ignore[attr-defined]
    for prog, parser in PARSERS.items():
        assert isinstance(parser, Parser)
        for option in parser.earlier.now if parser.earlier is not None else ():
            assert any(f"tiered {words}".startswith(f"{prog} ") and option in words for words, _ in tried), (prog, option)


def test_an_earlier_spelling_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 tells, with the words that start as many ranks; --resume began there where nothing was committed."""
    around = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--resume", "--dir", "many"]) == 2
    line = "torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 -m tiered train many --existing continue"
    assert f"--resume and --dir are written differently now: {line} (help: " in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--resume", "--dir", "many"]) == 2
    assert not capsys.readouterr().err


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_every_option_is_explained_and_none_is_abbreviated(parser: argparse.ArgumentParser) -> None:
    assert not parser.allow_abbrev
    assert parser.description
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
    assert "(default: None" not in parser.format_help()
    assert max(map(len, parser.description.splitlines())) <= 118


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_one_word_for_one_thing(parser: argparse.ArgumentParser) -> None:
    """STORE is the folder of a store, FOLDER any other folder."""
    for action in parser._actions:
        assert action.metavar not in ("DIR", "PATH"), action
        if action.dest in ("folder", "dir"):
            measures = " bench " in parser.prog or parser.prog.endswith((" info", " plan"))
            assert action.metavar == ("FOLDER" if measures else "STORE")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("name another folder, or existing='overwrite'", "name another folder, or --existing overwrite"),
        ("open with generation=7, or move it", "open with --generation 7, or move it"),
        ("open it without paths=", "open it without --paths"),
        ("which have to be named: paths=['/mnt/a', '/mnt/b']", "which have to be named: --paths /mnt/a /mnt/b"),
        ("named: paths=[\"it's\", 'a, b]']: give", "named: --paths 'it'\"'\"'s' 'a, b]': give"),
        ("have to be named: paths=[...]", "have to be named: --paths FOLDER ..."),
        ("unknown=['a']", "unknown=['a']"),
        ("a smaller dram=; then", "a smaller --dram; then"),
        ("give another name=, existing=\"resume\"", "give another --model, --existing resume"),
        ("it is in use; close it there (access='read' reads beside it)", "it is in use; close it there"),
        ("it is held (dram=3 is too little)", "it is held (--dram 3 is too little)"),
        ("/data/dram=3/x and 'dram=3' stay", "/data/dram=3/x and 'dram=3' stay"),
    ],
)
def test_keyword_arguments_in_errors_are_printed_as_options(message: str, shown: str) -> None:
    parser = Parser(prog="it")
    parser.named = {"name": "--model"}
    for option in "--model", "--existing", "--generation", "--dram":
        parser.add_argument(option)
    add_paths(parser)
    assert parser.in_options(message) == shown


def test_numbers_agree_with_their_nouns() -> None:
    assert [counted(n, "round") for n in (0, 1, 1000)] == ["0 rounds", "1 round", "1,000 rounds"]
    assert counted(2, "pass") == "2 passes"


def test_small_rates_are_in_mb() -> None:
    assert [rate(n) for n in (0, 3e9, 1e7, 9e6, 2e4)] == ["0.00 GB/s", "3.00 GB/s", "0.01 GB/s", "9.00 MB/s", "0.02 MB/s"]
    assert rate_unit(3e9, 0.0) == ("GB/s", 1e-9)
    assert rate_unit(3e9, 4e6) == ("MB/s", 1e-6)
