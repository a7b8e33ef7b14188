"""``tiered generate``: let a model in a store go on with a prompt."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_json, add_model, add_store, command, count, fraction, positive, seed, size
from tiered.cli.spelling import Spelling

if TYPE_CHECKING:
    import torch

    from tiered import TieredStore
    from tiered.cli.arguments import Commands
    from tiered.cli.generate.live import Display
    from tiered.cli.generate.summary import GenerationSummary, Pace
    from tiered.cli.generate.text import GeneratedText
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
  tiered generate llama/ --prompt 'The sea is' --keep chat
  tiered generate llama/ --prompt ', and the sky' --keep chat
"""

EARLIER = Spelling({"--dir": "STORE", "--name": "--model"})

AGAIN = 0.5
"""Seconds of which the live line shows the pace, at least."""


def add_parser(commands: Commands) -> None:
    """Add ``generate`` to the commands."""
    parser = command(commands, "generate", "generate text with a model in a store", DESCRIPTION, EXAMPLES, EARLIER)
    add_store(parser)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the text to go on with")
    parser.add_argument("--tokens", metavar="N", type=count, default=64, help="tokens to make at most (default: %(default)s)")
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


def _generated(parsed: argparse.Namespace, stop: StopRequest) -> GenerationSummary:
    from tiered import TieredStore
    from tiered.cli.generate.live import Display

    _refuse_without_transformers()
    stop.check()
    began = time.perf_counter()
    access = "read" if parsed.keep is None else "write"
    _refuse_folder_of_a_model(parsed.folder)
    store = TieredStore.open(parsed.folder, dram=parsed.dram, paths=parsed.paths, access=access)
    try:
        with Display(sys.stdout, sys.stderr, shown=parsed.json != "-") as display:
            return _made(parsed, store, display, stop, began)
    finally:
        store.close()


