"""Optimizer and loss scaling for gradients that are in the store.

``Optimizer`` applies an update rule (``rules.py``) to paged parameters: ``step()`` defers, each unit is updated when it is next
needed. For parameters that stay in memory, with states in a store (``resident.py``), ``step()`` updates. ``AdamW`` is one.
``GradScaler`` scales losses for either.
``refuse_others`` has any other optimizer's step on paged parameters raise.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer as TorchOptimizer
from torch.optim.optimizer import ParamsT, register_optimizer_step_pre_hook

from tiered.errors import MisuseError, TieredError, expect_type, listed, one_of
from tiered.store import TieredStore
from tiered.tensors.steps import refusing
from tiered.zero.collectives import Agree, Ranks, Term
from tiered.zero.optimizers.loaded import beside_states, refuse_scalars, refuse_state, torch_names
from tiered.zero.optimizers.paged import HALF_LOADED, PagedUpdates, pagers_of_params
from tiered.zero.optimizers.resident import ResidentUpdates
from tiered.zero.optimizers.updates import Updates
from tiered.zero.paging.pager import Pager, placements_of
from tiered.zero.paging.sharding import Stage, Stage1
from tiered.zero.paging.tensors.compiling import traced
from tiered.zero.paging.tensors.states import StateView
from tiered.zero.paging.units import Placement
from tiered.zero.paging.update import flat_view
from tiered.zero.rules.exact import AdamWRule, refuse_lacking
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.inexact import AdamWBFloat16RoundedRule, AdamWBFloat16Rule
from tiered.zero.rules.known import OPTIMIZERS
from tiered.zero.rules.rule import (
    UpdateRule,
    constants_of,
    made_from,
    scalars_of,
    settings_of,
    terms_of,
    torch_name,
)
from tiered.zero.rules.rule import name_of as rule_name

__all__ = [
    *("AdamW", "GradScaler", "Optimizer", "refuse_betas", "refuse_other_than_numbers", "refuse_others", "refuse_out_of_range"),
    "stride_of",
]

REFUSED = {
    "fused": "fused=False: parameters are updated by torch's fused kernel, whose bits these are: take zero.Adam with "
    "fused=False, decoupled_weight_decay=True and weight_decay=0.01 for the others, or leave fused= out",
    "foreach": "foreach=True: parameters are updated by torch's fused kernel, whose bits are others: leave foreach= out",
    "amsgrad": "amsgrad=True: the largest second moments are not kept: take zero.Adam with amsgrad=True, "
    "decoupled_weight_decay=True and weight_decay=0.01, which keeps them, or leave amsgrad= out",
    "capturable": "capturable=True: a CUDA graph cannot fetch what is updated from the store: leave capturable= out",
    "differentiable": "differentiable=True: a graph of the update would keep all parameters: leave differentiable= out",
}
"""Why there is no such update as these arguments of ``torch.optim.AdamW`` ask for."""
STARTS = ("refuse", "overwrite", "resume", "continue")
"""Values of ``existing``: what a start of a program means where an earlier one left a model, or states."""
PARAMS = "an optimizer is given an iterable of parameters, or of param groups"


@dataclass(frozen=True)
class _Places:
    """When an optimizer updates, and where the states are of parameters that stay in memory: arguments of ``AdamW``. Raises
    MisuseError for those that contradict each other."""

    update: str
    store: TieredStore | None
    name: str
    existing: str
    stage: Stage | None

    def __post_init__(self) -> None:
        one_of("update", self.update, ("on_fetch", "in_backward"))
        one_of("existing", self.existing, STARTS)
        if self.store is not None and self.update == "in_backward":
            raise MisuseError("update='in_backward' is for paged parameters: leave it or store= out")
        if self.store is None and (self.name, self.existing, self.stage) != ("optimizer", "refuse", None):
            raise MisuseError("name, existing and stage go with store=; a paged model was given them by page")
        if self.stage is not None and not isinstance(self.stage, Stage1):
            raise MisuseError(
                f"{type(self.stage).__name__} divides more than states, and these parameters and gradients stay whole: give "
                "stage=zero.Stage1(), or page the model with zero.page"
            )

    def ranks(self) -> Ranks | None:
        """Return who has a share of the states; None: this process has all."""
        if self.stage is None:
            return None
        if not (dist.is_available() and dist.is_initialized()):
            raise MisuseError("stage= is for several processes: call torch.distributed.init_process_group first")
        return Ranks(self.stage.group, self.stage.timeout) if dist.get_world_size(self.stage.group) > 1 else None


class Optimizer(TorchOptimizer):
    """Optimizer with any update rule, for a model that went through ``tiered.zero.page``, or with states in a store.

    ``rule``: a frozen dataclass with the methods of ``UpdateRule``, one of ``tiered.zero`` (``zero.SGDRule(lr=0.1)``) or your
    own. A param group may have another one under ``"rule"``. The fields of a rule are hyper-parameters of its param groups, of
    the same names: schedulers set them there. The other arguments, and what ``step`` does, are those of ``AdamW``.

    Raises MisuseError for a rule that updates anything but elements, blocks of them or matrices, for parameters that are
    divided within a block or a matrix, and in ``step`` where a hyper-parameter was changed such that the rule would keep other
    states; CapacityError, with the number of bytes, where the store has too little memory for a whole matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        rule: UpdateRule,
        *,
        update: str = "on_fetch",
        store: TieredStore | None = None,
        name: str = "optimizer",
        existing: str = "refuse",
        stage: Stage | None = None,
    ) -> None:
        self._begin(params, rule, self._hyper_parameters(rule), _Places(update, store, name, existing, stage))

    def _begin(self, params: ParamsT, rule: UpdateRule, defaults: dict[str, Any], places: _Places) -> None:
        """Initialise. ``rule``: of param groups that have none; ``defaults``: hyper-parameters, and what else torch's class has
        in its param groups."""
        self._in_backward, store = places.update == "in_backward", places.store
        self._default_rule = rule
        self._rules: list[UpdateRule] = []
        """By param group: its rule, with the hyper-parameters that it had when the group was added or loaded."""
        given: Any = _listed(params) if store is None else params
        ranks = places.ranks()
        self._updates: Updates
        if store is None:
            self._updates = PagedUpdates(self, given, in_backward=self._in_backward)
        with self._agreeing("make this optimizer", given if store is None else (), ranks):
            if store is not None:
                self._updates = ResidentUpdates(self, store, places.name, places.existing, ranks)
            self._made = False
            if isinstance(given, list) and not given:
                raise ValueError(  # as torch does
                    "optimizer got an empty parameter list: no parameter of the model needs a gradient, or a generator was "
                    "read before; one that is quantised is for reading only: train an adapter over it (peft.get_peft_model)"
                )
            super().__init__(_listed(given), defaults)
            self._made = True
        self._show(self._updates.write())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise MisuseError(
            f"{type(self).__name__} cannot be copied or pickled: its states are in a store; copy or save "
            "optimizer.state_dict() instead"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch; every parameter must be paged, or none where there is a store. All ranks add it."""
        if not self._made:  # all groups are compared together
            self._add_group(param_group)
            return
        (param_group,) = _listed([param_group])
        with self._agreeing("add this param group", [param_group], self._updates.ranks):
            self._add_group(param_group)
        self._show(self._updates.write())

    @contextmanager
    def _agreeing(self, what: str, params: Sequence[Any], ranks: Ranks | None) -> Iterator[None]:
        """Have all ranks compare this optimizer after a block of code: those that have shares of ``params``, or ``ranks``."""
        with ExitStack() as stack:
            asked: list[tuple[Pager | None, Agree]] = []
            if ranks is not None:
                asked.append((None, stack.enter_context(ranks.agreeing(what))))
            asked += [(pager, stack.enter_context(pager.partition.agreeing(what))) for pager in pagers_of_params(params)]
            yield
            for pager, agree in asked:
                agree(self.terms(pager))

    def terms(self, pager: Pager | None) -> Iterator[Term]:
        """Yield what all ranks need alike of this optimizer, as far as it updates the model of ``pager`` (None: any)."""
        yield "update=", "'in_backward'" if self._in_backward else "'on_fetch'"
        yield "existing=", self._updates.existing
        for index, group in enumerate(self.param_groups):
            yield from terms_of(self._rules[index], f"param group {index}")
            for number, parameter in enumerate(group["params"]):
                said = self._updates.term_of(parameter, pager)
                if said is not None:
                    yield f"parameter {number} of param group {index}", said

    def _add_group(self, param_group: dict[str, Any]) -> None:
        self._refuse_group(param_group)
        rule = param_group.get("rule", self._default_rule)
        refuse_lacking(rule)
        if "rule" in param_group:  # the caller may make another optimizer of it
            param_group = {name: value for name, value in param_group.items() if name != "rule"}
        own = settings_of(rule)
        if type(rule) is not type(self._default_rule) or rule is not self._default_rule:
            param_group = {**own, **param_group}
        others = self.defaults.keys() - own.keys() - param_group.keys()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if type(rule) is not type(self._default_rule):
            for key in others:
                del group[key]
        rule = made_from(rule, group)
        try:
            self._updates.refuse_mixed()
            self._updates.add(self._names(group), rule)
        except TieredError:
            self.param_groups.pop()
            raise
        self._rules.append(rule)

    # -- stepping ----------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step for every parameter that has a gradient. ``closure`` as in torch; returns what it returns, else
        None.

        Applies updates of an earlier step that nothing has asked for yet; so it may wait for the store, and raise what that
        raises. Raises MisuseError where a gradient has infinity or NaN. After either no parameter has had this step:
        ``zero_grad`` leaves it out. With ``store=``, where parameters are updated at once, that is so of gradients of bf16
        parameters only (others become NaN, as in torch); after another error some parameters may have had the step and others
        not, and further steps raise MisuseError until ``store.rollback()``, or ``load_state_dict``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._show(self._updates.step())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; with ``set_to_none=False`` they become zeros (hence an update follows), as in torch.

        After an exception in forward or backward nothing is held any more, and all is as before that step (with
        ``update="in_backward"``, where units may have been updated by then, ``zero.rollback`` does that).
        """
        self._updates.zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together and return it (0-d): ``torch.nn.utils.clip_grad_norm_``, bit for bit
        where all gradients have one dtype.

        The norm of each whole gradient, then the norm of these in ``model.parameters()`` order; the factor is applied when
        the update is. Raises RuntimeError for a norm that is not finite when ``error_if_nonfinite``.
        """
        return self._updates.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of ``parameter``, of its shape and dtype, or None when it has none. Raises MisuseError
        for a parameter that is not paged, where there is no store."""
        return self._updates.grad(parameter)

    def flush(self) -> None:
        """Apply every pending update now. Raises what the store raises."""
        self._updates.flush()

    # -- state -------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """States by parameter, as torch has them: copies, read when they are asked for, whose writes raise MisuseError. With
        ``store=`` the step counts alone. All ranks read together."""
        return self._updates.state(self.__dict__.get("state"))

    @state.setter
    def state(self, states: Any) -> None:
        if isinstance(states, StateView):
            return
        if self._made:
            self._updates.refuse_states()
        self.__dict__["state"] = states

    def state_dict(self) -> dict[str, Any]:
        """Return copies in the form of torch's class: of AdamW step, exp_avg and exp_avg_sq per parameter; and the param
        groups.

        bf16 and fp16 parameters also have their fp32 ``master``. Those of a DTensor are DTensors with its placements.
        """
        packed, states = self.state_in_turn()
        return {**packed, "state": dict(states)}

    def state_in_turn(self) -> tuple[dict[str, Any], Iterator[tuple[int, dict[str, Any]]]]:
        """Return ``state_dict()`` without a state, and the states with their numbers, of which each is read when the iterator
        comes to it."""
        packed = super().state_dict()  # reads no states
        for group in packed["param_groups"]:  # so that torch's takes the same kernel
            self._as_torch(group)
        return packed, self._states_in_turn()

    def _states_in_turn(self) -> Iterator[tuple[int, dict[str, Any]]]:
        rules = [rule for rule, group in zip(self._rules, self.param_groups, strict=True) for _ in group["params"]]
        for index, (rule, (step, kept)) in enumerate(zip(rules, self._updates.kept(), strict=True)):
            if step:
                found = {**scalars_of(rule, step), **{torch_name(rule, name): value for name, value in kept.items()}}
                if found:
                    yield index, found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave, here or from torch's class. Pending updates are applied first.

        Load the model's values before: a master that is another value than its parameter has is not taken. A state of a DTensor
        may be a DTensor, or an ordinary tensor with all of it or with the shard of this rank.
        """
        if any(group.get("amsgrad") and "amsgrad" not in here for group, here in self._beside(state_dict)):
            name = f"tiered.zero.{type(self).__name__}"
            raise MisuseError(
                f"this state was trained with amsgrad=True, which {name} does not have: load it into zero.Adam(amsgrad=True, "
                "decoupled_weight_decay=True)"
            )
        state_dict = self._completed(state_dict)
        rules = self._loaded(state_dict)
        for pager in self.pagers():
            if pager.intent.spoiled == HALF_LOADED:  # this call takes its place
                pager.end_leases()
                pager.intent.spoil(None)
        self.flush()
        named = [name for group in state_dict["param_groups"] for name in group["params"]]  # numbers, or what there is instead
        moments = {
            index: {key: value for key, value in state_dict["state"][name].items() if value is not None}
            for index, name in enumerate(named)
            if state_dict["state"].get(name)
        }
        for index, rule in enumerate(rules):
            if index in moments and hasattr(rule, "encoded"):
                moments[index] = self._encoded(index, rule, moments[index])
        ours = [torch_names(rule) | {"master": "master"} for rule in rules]
        states = {
            index: {ours[index][name]: value for name, value in found.items() if name in ours[index]}
            for index, found in moments.items()
            if index < len(rules)
        }
        lacking = [
            index
            for index, found in states.items()
            if ours[index].keys() - {"master"} and not moments[index].keys() - beside_states(rules[index])
        ]
        for index in lacking:  # torch has a state of SGD without a momentum before the first step
            del states[index], moments[index]
        for index, found in moments.items():
            if index < len(rules):
                refuse_scalars(rules[index], found)
        steps = {index: int(found.get("step", 1)) for index, found in moments.items()}
        with self._updates.loading(moments, rules):
            super().load_state_dict({**state_dict, "state": {}})
        self.adopt()
        self._show(self._updates.load(states, steps, rules))

    def _encoded(self, index: int, rule: Any, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of parameter number ``index`` with its moments as ``rule`` encodes them, where they are floats, as
        torch's class has them."""
        parameter = next(itertools.islice(self._parameters(), index, None))
        if rule.decoded[0] not in found:
            return dict(found)
        made = {name: value for name, value in found.items() if name not in rule.decoded}
        moments = []
        for name in rule.decoded:
            value: Any = found.get(name)
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                refuse_state(f"parameter {index}", parameter.shape, found, AdamWRule(), "AdamW")
            flat = torch.empty_strided(parameter.shape, stride_of(parameter), dtype=torch.float32, device="cpu").copy_(value)
            moments.append(flat_view(flat))
        made[torch_name(rule, rule.state)] = rule.encoded(moments)
        return made

    def _beside(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Yield each param group that is loaded, with the one that it is loaded into."""
        return zip(state_dict["param_groups"], self.param_groups, strict=False)

    def _completed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return ``state_dict`` with the hyper-parameters that its param groups need not have: those that torch's class sets
        in a state of an older torch, too."""
        groups = list(state_dict["param_groups"])
        for index, rule in enumerate(self._rules[: len(groups)]):
            made = getattr(rule, "torch_class", None)
            if made is not None:
                theirs = made([torch.zeros(1, 1, dtype=torch.float32, device="cpu")])
                theirs.__setstate__({"state": {}, "param_groups": [{**groups[index], "params": []}]})
                groups[index] = {**theirs.param_groups[0], "params": groups[index]["params"]}
        for index, (rule, here) in enumerate(zip(self._rules, self.param_groups, strict=False)):
            optional = [name for name in getattr(rule, "optional", ()) if index < len(groups) and name in here]
            lacking = [name for name in optional if name not in groups[index]]
            if lacking:
                groups[index] = {**groups[index], **{name: here[name] for name in lacking}}
        return {**state_dict, "param_groups": groups}

    def _loaded(self, state_dict: Mapping[str, Any]) -> list[UpdateRule]:
        """Return by parameter the rules that the param groups of ``state_dict`` make. Raises MisuseError where one lacks a
        hyper-parameter."""
        rules = []
        for rule, (group, here) in zip(self._rules, self._beside(state_dict), strict=False):
            for name in settings_of(rule):
                if name not in group:
                    raise MisuseError(
                        f"a param group of this state has no {name!r}: give what state_dict() of an {type(self).__name__} "
                        "returns"
                    )
            rules += [made_from(rule, group)] * len(here["params"])
        return rules

    def adopt(self) -> None:
        """Have the parameters keep the states that the rules of their param groups keep, after these were loaded."""
        for index, group in enumerate(self.param_groups):
            rule = self._rules[index] = made_from(self._rules[index], group)
            self._updates.keep(group, rule)

    def rule_name(self, index: int) -> str:
        """Return the name of the rule of a param group."""
        return rule_name(self._rules[index])

    def rule_of(self, index: int) -> UpdateRule:
        """Return the rule of a param group, as it was when states were last kept for it."""
        return self._rules[index]

    def settings(self, index: int) -> Iterable[str]:
        """Return the names of a param group's hyper-parameters."""
        return settings_of(self._rules[index])

    def rule(self, index: int) -> UpdateRule:
        """Return the rule of a param group with the hyper-parameters of now, frozen. Raises MisuseError where it keeps other
        states than it did."""
        rule = made_from(self._rules[index], self.param_groups[index])
        self.follow(index, rule)
        return rule

    def follow(self, index: int, rule: UpdateRule) -> None:
        """Have a param group that has made no step keep what ``rule`` keeps: a scheduler may set a momentum before the first
        one. Raises MisuseError where it has made one and ``rule`` keeps other states."""
        before = self._rules[index]
        if rule == before or not _changed(before, rule):
            return
        if self._updates.stepped(index):
            raise MisuseError(_changed(before, rule))
        self._updates.follow(index, rule)
        self._rules[index] = rule

    def _hyper_parameters(self, rule: UpdateRule) -> dict[str, Any]:
        """Return what the param groups have whose rule is of the type of ``rule``."""
        return settings_of(rule)

    def _refuse_group(self, group: Mapping[str, Any]) -> None:
        """Raise MisuseError for a param group that asks for what this optimizer does not have."""

    def _as_torch(self, group: dict[str, Any]) -> None:
        """Add what torch's class has in a param group beside hyper-parameters."""

    # -- within ------------------------------------------------------------------------------------------------------------

    @property
    def resident(self) -> bool:
        """Return whether the parameters stay in memory, and only their states are in a store."""
        return self._updates.resident

    @property
    def steps(self) -> dict[Placement, int]:
        """Return how many steps each paged parameter has had."""
        return self._updates.steps

    @steps.setter
    def steps(self, steps: dict[Placement, int]) -> None:
        self._updates.steps = steps

    def pagers(self) -> Sequence[Pager]:
        """Return the pagers of the models whose parameters these are."""
        return self._updates.pagers()

    def refuse_turns(self) -> None:
        """Raise MisuseError where another optimizer has made a step since this one did."""
        self._paged.refuse_turns()

    def is_superseded(self) -> bool:
        """Return whether other optimizers have counted the last steps of all parameters."""
        return self._paged.is_superseded()

    def unscale(self, factor: torch.Tensor) -> list[bool]:
        """Multiply all gradients by ``factor`` (0-d) when they are used; return for each whether it was finite before."""
        return self._paged.unscale(factor)

    @property
    def _paged(self) -> PagedUpdates:
        assert isinstance(self._updates, PagedUpdates), "these parameters are in memory"
        return self._updates

    def _show(self, steps: Sequence[int]) -> None:
        """Set ``state`` as torch does, because torch.distributed.checkpoint takes an optimizer without any for a fresh one, and
        makes a step with it. ``steps``: of each parameter, or of none."""
        for parameter, step in zip(self._parameters(), steps, strict=False):
            if step:
                self.state[parameter] = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}

    def _names(self, group: dict[str, Any]) -> list[str]:
        """Return how errors name each parameter of ``group``, the last one."""
        first = sum(len(other["params"]) for other in self.param_groups) - len(group["params"])
        given = group.get("param_names")
        return [
            repr(given[index]) if given else f"parameter {first + index} (of shape {tuple(parameter.shape)})"
            for index, parameter in enumerate(group["params"])
        ]

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]


class AdamW(Optimizer):
    """``torch.optim.AdamW(fused=True)`` for a model that went through ``tiered.zero.page``, bit for bit.

    Moments are fp32 (fp64 for fp64 parameters), and so are the masters of bf16 and fp16 parameters: what is updated is the
    master, and the parameter is the master rounded: bf16 half up (so that the master is the parameter and 16 more bits), fp16
    to even. All of it is read and written in chunks of a few MiB, so that memory does not grow with the model.

    ``update`` says when:

    - "on_fetch": ``step()`` only freezes learning rate, betas, decay, step count and clip factor of each unit; the update is
      applied when the unit is next leased: by the next forward, by evaluation, by ``state_dict``. Gradients are kept till then.
    - "in_backward": each backward is a step. A unit is updated within it as soon as backward is done with it, with the
      hyper-parameters of that moment, and its gradients are deleted: they need neither room nor transfers. ``step()`` closes
      the step (after it ``grad`` is None). What needs all gradients at once raises MisuseError: clipping, loss scaling, a
      second backward before ``step()``. Units that take part in reentrant checkpoints, or that get fewer gradients than in the
      step before, are updated at the end of backward. After an exception in backward some are updated and others are not.

    ``store``: where the states of parameters are that stay in memory as they are (not paged: those of any model, of one in
    ``DistributedDataParallel``, or DTensors, as ``fully_shard`` makes them, of which each rank updates its shard). ``step()``
    updates them at once; gradients are ordinary tensors, and torch's own functions clip and scale them.

    - ``name``: keys in the store begin with it and a slash. ``existing``: what to do when there are some: "refuse",
      "overwrite", or "resume": go on bit for bit with the states and step counts that were committed there, for parameters
      of the same groups, shapes and types; their values, and what a scheduler sets, are the caller's to bring back; or
      "continue": "resume" where there are some, and begin where there are none.
    - ``stage=zero.Stage1()``: the parameters and gradients are the same on all ranks, each of which has the states of its share
      of the elements and updates that; all call ``step``, ``state_dict`` and ``add_param_group`` together.

    ``moments=torch.bfloat16``: both are bf16 in the store, half as many bytes. That is inexact: a step widens them, is that of
    fp32, and rounds them to even. A second moment then does not decay where ``betas[1]`` is above 0.998. What
    ``moments=None`` left is loaded by ``load_state_dict``, and the other way round.

    ``rounding="stochastic"``, with bf16 moments, for bf16 parameters: they have no masters, and each step rounds them by
    chance, up or down as near as they are. What decides is a hash of ``seed``, the step, the parameter's name and the element's
    number, so a run that goes on from a commit has the same bits, and so have other budgets and numbers of ranks. Inexact.

    A bf16 parameter that is given another value between steps keeps the low bits of its master, which are less than half a
    unit of its last place.

    Parameters whose gradient is None are left alone. All arguments of ``torch.optim.AdamW`` are taken, as torch takes them
    (Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101): ``model.named_parameters()``, too, and a tensor for ``lr``.
    The bits are those of ``fused=True``; MisuseError names ``fused=False``, ``foreach=True``, ``amsgrad=True``,
    ``capturable=True`` and ``differentiable=True``. Raises MisuseError for parameters that are not paged where there is no
    ``store``, for those that are where there is one, and for a name that is taken.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moments: torch.dtype | None = None,
        rounding: str | None = None,
        seed: int = 0,
        update: str = "on_fetch",
        store: TieredStore | None = None,
        name: str = "optimizer",
        existing: str = "refuse",
        stage: Stage | None = None,
    ) -> None:
        places = _Places(update, store, name, existing, stage)
        asked = {"fused": fused, "foreach": foreach, "amsgrad": amsgrad, "capturable": capturable}
        _refuse_kernels({**asked, "differentiable": differentiable})
        refuse_out_of_range(lr, betas, weight_decay, eps)
        numbers = tuple(map(float, betas))
        defaults = {"lr": lr, "betas": numbers, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        if moments not in (None, torch.float32, torch.bfloat16):
            raise MisuseError(f"moments={moments}: they are float32, or bfloat16; zero.AdamW8bit and zero.AdamW4bit have codes")
        kind = AdamWBFloat16Rule if moments is torch.bfloat16 else AdamWRule
        rule: UpdateRule = kind(float(lr), (numbers[0], numbers[1]), eps, weight_decay, maximize)
        if rounding is not None:
            if rounding != "stochastic" or moments is not torch.bfloat16:
                raise MisuseError(
                    f"rounding={rounding!r} with moments={moments}: it is 'stochastic', with moments=torch.bfloat16, or of "
                    "zero.AdamW8bit and zero.AdamW4bit"
                )
            rule = AdamWBFloat16RoundedRule(float(lr), (numbers[0], numbers[1]), eps, weight_decay, maximize, seed)
            defaults["seed"] = seed
        self._begin(params, rule, defaults, places)

    def _refuse_group(self, group: Mapping[str, Any]) -> None:
        _refuse_kernels(group)

    def _as_torch(self, group: dict[str, Any]) -> None:
        group.update(fused=True, foreach=None, amsgrad=False, capturable=False, differentiable=False)
        group["decoupled_weight_decay"] = True


def refuse_out_of_range(
    lr: float | torch.Tensor, betas: Sequence[float | torch.Tensor], weight_decay: float, eps: float = 0.0
) -> None:
    """Raise MisuseError for arguments of AdamW, or of one like it, that are out of range, or NaN."""
    refuse_other_than_numbers({"lr": lr, "weight_decay": weight_decay, "eps": eps})
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise MisuseError(f"lr={lr} has {lr.numel()} elements: give one")
    refuse_betas(betas)
    for what, value, right in (
        ("lr", lr, lr >= 0),
        ("eps", eps, eps >= 0),
        ("weight_decay", weight_decay, weight_decay >= 0),
        ("betas", betas, all(0 <= beta < 1 for beta in betas)),
    ):
        if not right:
            raise MisuseError(f"{what}={value} is out of range")


def refuse_other_than_numbers(given: Mapping[str, Any]) -> None:
    """Raise MisuseError for a hyper-parameter that is neither a number nor a tensor of one."""
    for name, value in given.items():
        expect_type(value, Real | torch.Tensor, f"{name} is a number")


def refuse_betas(betas: Sequence[float | torch.Tensor]) -> None:
    """Raise MisuseError for another number of betas than two, for one of several elements, and for a number beside a tensor,
    which torch refuses, too."""
    expect_type(betas, Sized, "betas are two numbers")
    refuse_other_than_numbers({f"betas[{index}]": beta for index, beta in enumerate(betas)})
    if len(betas) != 2:
        raise MisuseError(f"betas={betas} are {len(betas)}, which is out of range: give two")
    if any(isinstance(beta, torch.Tensor) and beta.numel() != 1 for beta in betas):
        raise MisuseError(f"betas={betas} have tensors of several elements: give one of each")
    if len({isinstance(beta, torch.Tensor) for beta in betas}) > 1:
        raise MisuseError(f"betas={betas} are a number and a tensor: give two of either")


def stride_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in whose order a parameter has its states."""
    if not hasattr(parameter, "_tiered"):
        return parameter.stride()
    placement = placements_of(parameter)[0][2]
    if placement.sliced is None:
        return placement.stride
    return torch.empty(parameter.shape, dtype=torch.uint8, device="meta").stride()


def _changed(before: UpdateRule, rule: UpdateRule) -> str:
    """Return, in words, why ``rule`` cannot follow ``before``: it keeps other states, or computes these otherwise. Empty where
    it can."""
    old, new = list(forms_of(before, torch.float32)), list(forms_of(rule, torch.float32))
    if old != new:
        return (
            f"the hyper-parameters of a param group were changed, and {type(rule).__name__} now keeps {new} and kept {old}: "
            "make a new optimizer for that"
        )
    if constants_of(before) != constants_of(rule):
        names = ", ".join(getattr(rule, "constant", ()))
        return (
            f"{names} of a param group were {constants_of(before)} and are {constants_of(rule)}: {type(rule).__name__} "
            "computes what it does not keep from them, so they stay as they are; make a new optimizer for others"
        )
    return ""


def _refuse_kernels(asked: Mapping[str, Any]) -> None:
    """Raise MisuseError for what torch's fused kernel, or this optimizer, cannot do."""
    for name, why in REFUSED.items():
        value = asked.get(name)
        if value is not None and bool(value) != (name == "fused"):
            raise MisuseError(why)


@cache
def refuse_others() -> None:
    """Have every step of another optimizer on paged parameters raise MisuseError, from the first call on."""
    register_optimizer_step_pre_hook(traced(refusing(Optimizer, _to_update, _refusal)))


@traced
def _to_update(parameter: torch.Tensor) -> bool:
    """Return whether a step updates a parameter that is paged: it leaves alone those that are frozen, as an adapter's base."""
    return hasattr(parameter, "_tiered") and (parameter.requires_grad or parameter.grad is not None)


def _refusal(optimizer: TorchOptimizer) -> str:
    name = type(optimizer).__name__
    return (
        f"{name} cannot update parameters that are paged, whose values are in the store: make {ours_for(name)} for them, or "
        f"keep what {name} updates out of the model that is paged{_for_a_trainer(optimizer)}"
    )


def ours_for(name: str) -> str:
    """Say which optimizer of tiered.zero does for paged parameters what the class ``name`` does in memory."""
    if name in OPTIMIZERS:
        return f"tiered.zero.{name}"
    return (
        f"tiered.zero.AdamW or another one of tiered.zero (tiered.zero.Elementwise takes {name}, if it computes element by "
        "element, and tiered.zero.Optimizer a rule of your own)"
    )


def _for_a_trainer(optimizer: TorchOptimizer) -> str:
    """Return the two lines with which transformers' Trainer makes an optimizer that can, where that is what a program uses."""
    if "transformers.trainer" not in sys.modules:
        return ""
    name = type(optimizer).__name__ if type(optimizer).__name__ in OPTIMIZERS else "AdamW"
    given = {key: optimizer.defaults[key] for key in ("lr", "momentum", "betas", "eps") if key in optimizer.defaults}
    return (
        ". A Trainer of transformers makes it with these two lines:\n    from tiered import zero\n"
        f"    Trainer(..., optimizer_cls_and_kwargs=(zero.{name}, {given}))"
    )


def _listed(params: Any) -> list[Any]:
    """Return parameters, or param groups, as a list, also where an iterator gives those of a group. Raises MisuseError for what
    is neither, for one tensor, which torch refuses, too, and for a model."""
    if isinstance(params, torch.Tensor):
        raise MisuseError(f"{PARAMS}, not one tensor: give [parameter]")
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise MisuseError(f"{PARAMS}, not a model: give model.parameters()")
    found = []
    for one in listed(params, PARAMS):
        if isinstance(one, dict) and hasattr(one.get("params"), "__next__"):
            one = {**one, "params": list(one["params"])}
        found.append(one)
    return found


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for ``tiered.zero.AdamW``: ``scale(loss)``, ``unscale_``, ``step``, ``update``, ``state_dict``.

    Whether gradients are finite is found out when they arrive, and they are multiplied when the update is applied, so neither
    parameters nor gradients are read once more. bf16 and fp16 gradients are unscaled, and clipped afterwards, as fp32: what
    loss scaling saved from underflow stays. Scales are powers of two by default; with others the bits are those of torch's
    ``unscale_`` (multiplication by the inverse), not those of the division in its fused kernel.

    Arguments as in torch (https://docs.pytorch.org/docs/stable/amp.html), but ``device`` is "cpu" unless said otherwise. Other
    optimizers, and one whose parameters stay in memory, are treated as torch does. ``unscale_`` and ``step`` raise MisuseError
    for an optimizer with ``update="in_backward"``.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in torch; ``unscale_`` may come next, for gradients that were scaled before."""
        super().load_state_dict(state_dict)
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the gradients, as torch asks from ``unscale_``. Sets ``found_inf`` (0-d) to 1 where one is infinite or NaN.
        """
        if not isinstance(optimizer, Optimizer) or optimizer.resident:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finite = optimizer.unscale(inv_scale)
        if not all(finite):
            found_inf.fill_(1.0)
        return {found_inf.device: found_inf} if finite else {}
