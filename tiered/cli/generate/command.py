"""``tiered generate``: let a model in a store go on with a prompt."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_json, add_model, add_store, command, count, fraction, positive, seed, size
from tiered.cli.spelling import Spelling

if TYPE_CHECKING:
    from tiered import TieredStore
    from tiered.cli.arguments import Commands
    from tiered.cli.generate.live import Display
    from tiered.cli.generate.models import ImportedModel
    from tiered.cli.generate.summary import GenerationSummary
    from tiered.cli.stop import StopRequest

__all__ = ["add_parser"]

DESCRIPTION = """\
Go on with a prompt: the text is printed as it is made, then what a token took on stderr. The model is one that
tiered import has put into the store; it may be larger than memory, and its folder is not needed. The store is
opened for reading, which any number of processes may do at once. By default the most likely token is taken each time;
what the model's generation_config.json says of drawing tokens and of penalties is not used. With --keep the
conversation is kept in the store, which one process at a time may do, and the next prompt goes on from it; a run that
is stopped leaves it as it was before. The prompt is given to the model as it is, without a chat template.
"""

EXAMPLES = """\
examples:
  tiered import Llama-3.2-1B/ llama/      once
  tiered generate llama/ --prompt 'The sea is' --dram 2GiB
  tiered generate llama/ --prompt 'The sea is' --tokens 100 --temperature 0.8 --top-p 0.95 --seed 7
  tiered generate llama/ --prompts questions.txt --stop $'\\n'      the answers to all lines, together
  tiered generate llama/ --prompt 'The sea is' --keep chat
  tiered generate llama/ --prompt ', and the sky' --keep chat
