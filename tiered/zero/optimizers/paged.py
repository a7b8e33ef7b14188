"""Update paged parameters. A step defers: it freezes what each unit is updated with, and the unit is updated when it is next
needed, or, within backward, as soon as its gradients are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch

from tiered.errors import CapacityError, MisuseError
from tiered.system import compiler, refuse_little_room
from tiered.zero.collectives import Term
from tiered.zero.intent import all_or_none
from tiered.zero.optimizers.loaded import refuse_state, torch_names
from tiered.zero.optimizers.updates import Group, Optimizing, Updates
from tiered.zero.paging.pager import Pager, name_of, pager_of_parameter, placement_of, placements_of
from tiered.zero.paging.saved_tensors import without_grad
from tiered.zero.paging.storage import host
from tiered.zero.paging.tensors.gradients import is_spent, whole_norms
from tiered.zero.paging.tensors.sliced import norm_of_parts
from tiered.zero.paging.tensors.states import StateView
from tiered.zero.paging.unit import Unit
from tiered.zero.paging.units import SHARE_STEP, Placement, Sliced, UnitPlan
from tiered.zero.paging.update import Update
from tiered.zero.rules.forms import StateForm, are_of_whole, forms_of
from tiered.zero.rules.rule import SMALLEST_BLOCK, WHOLE, UpdateRule, rounds_by_chance, scalars_of, terms_of, torch_name

__all__ = ["HALF_LOADED", "PagedUpdates", "mixed", "pagers_of_params", "refuse_masters"]

LOGGED = 256
"""After so many steps the rules of those are forgotten that no slice of a parameter has yet to make."""
HALF_LOADED = (
    "an exception struck optimizer.load_state_dict, and some parameters have the states that it was given and others have not: "
    "call it again, or zero.rollback"
)

Located = tuple[Pager, Unit, Placement]
"""Where a parameter is, or a slice of one."""


class _Known(NamedTuple):
    """Where the parameters of a group are: as long as they have these handles, and their model lives."""

    handles: list[Any]
    found: list[tuple[ref[Pager], ref[Unit], Placement]]


class PagedUpdates(Updates):
    """Updates of paged parameters; ``in_backward``: they are made within backward, as soon as a gradient is complete."""

    resident = False

    def __init__(self, optimizer: Optimizing, params: Sequence[Any], *, in_backward: bool) -> None:
        super().__init__(optimizer)
        _refuse_little_room(params)
        self.in_backward = in_backward
        self._group_of: dict[Placement, int] = {}
        self._missed: dict[Sliced, dict[int, UpdateRule]] = {}
        """The rules of the steps that slices may have yet to make, by number."""
        self._mark = ref(optimizer)
        """Stands for this optimizer in units."""
        self._known: dict[int, _Known] = {}
        """Where the parameters of each param group were found last, by the number of the group."""

    # -- parameters --------------------------------------------------------------------------------------------------------

    def found(self, index: int) -> list[Located]:
        """Return where each parameter of a group is; of one that is sliced, where each slice is. Raises as ``placement_of``."""
        params = self.groups[index]["params"]
        handles = [parameter.__dict__.get("_tiered") for parameter in params]
        known = self._known.get(index)
        if known is not None and len(known.handles) == len(handles) and all(map(is_, known.handles, handles)):
            pagers, units = [pager() for pager, _, _ in known.found], [unit() for _, unit, _ in known.found]
            if None not in pagers and None not in units:
                return list(zip(pagers, units, [placement for _, _, placement in known.found], strict=True))  # type: ignore[arg-type]
        found = [one for parameter in params for one in placements_of(parameter)]
        self._known[index] = _Known(handles, [(ref(pager), ref(unit), placement) for pager, unit, placement in found])
        return found

    def _all(self) -> list[Located]:
        return [one for index in range(len(self.groups)) for one in self.found(index)]

    def pagers(self) -> Sequence[Pager]:
        return list(dict.fromkeys([pager for pager, _, _ in self._all()]))

    def _units(self) -> Sequence[Unit]:
        return list(dict.fromkeys([unit for _, unit, _ in self._all()]))

    def refuse_mixed(self) -> None:
        paged = [hasattr(parameter, "_tiered") for parameter in self.parameters]
        if any(paged) and not all(paged):
            raise mixed(self.parameters)

    def term_of(self, parameter: torch.Tensor, pager: Pager | None) -> str | None:
        return repr(name_of(parameter)) if pager_of_parameter(parameter) is pager else None

    def add(self, names: Sequence[str], rule: UpdateRule) -> None:
        index = len(self.groups) - 1
        found = self.found(index)
        for pager, unit, placement in found:
            if all(one.plan.read_only for one in pager.units):  # else frozen, as those of a base model are under an adapter
                unit.plan.refuse_writing()
            kinds = {one.dtype for one in unit.gradients.states}
            if torch.float64 in kinds and len(kinds) > 1:
                raise MisuseError(f"unit {unit.plan.shown} mixes float64 with other element types: use one of them")
            unit.states.refuse(placement.name, forms_of(rule, unit.states.wide))
            refuse_masters(placement.name, placement.stored, rule)
            _refuse_cut_blocks(placement, unit.plan, rule)
            _refuse_cut_matrix(pager, unit, placement, rule, self.in_backward)
        for pager, unit, placement in found:
            self._group_of[placement] = index
            unit.claim(placement, self.update_now if self.in_backward else None)
            pager.made = ref(self.optimizer)

    def keep(self, group: Group, rule: UpdateRule) -> None:
        for parameter in group["params"]:
            for _, unit, placement in placements_of(parameter):
                unit.keep_states({placement: forms_of(rule, unit.states.wide)})

    def stepped(self, index: int) -> bool:
        return any(self.steps.get(placement) for _, _, placement in self.found(index))

    # -- stepping ----------------------------------------------------------------------------------------------------------

    def step(self) -> Sequence[int]:
        for pager in self.pagers():
            pager.refuse_unresumed()
            pager.refuse_averaged("optimizer.step")
            pager.reset()
            pager.gradient_sync.synchronise()
            pager.gradient_sync.refresh()
        with without_grad():
            self._step()
        return ()

    def _step(self) -> None:
        updates: dict[Unit, dict[Placement, Update]] = {}
        missed: dict[Unit, dict[Placement, tuple[Update, dict[int, UpdateRule]]]] = {}
        deeds: list[Callable[[], object]] = []
        steps: dict[Placement, int] = {}
        forms: _Forms = {}
        with ExitStack() as agreeing:  # of several ranks all make the step, or none
            asked = [(p, agreeing.enter_context(p.partition.agreeing("make this step"))) for p in self.pagers()]
            for index in range(len(self.groups)):
                rule, found = self.optimizer.rule(index), self.found(index)
                for _, unit, placement in found:
                    factors = unit.gradients.for_step(placement)
                    if factors is not None:
                        step = steps[placement] = self._next_step(unit, placement)
                        updates.setdefault(unit, {})[placement] = Update(rule, step, *factors)
                    if unit.gradients.is_spent(placement):
                        deeds.append(partial(unit.gradients.close_step, placement))
                for parts in _sliced(found):
                    self._miss(parts, rule, steps, missed)
            for unit in updates:
                updates[unit] |= {placement: update for placement, (update, _) in missed.pop(unit, {}).items()}
            for unit in updates:  # the last that can fail, before anything is marked
                unit.refuse_hidden()
                unit.apply_update()  # an earlier update that nothing has asked for yet
                _keep(unit, updates[unit], forms)
                unit.storage.give_up()
            for unit, slices in missed.items():
                _keep(unit, {placement: update for placement, (update, _) in slices.items()}, forms)
                if not all(unit.misses(placement, update.step) for placement, (update, _) in slices.items()):
                    unit.apply_update()
            for pager, agree in asked:
                agree(self._terms_of_step(pager, updates))
        deeds.append(partial(self.steps.update, steps))
        deeds += [partial(unit.counted_by.update, dict.fromkeys(changed, self._mark)) for unit, changed in updates.items()]
        deeds += [partial(unit.counted_by.update, dict.fromkeys(slices, self._mark)) for unit, slices in missed.items()]
        deeds += [partial(unit.gradients.use, changed) for unit, changed in updates.items()]
        deeds += [unit.defer_update(changed) for unit, changed in updates.items()]
        deeds += [unit.defer_missed(slices) for unit, slices in missed.items()]
        deeds += [pager.intent.all_updated for pager in self.pagers()]
        deeds += [partial(pager.stepped_by, self.optimizer) for pager in self.pagers()]
        self._decide(deeds)
        for unit in updates:
            if unit.is_kept:  # what is written to a tensor that somebody kept comes after this update
                unit.apply_update()
        for trace in dict.fromkeys(pager.step_trace for pager in self.pagers()):
            trace.step_ended()

    def _terms_of_step(self, pager: Pager, updates: Mapping[Unit, Mapping[Placement, Update]]) -> Iterator[Term]:
        """Yield what all ranks need alike of a step so that the updates of their shares are one step."""
        for index in range(len(self.groups)):
            if any(owner is pager for owner, _, _ in self.found(index)):
                yield from terms_of(self.optimizer.rule(index), f"param group {index}")
        units = set(pager.units)
        for unit, here in updates.items():
            for placement, update in here.items() if unit in units else ():
                yield from update.terms(placement.name)

    def _miss(
        self,
        slices: Sequence[Located],
        rule: UpdateRule,
        steps: dict[Placement, int],
        missed: dict[Unit, dict[Placement, tuple[Update, dict[int, UpdateRule]]]],
    ) -> None:
        """Add to ``missed``, and to ``steps``, a step with a gradient of zero of each slice of a parameter that has none, where
        another slice has one."""
        spent = [placement for _, unit, placement in slices if unit.gradients.is_spent(placement)]
        made = {steps[p] for _, _, p in slices if p in steps} | {self.steps[p] for p in spent}
        if not made:
            return
        step = max(made)
        sliced = slices[0][2].sliced
        assert sliced is not None
        log = self._missed.setdefault(sliced, {})
        last = log.get(step - 1)
        log[step] = last if last == rule else rule  # one object for many steps, where the rule stays the same
        for _, unit, placement in slices:
            if placement in steps or placement in spent:
                continue
            steps[placement] = step
            missed.setdefault(unit, {})[placement] = Update(rule, step, graded=False), log
        if step % LOGGED == 0:
            oldest = min(unit.waiting_since(placement, step) for _, unit, placement in slices)
            for number in [number for number in log if number < oldest]:
                del log[number]

    def zero_grad(self, set_to_none: bool) -> None:
        for pager in self.pagers():
            pager.intent.refuse()
            if not pager.computing:
                pager.reset()  # what an exception left held
                if not set_to_none:
                    pager.gradient_sync.synchronise()  # zeros take the place of all that is on its way
        units: dict[Unit, list[Placement]] = {}
        deeds: list[Callable[[], object]] = []
        for _, unit, placement in self._all():
            if set_to_none or is_spent(placement.grad):
                deeds.append(partial(unit.gradients.forget, placement))
            elif placement.grad is not None or unit.gradients.was_added_to(placement):
                units.setdefault(unit, []).append(placement)
        changes = bool(units) or any(unit.gradients.is_kept(placement) for _, unit, placement in self._all())
        self._decide(deeds, changes=changes)
        if set_to_none:
            for unit in self._units():  # also of one that no parameter shows, when an exception struck as it was stored
                unit.forget_gradients(kept=changes)
        else:
            for unit, placements in units.items():
                unit.apply_update()
                for placement in placements:
                    zero = torch.zeros((), dtype=placement.dtype, device="cpu")
                    unit.gradients.zero(placement, zero.expand(placement.shape))
                unit.gradients.close()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        self._refuse_in_backward("clip_grad_norm_")
        order = float(norm_type)
        for pager in self.pagers():
            pager.reset()
            pager.gradient_sync.synchronise()
        graded = self._graded()
        if not graded:
            return torch.tensor(0.0, dtype=torch.get_default_dtype(), device="cpu")  # as torch does
        graded.sort(key=lambda found: found[2].index)
        device = graded[0][2].parameter.device
        found = whole_norms(graded, order, listed=device.type != "cpu")  # what torch takes on a device
        norms: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
        for (_, _, placement), norm, there in zip(graded, found, torch.stack(found).to(device), strict=True):
            norms.setdefault(placement.whole, []).append(there.to(norm.dtype))
        slices = {placement.whole: len(placement.sliced.slices) for _, _, placement in graded if placement.sliced is not None}
        whole = [norm_of_parts(n, slices[p], order) if p in slices else n[0] for p, n in norms.items()]
        total: torch.Tensor = host(torch.linalg.vector_norm(torch.stack(whole), order))
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"The total norm of order {norm_type} of the gradients is not finite: {total.item()}")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        deeds = [unit.gradients.scaled(placement, factor) for _, unit, placement in graded]
        self._decide(deeds)
        return total

    def _graded(self) -> list[Located]:
        """Return the parameters that have a gradient. Raises InterruptedStep where one is not right."""
        found = self._all()
        for _, unit, placement in found:
            unit.gradients.refuse_interrupted(placement)
        return [one for one in found if one[2].grad is not None]

    def grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        found = placements_of(parameter)
        pager = found[0][0]
        pager.start()
        if not pager.computing:
            pager.gradient_sync.synchronise()
        gradients = [unit.gradient(placement) for _, unit, placement in found]
        if len(gradients) == 1 or all(gradient is None for gradient in gradients):
            return gradients[0]
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        for (_, _, placement), gradient in zip(found, gradients, strict=True):
            if gradient is not None:
                whole[_at(placement)].copy_(gradient)
        return whole

    def flush(self) -> None:
        for pager in self.pagers():
            pager.start_anew()
        for unit in self._units():
            unit.apply_update()

    def update_now(self, placement: Placement) -> tuple[Update, Callable[[], None]]:
        """Return the next step of a parameter whose gradient is complete within backward, and what counts it."""
        pager, unit, _ = placement_of(placement.parameter)
        pager.refuse_unresumed()
        step = self._next_step(unit, placement)

        def count() -> None:
            self.steps[placement] = step
            unit.counted_by[placement] = self._mark

        rule = self.optimizer.rule(self._group_number(placement))
        unit.keep_states({placement: forms_of(rule, unit.states.wide)})
        return Update(rule, step, *unit.gradients.factors(placement)), count

    def _next_step(self, unit: Unit, placement: Placement) -> int:
        """Return the number of a parameter's next step."""
        made = self.steps.get(placement, 0)
        if made:
            self._refuse_turns(unit, placement)
        return made + 1

    def _group_number(self, placement: Placement) -> int:
        """Return the number of the param group that a parameter is in now. Raises MisuseError where it is in none."""
        known, groups = self._group_of.get(placement, -1), self.groups
        if 0 <= known < len(groups) and any(one is placement.whole for one in groups[known]["params"]):
            return known
        for index, group in enumerate(groups):
            if any(one is placement.whole for one in group["params"]):
                self._group_of[placement] = index
                return index
        raise MisuseError(
            f"{placement.name!r} was taken out of the optimizer's param_groups, and update='in_backward' updates it as soon as "
            "its gradient is there: freeze it (requires_grad_(False)), or make a new optimizer"
        )

    def refuse_turns(self) -> None:
        """Raise MisuseError where another optimizer has made a step since this one did."""
        for _, unit, placement in self._all():
            self._refuse_turns(unit, placement)

    def is_superseded(self) -> bool:
        """Return whether other optimizers have counted the last steps of all parameters."""
        return all(unit.counted_by.get(placement, self._mark) is not self._mark for _, unit, placement in self._all())

    def _refuse_turns(self, unit: Unit, placement: Placement) -> None:
        """Raise MisuseError where this optimizer made a step of a parameter, and then another one did."""
        if self.steps.get(placement) and unit.counted_by.get(placement, self._mark) is not self._mark:
            raise MisuseError(
                f"another optimizer has updated {placement.name!r} since this one did, and its moments took the place of this "
                "one's: two optimizers cannot take turns on a paged parameter; use one, or load_state_dict into this one"
            )

    def unscale(self, factor: torch.Tensor) -> list[bool]:
        """Multiply all gradients by ``factor`` (0-d) when they are used; return for each whether it was finite before."""
        self._refuse_in_backward("GradScaler")
        for pager in self.pagers():
            pager.reset()
            pager.gradient_sync.synchronise()
        found = [unit.gradients.unscaled(placement, factor) for _, unit, placement in self._graded()]
        self._decide([unscale for _, unscale in found])
        return [finite for finite, _ in found]

    def _refuse_in_backward(self, what: str) -> None:
        """Raise MisuseError where the gradients are gone when ``step()`` is called."""
        if self.in_backward:
            raise MisuseError(
                f'{what} needs all gradients before the first update, and this optimizer updates during backward: make it with '
                'update="on_fetch"'
            )

    def _decide(self, deeds: Sequence[Callable[[], object]], *, changes: bool = True) -> None:
        """Do all of ``deeds`` or none. ``changes``: something that a commit has."""
        for pager in self.pagers() if changes else ():
            pager.checkpoint.note()
        all_or_none([pager.intent for pager in self.pagers()], deeds)

    # -- state -------------------------------------------------------------------------------------------------------------

    def state(self, own: Any) -> Any:
        return StateView(self._named, self._state_names, self._state_of)

    def refuse_states(self) -> None:
        raise MisuseError("optimizer.state is in the store: use load_state_dict, or make a new optimizer for new states")

    def _named(self) -> Iterator[tuple[torch.Tensor, str]]:
        return ((parameter, parameter.__dict__["_tiered"].name) for parameter in self.parameters)

    def _state_names(self, parameter: torch.Tensor) -> tuple[str, ...]:
        if not self._steps_of(parameter):
            return ()
        rule = self._rule_of(parameter)
        narrow = placements_of(parameter)[0][2].stored in (torch.bfloat16, torch.float16)
        master = narrow and not rounds_by_chance(rule)
        return (*scalars_of(rule, 1), *torch_names(rule, parameter.shape), *(["master"] if master else []))

    def _state_of(self, parameter: torch.Tensor, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        rule = self._rule_of(parameter)
        found = scalars_of(rule, self._steps_of(parameter))
        if names != ("step",):
            for pager in dict.fromkeys(pager for pager, _, _ in placements_of(parameter)):
                pager.start_anew()
            kept = self._copies_of(parameter)
            found |= {torch_name(rule, name): value.to(parameter.device) for name, value in kept.items()}
        return found

    def _rule_of(self, parameter: torch.Tensor) -> UpdateRule:
        for number, group in enumerate(self.groups):
            if any(one is parameter for one in group["params"]):
                return self.optimizer.rule_of(number)
        raise MisuseError("this parameter is in none of the optimizer's param_groups")

    def kept(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        self.flush()
        for parameter in self.parameters:
            yield self._steps_of(parameter), self._copies_of(parameter)

    def _steps_of(self, parameter: torch.Tensor) -> int:
        found = placements_of(parameter)
        for _, unit, placement in found:
            self._refuse_turns(unit, placement)
        return max(self.steps.get(placement, 0) for _, _, placement in found)

    def _copies_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        slices = placements_of(parameter)
        if not parameter.numel():  # nothing of it is in the store
            _, unit, placement = slices[0]
            forms, blank = unit.states.states_of(placement), unit.states.blank(placement) if placement in self.steps else {}
            whole = {name for name in blank if name not in forms or forms[name].elementwise}
            return {name: copy.reshape(parameter.shape) if name in whole else copy for name, copy in blank.items()}
        copies = [unit.state_copies(placement) for _, unit, placement in slices if placement in self.steps]
        if len(slices) == 1 or not copies:
            return copies[0] if copies else {}
        join = torch.stack if isinstance(_at(slices[0][2]), int) else torch.cat
        forms = slices[0][1].states.states_of(slices[0][2])
        blocked = {name for name, form in forms.items() if not form.elementwise}
        return {name: (torch.cat if name in blocked else join)([copy[name] for copy in copies]) for name in copies[0]}

    @contextmanager
    def loading(self, states: Mapping[int, Mapping[str, Any]], rules: Sequence[UpdateRule]) -> Iterator[None]:
        parameters = self.parameters
        for index, found in states.items():
            if index < len(parameters):
                shape = parameters[index].shape
                refuse_state(name_of(parameters[index]), shape, found, rules[index], type(self.optimizer).__name__)
        pagers = self.pagers()
        for pager in pagers:
            pager.intent.spoil(HALF_LOADED)
        try:
            yield
        except ValueError:  # other param groups: nothing has changed
            for pager in pagers:
                pager.intent.spoil(None)
            raise

    def load(
        self, states: Mapping[int, Mapping[str, torch.Tensor]], steps: Mapping[int, int], rules: Sequence[UpdateRule]
    ) -> Sequence[int]:
        loaded = {}
        for index, parameter in enumerate(self.parameters):
            slices = placements_of(parameter)
            for _, unit, placement in slices if index in states else ():
                state = dict(states[index])
                if placement.sliced is not None:
                    state = _of_slice(placement, state, forms_of(rules[index], unit.states.wide))
                unit.load_state(placement, state)
                unit.counted_by[placement] = self._mark
                loaded[placement] = steps[index]
        self.steps = loaded
        for pager in self.pagers():
            pager.stepped_by(self.optimizer)  # the states are its own from here on
            pager.intent.spoil(None)
        return ()


_Forms = dict[tuple[int, torch.dtype], Mapping[str, StateForm]]
"""What rules keep, by their number and the type in which they update."""


def _keep(unit: Unit, updates: Mapping[Placement, Update], known: _Forms) -> None:
    """Have parameters keep what the rules of their updates keep; ``known``: of rules that were asked before."""
    wide = unit.states.wide
    for update in updates.values():
        if (id(update.rule), wide) not in known:
            known[id(update.rule), wide] = forms_of(update.rule, wide)
    unit.keep_states({placement: known[id(update.rule), wide] for placement, update in updates.items()})


def _sliced(found: Sequence[Located]) -> list[list[Located]]:
    """Return those of ``found`` that are slices, by what they are slices of."""
    by: dict[Sliced, list[Located]] = {}
    for one in found:
        if one[2].sliced is not None:
            by.setdefault(one[2].sliced, []).append(one)
    return list(by.values())


def refuse_masters(name: str, stored: torch.dtype, rule: UpdateRule) -> None:
    """Raise MisuseError where ``rule`` rounds by chance what is not bf16."""
    if rounds_by_chance(rule) and stored is not torch.bfloat16:
        raise MisuseError(
            f"{type(rule).__name__} rounds bfloat16 parameters by chance, and {name!r} is {stored}: give it a param group with "
            "another rule"
        )


def _refuse_cut_blocks(placement: Placement, plan: UnitPlan, rule: UpdateRule) -> None:
    """Raise MisuseError where a parameter is divided within blocks for which ``rule`` keeps states."""
    block = max((form.block for form in forms_of(rule, torch.float32).values()), default=SMALLEST_BLOCK)
    if block in (SMALLEST_BLOCK, WHOLE):
        return
    what = f"{type(rule).__name__} keeps states for blocks of {block} elements, and {placement.name!r} is divided among"
    mend = "take zero.AdamW for it, with moments=torch.bfloat16 where its states are to be smaller"
    if plan.shares > 1 and plan.step % block:
        why = "as earlier releases did and as very many ranks with little memory do, " if plan.step < SHARE_STEP else ""
        raise MisuseError(f"{what} ranks at multiples of {plan.step} elements, {why}which may be within a block: {mend}")
    if placement.sliced is not None and placement.numel % block and placement.number < len(placement.sliced.slices) - 1:
        raise MisuseError(f"{what} slices of {placement.numel} elements, each of which ends within a block: {mend}")


def _refuse_cut_matrix(pager: Pager, unit: Unit, placement: Placement, rule: UpdateRule, in_backward: bool) -> None:
    """Raise MisuseError where ``rule`` updates whole parameters and one is no matrix, or is divided; CapacityError where there
    is not enough memory for one."""
    states = forms_of(rule, unit.states.wide)
    if not are_of_whole(states):
        return
    matrices = getattr(rule, "granularity", "") == "matrix"
    what = f"{type(rule).__name__} updates whole {'matrices' if matrices else 'parameters'}, and {placement.name!r}"
    if placement.sliced is not None:
        raise MisuseError(f"{what} is divided into slices: give it a param group with another rule, or more dram= to the store")
    if matrices and len(placement.shape) != 2:
        raise MisuseError(f"{what} has the shape {tuple(placement.shape)}: give it a param group with another rule")
    cut = placement in unit.plan.cut
    if cut and in_backward:
        raise MisuseError(
            f"{what} is divided among ranks, which gather it for its update in one order: make the optimizer with "
            'update="on_fetch"'
        )
    tiers = [tier for tier in pager.store.statistics().tiers if tier.name in ("dram", pager.update_tier)]
    smallest = min(tiers, key=lambda tier: tier.capacity)
    pool, name = smallest.capacity, smallest.name
    part = unit.parts.get(placement)
    own = 0 if part is None else unit.states.needed(part, states)
    needed = -(-(3 * unit.plan.nbytes + own) // 4096) * 4096
    if pool < needed:
        raise CapacityError(
            f"{what} of shape {tuple(placement.shape)} has to be in memory with its unit, the gradients and its states: that "
            f"takes {needed:,} bytes of {name.upper()}, and the store has {pool:,}: open it with {name}={needed}, or give the "
            "parameter another rule"
        )
    beside = int(getattr(rule, "workspace", 0)) * placement.numel
    if cut:  # what is gathered, one tensor at a time, and what becomes of it
        gathered = [unit.states.wide.itemsize] * 2 + [form.dtype.itemsize for form in states.values() if form.elementwise]
        beside += (sum(gathered) + unit.plan.shares * max(gathered)) * placement.numel
    refuse_little_room(pager.store, f"updating {placement.name!r} as a whole", largest=beside)


def _of_slice(
    placement: Placement, state: Mapping[str, torch.Tensor], forms: Mapping[str, StateForm]
) -> dict[str, torch.Tensor]:
    """Return of a parameter's state that of one slice."""
    assert placement.sliced is not None
    begin = placement.sliced.element(placement.number)
    return {
        name: value[_at(placement)]
        if name not in forms or forms[name].elementwise
        else value[forms[name].span(begin, begin + placement.numel, placement.shape)]
        for name, value in state.items()
    }


def _at(placement: Placement) -> int | slice:
    """Return the index of a slice in its parameter."""
    assert placement.sliced is not None
    return placement.sliced.at(placement.number)


def mixed(parameters: Sequence[torch.Tensor]) -> MisuseError:
    """Return the error for parameters of which some are paged. It says which the first one is that is not."""
    number, first = next((number, one) for number, one in enumerate(parameters) if not hasattr(one, "_tiered"))
    return MisuseError(
        f"some of these parameters are paged and others, as number {number}, of shape {tuple(first.shape)}, are not: make an "
        "optimizer for each kind, with store= for those that stay in memory, or page the whole model (a module that was added "
        "after zero.page stays in memory, and resize_token_embeddings makes a head anew that is not tied: resize before)"
    )


def pagers_of_params(params: Sequence[Any]) -> list[Pager]:
    """Return the pagers of paged parameters: of those, by name or alone, or of param groups."""
    groups = [group.get("params") for group in params if isinstance(group, dict)]
    given = [parameter for group in groups if isinstance(group, list | tuple) for parameter in group] if groups else params
    given = [*given, *(group for group in groups if isinstance(group, torch.Tensor))]
    alone = (one[1] if isinstance(one, tuple) and len(one) > 1 else one for one in given)
    paged = (parameter for parameter in alone if isinstance(parameter, torch.Tensor) and hasattr(parameter, "_tiered"))
    return list(dict.fromkeys(pager_of_parameter(parameter) for parameter in paged))


def _refuse_little_room(params: Sequence[Any]) -> None:
    """Raise CapacityError where a memory cgroup leaves no room for the gradients of paged parameters, which are whole in
    ordinary memory before they are stored: one at a time, or two of one that several modules share."""
    for pager in pagers_of_params(params):
        named = [parameter for _, parameter in pager.model.named_parameters(remove_duplicate=False)]
        uses = Counter(id(parameter) for parameter in named)
        gradients = [p.nbytes * min(max(uses[id(p.parameter)], 1), 2) for p in pager.placements if p.parameter.requires_grad]
        largest = max(gradients, default=0)
        refuse_little_room(pager.store, "training this model", largest=largest, more=compiler())
