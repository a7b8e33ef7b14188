"""What a token takes of a model in a store: bytes of the drive and of a device's link, seconds, and memory.

A token of a dense model uses all weights once, so what memory does not hold is read for each token, and a window of read-ahead
besides; of experts those are read that a token is routed to and that memory does not hold. Reading, sending and computing go on
beside one another, and the slowest of them decides (``docs/generation.md``, with measurements beside it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from tiered.errors import MisuseError
from tiered.integrations.importing import unit_of
from tiered.planning.machine import Machine
from tiered.planning.plan import IN_TRANSIT, OPEN, TABLES
from tiered.store.opening import SMALLEST_DRAM
from tiered.zero.page import smallest_pool
from tiered.zero.paging.units import Limits, Policy, Slicing, divide

__all__ = ["FORMS", "PlannedTokens", "PlannedWeights", "Sequences", "plan_generation", "weights_of"]

WINDOW = 2
"""Units by which read-ahead reads more than what is missing, because it takes memory, too."""
FORMS = {"as it is": None, "int8": 1.0, "int4": 0.5625, "nf4": 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes of a weight in the forms of ``tiered import --quantize``; None: those of the type that it has. NF4 has a byte for 64
weights, and 4 for 256 of these bytes."""
POLICIES = {form: Policy() if nbytes is None else Policy(quantize=form) for form, nbytes in FORMS.items()}  # type: ignore[arg-type]
"""How each form is divided into units."""


@dataclass(frozen=True)
class PlannedWeights:
    """The weights of a model: bytes that each token uses, and those of ``experts``, of which it uses the share ``routed``.

    ``parameters``, ``used``: elements in all, and those that compute for a token. ``cache``: bytes of keys and values of a
    token. ``unit``: bytes of the largest unit, ``expert`` those of an expert of a layer. ``width``: bytes of an element.
    ``least``: the smallest budget with which ``open_model`` takes them after an import, by form."""

    parameters: int
    used: float
    always: float
    experts: float
    routed: float
    cache: int
    unit: int
    width: int
    expert: int = 0
    least: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> float:
        return self.always + self.experts

    def times(self, factor: float) -> PlannedWeights:
        """Return these weights in another form, of so many times the bytes."""
        made = asdict(self) | {name: getattr(self, name) * factor for name in ("always", "experts")}
        return PlannedWeights(**made | {name: round(getattr(self, name) * factor) for name in ("unit", "expert")})

    def used_by(self, sequences: int) -> float:
        """Return the bytes that a token of so many sequences uses; each is routed by itself, and evenly, the worst case."""
        return self.always + self.experts * self.chosen(sequences)

    def leases(self, sequences: int) -> float:
        """Return how many units a token of so many sequences leases."""
        experts = self.experts * self.chosen(sequences) / self.expert if self.expert else 0.0
        return self.always / self.unit + experts

    def chosen(self, sequences: int) -> float:
        return float(1 - (1 - self.routed) ** sequences)


@dataclass(frozen=True)
class Sequences:
    """Say how many ``sequences`` a model goes on with at a time, of how many ``tokens`` each, prompt and answer."""

    tokens: int = 1024
    sequences: int = 1


@dataclass(frozen=True)
class PlannedTokens:
    """A token of each sequence, in weights of one ``form``. Bytes: ``weights`` in all, on the drive; ``read`` of the drive and
    ``sent`` to a device for a token; ``cache``: keys and values of the whole conversation; ``process``: host memory;
    ``smallest``: the smallest budget that works, ``holds``: with which nothing is read. Seconds: ``reading``, ``sending`` and
    ``computing`` beside one another, ``seconds`` the largest of them, ``first`` those of the first token, for which all
    weights are read once and the prompt is computed; 0 without a machine."""

    form: str
    weights: float
    read: float
    sent: float
    cache: int
    process: float
    smallest: int
    holds: float
    reading: float = 0.0
    sending: float = 0.0
    computing: float = 0.0
    first: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.reading, self.sending, self.computing)

    @property
    def limit(self) -> str:
        """What decides: the drive, the link or computing."""
        named = {"computing": self.computing, "the link": self.sending, "the drive": self.reading}
        return max(named, key=lambda name: named[name])