"""

EARLIER = Spelling({"--dir": "STORE", "--name": "--model"})


def add_parser(commands: Commands) -> None:
    """Add ``generate`` to the commands."""
    parser = command(commands, "generate", "generate text with a model in a store", DESCRIPTION, EXAMPLES, EARLIER)
    add_store(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="the text to go on with")
    what.add_argument("--prompts", metavar="FILE", help="texts to go on with, one a line, all together ('-': those of stdin)")
    parser.add_argument("--tokens", metavar="N", type=count, default=64, help="tokens to make at most (default: %(default)s)")
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be given several times"
    )
    parser.add_argument("--dram", metavar="SIZE", type=size, help="host memory of the store (default: half of what is free)")
    add_model(parser, "the model's name, where the store has several")
    parser.add_argument("--keep", metavar="CHAT", help="keep the conversation by this name; go on with it where there is one")
    parser.add_argument(
        "--temperature", metavar="T", type=fraction, default=0.0, help="draw tokens at random; lower is likelier (default: 0)"
    )
    parser.add_argument("--top-p", metavar="P", type=positive, help="with --temperature: draw from the likeliest share P only")
    parser.add_argument("--seed", metavar="N", type=seed, help="with --temperature: of the random numbers (default: 0)")
    add_json(parser)
    parser.set_defaults(run=_run, memory_mend="lower --dram or --tokens")


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.output import refuse_unwritable, write_report

    parser = parsed.parser
    if not parsed.temperature and (parsed.top_p is not None or parsed.seed is not None):
        parser.error("--top-p and --seed are for drawing tokens at random: give --temperature, too")
    if parsed.top_p is not None and parsed.top_p > 1:
        parser.error(f"--top-p: {parsed.top_p:g} is not a share, above 0 and at most 1")
    if "" in parsed.stop:
        parser.error("--stop: a text that ends the answer is not empty")
    if parsed.keep is not None and parsed.prompt is None:
        parser.error("--keep: a conversation has one prompt at a time: give --prompt")
    if parsed.keep == "":
        parser.error("--keep: a conversation has a name that is not empty")
    refuse_unwritable(parsed.json)
    from tiered.cli.generate.summary import describe
    from tiered.cli.stop import Stopped, StopRequest

    try:
        with StopRequest() as stop:
            summary = _generated(parsed, stop)
    except Stopped as stopped:
        left = "" if parsed.keep is None else f"; the conversation {parsed.keep!r} is as it was before this prompt"
        print(f"tiered: stopped{left}", file=sys.stderr)
        return stopped.exit_code
    if parsed.json != "-":
        print(describe(summary), file=sys.stderr)
    write_report(parsed.json, summary.as_json())
    return 0


def _prompts(parsed: argparse.Namespace) -> list[str]:
    """Return the texts to go on with. Raises MisuseError for a file that has none, or cannot be read."""
    from tiered import MisuseError

    if parsed.prompt is not None:
        return [parsed.prompt]
    try:
        contents = sys.stdin.buffer.read() if parsed.prompts == "-" else Path(parsed.prompts).read_bytes()
    except OSError as error:
        raise MisuseError(f"cannot read the prompts in {parsed.prompts}: {error.strerror}") from error
    found = [line for line in os.fsdecode(contents).splitlines() if line.strip()]
    if not found:
        raise MisuseError(f"--prompts {parsed.prompts} has no lines: write one prompt on each")
    return found


def _generated(parsed: argparse.Namespace, stop: StopRequest) -> GenerationSummary:
    from tiered import TieredStore
    from tiered.cli.generate.live import Display

    _refuse_without_transformers()
    prompts = _prompts(parsed)
    stop.check()
    began = time.perf_counter()
    access = "read" if parsed.keep is None else "write"
    _refuse_folder_of_a_model(parsed.folder)
    store = TieredStore.open(parsed.folder, dram=parsed.dram, paths=parsed.paths, access=access)
    try:
        with Display(sys.stdout, sys.stderr, shown=parsed.json != "-") as display:
            return _made(parsed, prompts, store, display, stop, began)
    finally:
        store.close()


def _made(
    parsed: argparse.Namespace, prompts: list[str], store: TieredStore, display: Display, stop: StopRequest, began: float
) -> GenerationSummary:
    from tiered.cli.generate.answers import Answer, Answers
    from tiered.cli.generate.models import ImportedModel, Sampling
    from tiered.cli.generate.summary import GenerationSummary
    from tiered.integrations.kept import only_model
    from tiered.integrations.transformers.experts import expert_statistics

    model = ImportedModel(store, parsed.model or only_model(store))
    stop.check()
    if not model.tokenizer:
        print("tiered: note: the store keeps no tokenizer.json of this model: each byte is a token", file=sys.stderr)
    conversation = None if parsed.keep is None else _Conversation(model.model, store, parsed.keep)
    if conversation is None or not conversation.tokens:
        given = [model.text.encode(prompt) for prompt in prompts]
    else:
        given = [conversation.tokens + model.text.encode_more(parsed.prompt)]
    for number, prompt in enumerate(given, 1):
        which = "the prompt" if parsed.prompts is None else f"prompt {number}"
        _refuse_prompt(model, prompt, parsed.tokens, which, 0 if conversation is None else len(conversation.tokens))
    opened = time.perf_counter() - began
    made = [Answer(len(prompt), model.text.another(), model.ends, parsed.stop) for prompt in given]
    answers = Answers(made, parsed.tokens, store, display, stop)
    sampling = Sampling(parsed.tokens, parsed.temperature, parsed.top_p or 1.0, parsed.seed or 0)
    model.generate(given, answers, sampling, **({} if conversation is None else conversation.resumed(given[0])))
    answers.end("length")
    if len(made) > 1:
        display.listed(zip(prompts, (answer.text for answer in made), strict=True))
    if conversation is not None:
        conversation.commit(given[0] + made[0].tokens)
    weights, routed = model.sizes
    return GenerationSummary(
        model.name, made, opened, answers.first, answers.rest, weights, routed,
        store.statistics().tiers[0].capacity, expert_statistics(model.model), kept=conversation is not None,
    )


class _Conversation:
    """A conversation that is kept in the store: its tokens, and what the model has computed of them."""

    def __init__(self, model: Any, store: TieredStore, name: str) -> None:
        from tiered import MisuseError
        from tiered.integrations.transformers import TieredCache

        kept = name in TieredCache.kept(store)
        self._cache = TieredCache.open(model, store, name=name) if kept else TieredCache(model, store, name=name)
        if len(self._cache.tokens) > 1:
            raise MisuseError(f"the cache {name!r} has {len(self._cache.tokens)} sequences, and a conversation has one")
        self.tokens: list[int] = self._cache.tokens.flatten().tolist()

    def resumed(self, ids: list[int]) -> dict[str, Any]:
        """Return the arguments of ``generate`` that go on from what is computed."""
        import torch

        from tiered.integrations.transformers.kv_model import ARGUMENT

        self._cache.reuse(torch.tensor([ids], dtype=torch.int64, device="cpu"))
        return {ARGUMENT: self._cache}

    def commit(self, ids: list[int]) -> None:
        """Keep all tokens so far."""
        import torch

        self._cache.commit(torch.tensor([ids], dtype=torch.int64, device="cpu"))


def _refuse_folder_of_a_model(folder: str) -> None:
    """Raise MisuseError for a model's own folder in place of a store's."""
    from tiered import MisuseError

    if (Path(folder) / "config.json").is_file() and not any(Path(folder).glob("manifest.*")):
        raise MisuseError(
            f"{folder} is the folder of a model, and no store: tiered import {folder} STORE puts it into one"
        )


def _refuse_without_transformers() -> None:
    """Import it, which takes seconds; or raise MisuseError."""
    from tiered import MisuseError

    try:
        from tiered.integrations.transformers import quietly
    except ImportError as error:
        raise MisuseError("generate needs transformers: pip install '.[hf]' in a clone of tiered") from error
    quietly()


def _refuse_prompt(model: ImportedModel, prompt: list[int], tokens: int, which: str, kept: int) -> None:
    """Raise MisuseError for a prompt that the model cannot go on with; ``which``: names it; ``kept``: tokens of it that are a
    conversation's."""
    from tiered import MisuseError

    if not prompt:
        raise MisuseError(f"{which} has no tokens: give it some text")
    if max(prompt) >= model.vocabulary:
        raise MisuseError(f"the tokenizer has token {max(prompt)}, and the model only {model.vocabulary}: they do not match")
    longest = model.positions
    if longest is not None and len(prompt) + tokens > longest:
        told = f", {kept} of them kept by --keep" if kept else ""
        mend = f"lower --tokens {tokens} to at most {longest - len(prompt)}"
        if len(prompt) >= longest:
            mend = "begin another conversation" if kept else "shorten it"
        raise MisuseError(f"the model has {longest} positions, and {which} is {len(prompt)} tokens long{told}: {mend}")
