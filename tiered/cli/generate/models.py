"""Models in a store, as ``tiered generate`` uses them; those of ``transformers``, and their chat templates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tiered import MisuseError, TieredStore
from tiered.cli.generate.text import GeneratedText, text_of
from tiered.errors import shown
from tiered.integrations.kept import CHAT_TEMPLATES, TOKENIZER, TOKENIZER_CONFIG, kept_file
from tiered.zero.checkpoint.beside import refuse_forgotten
from tiered.zero.paging.pager import pager_of

if TYPE_CHECKING:
    from tiered.cli.generate.answers import Answers
    from tiered.integrations.transformers.experts import ExpertStatistics

__all__ = ["ChatTemplate", "Computed", "ImportedModel", "Message", "Sampling", "StoredModel"]

Message = dict[str, str]
"""A message of a conversation: its ``role`` and its ``content``."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the most likely one with a ``temperature`` of 0, else drawn from the likeliest ``top_p``."""

    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def within(self, room: int) -> Sampling:
        """Return this for at most so many tokens."""
        return replace(self, tokens=min(self.tokens, room))


class ChatTemplate:
    """How a model was taught to read conversations: the tokens of messages, by the template of a ``tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of ``messages``, after which the answer comes. Raises MisuseError where the template refuses them,
        and where jinja2 is missing."""
        try:
            made = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except ImportError as error:
            raise MisuseError(
                f"the chat template of this model needs jinja2 ({' '.join(str(error).split())}): pip install -U jinja2, or "
                "give --raw, for the prompt as it is"
            ) from error
        except Exception as error:  # a template is a program, and raises what it likes
            why = shown(" ".join(str(error).split()), 300)
            raise MisuseError(
                f"the chat template of this model does not take this ({why}): --raw gives the prompt as it is"
            ) from error
        tokens: list[int] = made["input_ids"]
        return tokens


class Computed(Protocol):
    """What a model has computed of a conversation."""

    def resumed(self, ids: list[int]) -> dict[str, Any]:
        """Return the arguments of ``generate`` that go on from what is computed of ``ids``."""

    def keep(self, given: Mapping[str, Any], ids: list[int]) -> None:
        """Keep what was computed with the arguments ``given``; ``ids``: all tokens so far."""

    def keep_stopped(self, given: Mapping[str, Any], ids: list[int]) -> None:
        """Keep it of a generation that somebody stopped."""


class StoredModel(ABC):
    """A model in a store that goes on with tokens. ``positions``: the most tokens that it can be given (None: any number);
    ``ends``: those that end a text."""

    name: str
    store: TieredStore
    model: Any
    vocabulary: int
    positions: int | None
    text: GeneratedText
    ends: Collection[int]

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], answers: Answers, sampling: Sampling, **more: Any) -> None:
        """Give ``answers`` the tokens that go on with ``prompts``. ``more``: what ``Computed.resumed`` returned."""

    @abstractmethod
    def computed(self) -> Computed:
        """Return what keeps in memory what the model has computed, from one prompt to the next."""

    def template(self) -> ChatTemplate | None:
        """Return the chat template that the store keeps of the model; None where there is none."""
        return None

    def experts(self) -> ExpertStatistics | None:
        """Return what was counted of experts; None for a model without them."""
        return None

    def room(self, prompt: Sequence[int], which: str = "the prompt", kept: int = 0) -> int:
        """Return how many tokens the model can make after ``prompt``. Raises MisuseError where it can make none; ``which``
        names the prompt, of whose tokens ``kept`` are a conversation's."""
        if not prompt:
            raise MisuseError(f"{which} has no tokens: give it some text")
        if max(prompt) >= self.vocabulary:
            raise MisuseError(f"the tokenizer has token {max(prompt)}, and the model only {self.vocabulary}: they do not match")
        if self.positions is None:
            return 1 << 40
        if len(prompt) >= self.positions:
            mend = "begin another conversation" if kept else "shorten it"
            raise MisuseError(f"{self.told_room(prompt, which, kept)}: {mend}")
        return self.positions - len(prompt)

    def told_room(self, prompt: Sequence[int], which: str, kept: int) -> str:
        """Describe how many positions there are, and how long a prompt is."""
        told = f", {kept} of them kept by --keep" if kept else ""
        return f"the model has {self.positions} positions, and {which} is {len(prompt)} tokens long{told}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the model's parameters in the store, and of those that belong to experts."""
        units = [unit.plan for unit in pager_of(self.model).units]
        return sum(unit.stored_nbytes for unit in units), sum(unit.stored_nbytes for unit in units if unit.of_expert)

    def stops_between(self, layers: Iterable[torch.nn.Module]) -> None:
        """Have ``generate`` notice between two of these layers, where nothing is under way, that somebody asked to stop."""
        for layer in layers:
            layer.register_forward_pre_hook(self._check, prepend=True)

    _answers: Answers | None = None

    @contextmanager
    def _making(self, answers: Answers) -> Iterator[None]:
        """Make ``answers`` within the block."""
        self._answers = answers
        try:
            yield
        finally:
            self._answers = None

    def _check(self, layer: Any, inputs: Any) -> None:
        if self._answers is not None:
            self._answers.check()