def weights_of(model: nn.Module) -> PlannedWeights:
    """Describe the weights of a model of transformers', which is on the meta device. Raises MisuseError for one without keys
    and values of attention."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise MisuseError("generation is planned for a model of transformers: name a folder with its config.json, or org/name")
    text = config.get_text_config()
    count = next((n for n in (_number(text, name) for name in EXPERTS) if n), 0)
    chosen = _number(text, "num_experts_per_tok") or _number(text, "top_k_experts")
    routed = chosen / count if count and chosen else 1.0
    always = experts = elements = expert_elements = 0
    layers: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer, of_experts, _ = name.partition(".experts.")
        if count and of_experts:
            experts += parameter.nbytes
            expert_elements += parameter.numel()
            layers[layer] = layers.get(layer, 0) + parameter.nbytes
        else:
            always += parameter.nbytes
            elements += parameter.numel()
    width = next(parameter.itemsize for parameter in model.parameters())
    expert = max(layers.values(), default=0) // max(1, count)
    return PlannedWeights(
        parameters=elements + expert_elements, used=elements + expert_elements * routed, always=always, experts=experts,
        routed=routed, cache=_cache(text) * width, unit=max(unit_of(model), expert), width=width, expert=expert,
        least={form: _least(model, policy) for form, policy in POLICIES.items()},
    )


def _least(model: nn.Module, policy: Policy) -> int:
    """Return the bytes of the smallest budget in which a store that is open for reading takes ``model`` from an import."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    limits = replace(Limits.of(max(SMALLEST_DRAM, weights)), unit=unit_of(model))
    return smallest_pool(divide(model, limits, {}, policy, 1, Slicing(weights=True)), model, beside=True)


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts of a layer in configurations."""


def _cache(text: Any) -> int:
    """Return the elements of keys and values that a token has in all layers."""
    heads, layers = _number(text, "num_attention_heads"), _number(text, "num_hidden_layers")
    if not heads or not layers:
        raise MisuseError(f"a model of the type {text.model_type!r} has no keys and values of attention to plan for")
    if rank := _number(text, "kv_lora_rank"):  # of all heads together, compressed
        return layers * (rank + _number(text, "qk_rope_head_dim"))
    of_head = _number(text, "head_dim") or _number(text, "hidden_size") // heads
    return 2 * layers * (_number(text, "num_key_value_heads") or heads) * of_head


def _number(config: Any, name: str) -> int:
    found = getattr(config, name, None)
    return found if isinstance(found, int) else 0


def plan_generation(
    weights: PlannedWeights, machine: Machine | None, dram: int, conversation: Sequences, forms: Mapping[str, float | None]
) -> tuple[PlannedTokens, ...]:
    """Plan a token in each of ``forms``, the bytes that a weight has there (None: as it is), in a budget of ``dram`` bytes and,
    where the machine has a device, in its memory."""
    factors = {name: 1.0 if nbytes is None else nbytes / weights.width for name, nbytes in forms.items()}
    return tuple(_planned(name, weights.times(factor), machine, dram, conversation) for name, factor in factors.items())


def _planned(
    form: str, weights: PlannedWeights, machine: Machine | None, dram: int, conversation: Sequences
) -> PlannedTokens:
    cache = weights.cache * conversation.tokens * conversation.sequences
    window = WINDOW * weights.unit
    device = machine is not None and machine.hbm > 0
    hbm = max(0.0, machine.hbm - cache) if machine is not None and device else 0.0
    # A weight in the device's memory has its copy in the host's, too, as far as there is room: the larger one counts.
    read = _missing(weights, conversation.sequences, max(float(dram), hbm), window)
    sent = _missing(weights, conversation.sequences, hbm, window) if device else 0.0
    base = 0 if machine is None else machine.base
    kept = min(float(dram), weights.nbytes)
    process = base + IN_TRANSIT + OPEN + kept + kept / TABLES + (0 if device else cache)
    found: dict[str, Any] = {
        "form": form, "weights": weights.nbytes, "read": read, "sent": sent, "cache": cache, "process": process,
        "smallest": weights.least.get(form, SMALLEST_DRAM), "holds": weights.nbytes + window,
    }
    if machine is None:
        return PlannedTokens(**found)
    flops, memory = machine.computing(weights.width, device=device)
    products = 2.0 * weights.used * conversation.sequences / flops
    paging = weights.leases(conversation.sequences) * machine.lease
    computing = max(products, weights.used_by(conversation.sequences) / memory) + paging
    reading, sending = read / machine.read, sent / machine.link if device else 0.0
    prompt = 2.0 * weights.used * conversation.tokens * conversation.sequences / flops
    first = max(weights.nbytes / machine.read, weights.nbytes / machine.link if device else 0.0, prompt)
    return PlannedTokens(**found, reading=reading, sending=sending, computing=computing, first=first)


def _missing(weights: PlannedWeights, sequences: int, room: float, window: int) -> float:
    """Return the bytes of a token that ``room`` bytes of memory do not hold: weights that each token uses stay first."""
    if weights.nbytes <= room:
        return 0.0
    if weights.always > room:
        lacking, kept = weights.always - room, 0.0
    else:
        lacking, kept = 0.0, (room - weights.always) / weights.experts if weights.experts else 1.0
    missing = lacking + weights.experts * weights.chosen(sequences) * (1 - min(1.0, kept))
    return min(weights.used_by(sequences), missing + (window if lacking else 0))
