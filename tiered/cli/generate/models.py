"""A model of ``transformers`` in a store, as ``tiered generate`` uses it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tiered import TieredStore
from tiered.cli.generate.text import GeneratedText, text_of
from tiered.integrations.kept import TOKENIZER, kept_file
from tiered.zero.checkpoint.beside import refuse_forgotten
from tiered.zero.paging.pager import pager_of

if TYPE_CHECKING:
    from tiered.cli.generate.answers import Answers

__all__ = ["ImportedModel", "Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the most likely one with a ``temperature`` of 0, else drawn from the likeliest ``top_p``."""

    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class ImportedModel:
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
        self._checked: Answers | None = None
        for layer in next((one for one in self.model.modules() if isinstance(one, torch.nn.ModuleList)), ()):
            layer.register_forward_pre_hook(self._check, prepend=True)

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the model's parameters in the store, and of those that belong to experts."""
        units = [unit.plan for unit in pager_of(self.model).units]
        return sum(unit.stored_nbytes for unit in units), sum(unit.stored_nbytes for unit in units if unit.of_expert)

    def generate(self, prompts: Sequence[Sequence[int]], answers: Answers, sampling: Sampling, **more: Any) -> None:
        """Give ``answers`` the tokens that go on with ``prompts``. ``more``: of ``generate()``, such as a cache."""
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
        self._checked = answers
        try:
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
        finally:
            self._checked = None

    def _check(self, layer: Any, inputs: Any) -> None:
        """Stop before a layer, where nothing is under way, rather than anywhere in it."""
        if self._checked is not None:
            self._checked.check()
