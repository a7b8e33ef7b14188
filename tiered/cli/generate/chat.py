"""``tiered generate --chat``: a conversation at a terminal, or of the lines of stdin."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from tiered import MisuseError
from tiered.cli.generate.answers import Answers
from tiered.cli.generate.live import Display
from tiered.cli.output import counted
from tiered.cli.stop import StopNoted, Stopped, StopRequest

if TYPE_CHECKING:
    from tiered.cli.generate.conversation import Conversation
    from tiered.cli.generate.models import Sampling, StoredModel

__all__ = ["chat"]

ASKS = "> "


def chat(model: StoredModel, conversation: Conversation, sampling: Sampling, stops: Sequence[str]) -> int:
    """Answer one line after the other, until there is none; returns the exit code.

    Ctrl-C ends an answer, which stays in the conversation as far as it came; a second one, before the first is noticed, ends
    the command. SIGTERM ends it after the answer is kept."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(_greeting(conversation), file=sys.stderr)
    code = 0
    for said in _lines(at_terminal):
        try:
            ids = conversation.prompt(said)
            room = model.room(ids, "the conversation", len(conversation.tokens))
        except MisuseError as error:
            if not at_terminal:
                raise
            print(f"tiered: {error}", file=sys.stderr)
            continue
        code = _answer(model, conversation, said, ids, sampling.within(room), stops)
        if code:
            break
    if conversation.name is not None and conversation.tokens:
        print(f"tiered: the conversation {conversation.name!r} is kept: the same command goes on with it", file=sys.stderr)
    return code


def _greeting(conversation: Conversation) -> str:
    ways = "Ctrl-C stops an answer, Ctrl-D ends the conversation."
    if conversation.messages:
        return f"The conversation {conversation.name!r} goes on after {counted(len(conversation.messages), 'message')}. {ways}"
    if conversation.tokens:
        return f"The conversation {conversation.name!r} goes on after {counted(len(conversation.tokens), 'token')}. {ways}"
    return ways


def _answer(
    model: StoredModel,
    conversation: Conversation,
    said: str,
    ids: list[int],
    sampling: Sampling,
    stops: Sequence[str],
) -> int:
    """Answer one message; returns an exit code where the command is to end, else 0."""
    stopped = 0

    def leave(exit_code: int) -> NoReturn:
        raise Stopped(exit_code - 128)

    with StopRequest() as stop, Display(sys.stdout, sys.stderr) as display:
        stop.interrupt_nothing(leave)
        answers = Answers.of(model, [ids], stops, sampling.tokens, display, stop)
        given = conversation.resumed(ids)
        try:
            model.generate([ids], answers, sampling, **given)
            answers.end("length")
        except StopNoted as noted:
            stopped = noted.signum
            answers.end("stopped")
        (answer,) = answers.all
        if answer.tokens:
            conversation.keep(given, said, ids, answer)
    print(_told(answers), file=sys.stderr)
    return 0 if stopped in (0, signal.SIGINT) else 128 + stopped


def _told(answers: Answers) -> str:
    (answer,) = answers.all
    made = counted(len(answer.tokens), "token")
    if not answer.tokens:
        return "(stopped before the first token: the message is not in the conversation)\n"
    seconds = answers.first.seconds + answers.rest.seconds
    why = {"stopped": "stopped after ", "length": "cut off by --tokens after "}.get(answer.ended or "", "")
    return f"({why}{made}, {len(answer.tokens) / seconds:.1f} tokens/s)\n"


def _lines(at_terminal: bool) -> Iterator[str]:
    """Yield what is said, without empty lines. Ctrl-C gives up a line that is being written; SIGTERM raises Stopped."""
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then has a history, and keys that edit
    while True:
        try:
            with StopRequest(patience=0):
                said = input(ASKS) if at_terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        except Stopped as stopped:
            if not at_terminal or stopped.exit_code != 128 + signal.SIGINT:
                raise
            print("\n(Ctrl-D ends the conversation)", file=sys.stderr)
            continue
        if not said and not at_terminal:
            return
        if said.strip():
            yield said.rstrip("\n")
