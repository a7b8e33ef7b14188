"""``tiered generate``: let a model in a store go on with a prompt."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from tiered.cli.arguments import add_json, add_model, add_store, command, count, fraction, positive, seed, size
from tiered.cli.spelling import Spelling

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands
    from tiered.cli.generate.conversation import Conversation
    from tiered.cli.generate.models import Sampling, StoredModel
    from tiered.cli.generate.summary import GenerationSummary
    from tiered.cli.stop import StopRequest

__all__ = ["add_parser"]

DESCRIPTION = """\
Go on with a prompt: the text is printed as it is made, then what a token took on stderr. The model is one that
tiered import has put into the store, or tiered train; it may be larger than memory, and its folder is not needed. The
store is opened for reading, which any number of processes may do at once. By default the most likely token is taken
each time; what the model's generation_config.json says of drawing tokens and of penalties is not used. With --keep
the conversation is kept in the store, which one process at a time may do, and the next prompt goes on from it; a run
that is stopped leaves it as it was before. Where the model has a chat template, a prompt is a message in it (--raw:
the text as it is).

With --chat you talk to the model at the terminal, a line at a time, or give it the lines of stdin. Ctrl-C stops an
answer, and the conversation goes on from what there is of it; Ctrl-D ends it. --keep NAME keeps it after each answer.
"""

EXAMPLES = """\
examples:
  tiered import Llama-3.2-1B/ llama/      once
  tiered generate llama/ --prompt 'The sea is' --dram 2GiB
  tiered generate llama/ --prompt 'The sea is' --tokens 100 --temperature 0.8 --top-p 0.95 --seed 7
  tiered generate llama/ --prompts questions.txt --stop $'\\n'      the answers to all lines, together
  tiered generate llama/ --prompt 'The sea is' --keep sea
  tiered generate llama/ --prompt ', and the sky' --keep sea
  tiered generate llama/ --chat --keep sea
  tiered ls llama/                        lists the conversations that are kept
  tiered generate llama/ --forget sea