def _made(
    parsed: argparse.Namespace, store: TieredStore, display: Display, stop: StopRequest, began: float
) -> GenerationSummary:
    import torch

    from tiered.cli.generate.summary import GenerationSummary
    from tiered.cli.generate.text import text_of
    from tiered.integrations.kept import TOKENIZER, kept_file, only_model
    from tiered.integrations.transformers import open_model
    from tiered.integrations.transformers.experts import expert_statistics
    from tiered.zero.checkpoint.beside import refuse_forgotten
    from tiered.zero.paging.pager import pager_of

    name = parsed.model or only_model(store)
    model = open_model(store, name=name)
    refuse_forgotten(pager_of(model), "an answer")
    stop.check()
    contents = kept_file(store, name, TOKENIZER)
    text = text_of(contents, _vocabulary(model))
    if contents is None:
        print("tiered: note: the store keeps no tokenizer.json of this model: each byte is a token", file=sys.stderr)
    conversation = None if parsed.keep is None else _Conversation(model, store, parsed.keep)
    if conversation is None or not conversation.tokens:
        prompt = text.encode(parsed.prompt)
    else:
        prompt = conversation.tokens + text.encode_more(parsed.prompt)
    _refuse_prompt(model, prompt, parsed.tokens, kept=0 if conversation is None else len(conversation.tokens))
    opened = time.perf_counter() - began
    streamer = _Streamer(store, text, display, stop, parsed.tokens)
    torch.manual_seed(parsed.seed or 0)
    ids = torch.tensor([prompt], dtype=torch.int64, device=store.device)
    made = _generate(model, ids, streamer, parsed, {} if conversation is None else conversation.resumed(ids))
    if conversation is not None:
        conversation.commit(made)
    weights, routed = _sizes(model)
    return GenerationSummary(
        name, len(prompt), streamer.tokens, streamer.text, opened, streamer.first, streamer.rest, weights, routed,
        store.statistics().tiers[0].capacity, expert_statistics(model), kept=conversation is not None,
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
        self.commit = self._cache.commit

    def resumed(self, ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of ``generate`` that go on from what is computed."""
        from tiered.integrations.transformers.kv_model import ARGUMENT

        self._cache.reuse(ids)
        return {ARGUMENT: self._cache}


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


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _refuse_prompt(model: Any, prompt: list[int], tokens: int, kept: int) -> None:
    """Raise MisuseError for a prompt that the model cannot go on with; ``kept``: tokens of it that are a conversation's."""
    from tiered import MisuseError

    if not prompt:
        raise MisuseError("the prompt has no tokens: give --prompt some text")
    if max(prompt) >= _vocabulary(model):
        raise MisuseError(f"the tokenizer has token {max(prompt)}, and the model only {_vocabulary(model)}: they do not match")
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and len(prompt) + tokens > longest:
        told = f", {kept} of them kept by --keep" if kept else ""
        mend = f"lower --tokens {tokens} to at most {longest - len(prompt)}"
        if len(prompt) >= longest:
            mend = "begin another conversation" if kept else "shorten --prompt"
        raise MisuseError(f"the model has {longest} positions, and the prompt is {len(prompt)} tokens long{told}: {mend}")


def _generate(
    model: Any, prompt: torch.Tensor, streamer: _Streamer, parsed: argparse.Namespace, more: dict[str, Any]
) -> torch.Tensor:
    import torch

    known = model.generation_config
    # Penalties, stop strings and the like of the checkpoint would act beside what is asked for.
    tokens = {name: getattr(known, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = type(known)(**tokens)
    ends = known.eos_token_id if isinstance(known.eos_token_id, int) else (known.eos_token_id or [0])[0]
    drawn = {"temperature": parsed.temperature, "top_p": parsed.top_p or 1.0, "top_k": 0} if parsed.temperature else {}
    made: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=parsed.tokens,
        do_sample=bool(drawn),
        num_beams=1,
        pad_token_id=ends if known.pad_token_id is None else known.pad_token_id,
        streamer=streamer,
        **drawn,
        **more,
    )
    return made


def _sizes(model: Any) -> tuple[int, int]:
    """Return the bytes of the model's parameters in the store, and of those that belong to experts."""
    from tiered.zero.paging.pager import pager_of

    units = [unit.plan for unit in pager_of(model).units]
    experts = [unit for unit in units if any(p.sliced is not None and p.sliced.rows is None for p in unit.placements)]
    return sum(unit.stored_nbytes for unit in units), sum(unit.stored_nbytes for unit in experts)


class _Streamer:
    """Takes tokens from ``generate()``, which calls ``put`` with the prompt, then with each token."""

    def __init__(self, store: TieredStore, text: GeneratedText, display: Display, stop: StopRequest, wanted: int) -> None:
        from tiered.cli.generate.summary import Pacer

        self._text, self._display, self._stop, self._wanted = text, display, stop, wanted
        self._pacer = Pacer(store)
        self._began = self._shown = self._first = self._last = self._pacer.now(0)
        self.tokens: list[int] = []
        self.text = ""

    @property
    def first(self) -> Pace:
        """What the first token took."""
        return self._first.since(self._began)

    @property
    def rest(self) -> Pace:
        """What the tokens after the first one took."""
        return self._last.since(self._first)

    def put(self, tokens: torch.Tensor) -> None:
        self._stop.check()
        if tokens.dim() > 1:  # the prompt
            return
        from tiered.cli.generate.summary import live_line

        for token in tokens.tolist():
            self.tokens.append(token)
            self._say(self._text.add(token))
        self._last = self._pacer.now(len(self.tokens))
        if len(self.tokens) == 1:
            self._first = self._shown = self._last
        elif self._last.seconds - self._shown.seconds >= AGAIN or len(self.tokens) == self._wanted:
            line = live_line(self._last.since(self._shown), len(self.tokens), self._wanted)
            self._display.numbers(line, len(self.tokens) / self._wanted)
            self._shown = self._last

    def end(self) -> None:
        self._say(self._text.end())

    def _say(self, text: str) -> None:
        self.text += text
        self._display.text(text)