class ImportedModel(StoredModel):
    """The model that ``tiered import`` has put into a store under ``name``. ``tokenizer``: whether the store has its own."""

    def __init__(self, store: TieredStore, name: str) -> None:
        from tiered.integrations.transformers import open_model

        self.store, self.name = store, name
        self.model: Any = open_model(store, name=name)
        refuse_forgotten(pager_of(self.model), "an answer")
        config = self.model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        contents = kept_file(store, name, TOKENIZER)
        self.tokenizer = contents is not None
        self.text: GeneratedText = text_of(contents, self.vocabulary)
        ends = self.model.generation_config.eos_token_id
        self.ends: Collection[int] = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        self.stops_between(next((one for one in self.model.modules() if isinstance(one, torch.nn.ModuleList)), ()))

    def computed(self) -> Computed:
        from tiered.integrations.transformers.kv_model import RecentCache

        return RecentCache(self.model)

    def template(self) -> ChatTemplate | None:
        config = kept_file(self.store, self.name, TOKENIZER_CONFIG) or b""
        if b'"chat_template"' not in config and all(kept_file(self.store, self.name, one) is None for one in CHAT_TEMPLATES):
            return None
        from tiered.integrations.transformers import open_tokenizer

        tokenizer = open_tokenizer(self.store, name=self.name)
        return ChatTemplate(tokenizer) if tokenizer.chat_template else None

    def experts(self) -> ExpertStatistics | None:
        from tiered.integrations.transformers.experts import expert_statistics

        return expert_statistics(self.model)

    def generate(self, prompts: Sequence[Sequence[int]], answers: Answers, sampling: Sampling, **more: Any) -> None:
        def ended(ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
            return torch.tensor(answers.take(ids[:, -1].tolist()), dtype=torch.bool, device=ids.device)

        known = self.model.generation_config
        # Penalties, stop strings and the like of the checkpoint would act beside what is asked for.
        tokens = {name: getattr(known, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.model.generation_config = type(known)(**tokens)
        padding = next(iter(self.ends), 0) if known.pad_token_id is None else known.pad_token_id
        longest = max(map(len, prompts))
        rows = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
        torch.manual_seed(sampling.seed)
        with self._making(answers):
            self.model.generate(
                torch.tensor(rows, dtype=torch.int64, device=self.store.device),
                attention_mask=torch.tensor(mask, dtype=torch.int64, device=self.store.device),
                max_new_tokens=sampling.tokens,
                do_sample=bool(drawn),
                num_beams=1,
                pad_token_id=padding,
                stopping_criteria=[ended],
                **drawn,
                **more,
            )