"""

EARLIER = Spelling({"--dir": "STORE", "--name": "--model"})

TOKENS, TOKENS_OF_CHAT = 64, 1024


def add_parser(commands: Commands) -> None:
    """Add ``generate`` to the commands."""
    parser = command(commands, "generate", "generate text with a model in a store", DESCRIPTION, EXAMPLES, EARLIER)
    add_store(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="the text to go on with")
    what.add_argument("--prompts", metavar="FILE", help="texts, one a line, all together ('-': stdin), but for empty lines")
    what.add_argument("--chat", action="store_true", help="talk to the model at the terminal")
    what.add_argument("--forget", metavar="CHAT", help="delete the conversation that is kept by this name")
    of_chat = f"with --chat {TOKENS_OF_CHAT}"
    parser.add_argument("--tokens", metavar="N", type=count, help=f"tokens of an answer at most (default: {TOKENS}, {of_chat})")
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be given several times"
    )
    parser.add_argument("--dram", metavar="SIZE", type=size, help="host memory of the store (default: half of what is free)")
    add_model(parser, "the model's name, where the store has several")
    parser.add_argument("--raw", action="store_true", help="give the model the prompt as it is, not in its chat template")
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
    if parsed.keep is not None and parsed.prompts is not None:
        parser.error("--keep: a conversation has one prompt at a time: give --prompt or --chat")
    if parsed.forget is not None and (parsed.keep is not None or parsed.json is not None):
        parser.error("--forget deletes a conversation, and answers nothing: leave out --keep and --json")
    if parsed.keep == "":
        parser.error("--keep: a conversation has a name that is not empty")
    if parsed.chat and parsed.json is not None:
        parser.error("--json is of one answer, or of several: give --prompt or --prompts")
    refuse_unwritable(parsed.json)
    if parsed.forget is not None:
        return _forgotten(parsed)
    from tiered.cli.generate.summary import GenerationSummary, describe
    from tiered.cli.stop import Stopped

    try:
        done = _done(parsed)
    except Stopped as stopped:
        left = "" if parsed.keep is None else f"; the conversation {parsed.keep!r} is as it was before this prompt"
        print(f"tiered: stopped{left}", file=sys.stderr)
        return stopped.exit_code
    if not isinstance(done, GenerationSummary):
        return done
    if parsed.json != "-":
        print(describe(done), file=sys.stderr)
    write_report(parsed.json, done.as_json())
    return 0


def _forgotten(parsed: argparse.Namespace) -> int:
    from tiered import TieredStore
    from tiered.integrations.kept import forget_cache

    with TieredStore.open(parsed.folder, dram=parsed.dram, paths=parsed.paths, existing="must") as store:
        forget_cache(store, parsed.forget)
        store.commit()
    print(f"tiered: the conversation {parsed.forget!r} is deleted", file=sys.stderr)
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


def _done(parsed: argparse.Namespace) -> GenerationSummary | int:
    """Generate, or have the conversation of --chat; returns the summary, or the exit code of the conversation."""
    from tiered.cli.generate.chat import chat
    from tiered.cli.generate.models import Sampling
    from tiered.cli.generate.trained import UpdatesPending
    from tiered.cli.stop import StopRequest

    with StopRequest() as stop, ExitStack() as stack:
        prompts = [] if parsed.chat else _prompts(parsed)
        stop.check()
        began = time.perf_counter()
        access = "read" if parsed.keep is None else "write"
        _refuse_folder_of_a_model(parsed.folder)
        try:
            model = _opened(parsed, access, stack)
        except UpdatesPending:  # of a training that was stopped; nothing is committed here
            stack.close()
            model = _opened(parsed, "write", stack)
        stop.check()
        conversation = _conversation(parsed, model)
        tokens = parsed.tokens or (TOKENS_OF_CHAT if parsed.chat else TOKENS)
        sampling = Sampling(tokens, parsed.temperature, parsed.top_p or 1.0, parsed.seed or 0)
        if not parsed.chat:
            return _generated(parsed, prompts, model, conversation, sampling, stop, began)
        return chat(model, conversation, sampling, parsed.stop)


def _opened(parsed: argparse.Namespace, access: str, stack: ExitStack) -> StoredModel:
    """Open the store, to be closed with ``stack``, and its model. Raises MisuseError for a store without one, and as models do.
    """
    from tiered import MisuseError, StoreLocked, TieredStore
    from tiered.cli.generate.trained import TrainedModel, is_trained
    from tiered.integrations.kept import only_model

    try:
        store = TieredStore.open(parsed.folder, dram=parsed.dram, paths=parsed.paths, access=access)
    except StoreLocked as error:
        if parsed.keep is None:
            raise
        raise MisuseError(f"{error}; or leave out --keep, which writes to the store") from error
    stack.enter_context(closing(store))
    if is_trained(store, parsed.model):
        if parsed.keep is not None:
            raise MisuseError("--keep works with imported models only, and this one is of tiered train: leave it out")
        return TrainedModel(store)
    _refuse_without_transformers()
    from tiered.cli.generate.models import ImportedModel

    model = ImportedModel(store, parsed.model or only_model(store))
    if not model.tokenizer:
        print("tiered: note: the store keeps no tokenizer.json of this model: each byte is a token", file=sys.stderr)
    return model


def _conversation(parsed: argparse.Namespace, model: StoredModel) -> Conversation:
    """Return the conversation that prompts are of, and say how the model is given them."""
    from tiered.cli.generate.conversation import Conversation
    from tiered.cli.generate.models import ImportedModel

    template = None if parsed.raw else model.template()
    if parsed.keep is not None and isinstance(model, ImportedModel):
        found = Conversation.kept(model, template, parsed.keep)
    else:
        found = Conversation.in_memory(model, template)
    if found.templated:
        told = "what you say is a message" if parsed.chat else "the prompt is a message"
        print(f"tiered: note: {told} in the model's chat template (--raw: the text as it is)", file=sys.stderr)
    elif parsed.chat:
        print("tiered: note: without a chat template: what you say is text that the model goes on with", file=sys.stderr)
    return found


def _generated(
    parsed: argparse.Namespace, prompts: list[str], model: StoredModel, conversation: Conversation, sampling: Sampling,
    stop: StopRequest, began: float,
) -> GenerationSummary:  # fmt: skip
    from tiered import MisuseError
    from tiered.cli.generate.answers import Answers
    from tiered.cli.generate.live import Display
    from tiered.cli.generate.summary import GenerationSummary

    given, kept = [conversation.prompt(prompt) for prompt in prompts], len(conversation.tokens)
    for number, prompt in enumerate(given, 1):
        which = "the prompt" if parsed.prompts is None else f"prompt {number}"
        room = model.room(prompt, which, kept)
        if room < sampling.tokens:
            mend = f"lower --tokens {sampling.tokens} to at most {room}"
            raise MisuseError(f"{model.told_room(prompt, which, kept)}: {mend}")
    opened = time.perf_counter() - began
    with Display(sys.stdout, sys.stderr, shown=parsed.json != "-") as display:
        answers = Answers.of(model, given, parsed.stop, sampling.tokens, display, stop)
        resumed = conversation.resumed(given[0]) if parsed.keep is not None else {}
        model.generate(given, answers, sampling, **resumed)
        answers.end("length")
        if len(prompts) > 1:
            display.listed(zip(prompts, (answer.text for answer in answers.all), strict=True))
    if parsed.keep is not None:
        conversation.keep(resumed, prompts[0], given[0], answers.all[0])
    weights, routed = model.sizes
    return GenerationSummary(
        model.name, answers.all, opened, answers.first, answers.rest, weights, routed,
        model.store.statistics().tiers[0].capacity, model.experts(), kept=parsed.keep is not None,
    )


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
