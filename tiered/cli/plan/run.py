"""``tiered plan`` from its options to what it prints: the model, the machine, the plan, and its picture."""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import tiered
from tiered.cli.arguments import Parser
from tiered.cli.output import INTERVAL, Progress, counted, refuse_unplottable, refuse_unwritable, table, write_report
from tiered.cli.plan.generation import print_generation
from tiered.cli.plan.plot import plot
from tiered.cli.stop import Stopped, StopRequest
from tiered.cli.train.model import Shape, build
from tiered.cli.train.options import default_of
from tiered.measuring.meters import environment
from tiered.measuring.probes import measured_machine
from tiered.planning.machine import Machine
from tiered.planning.plan import Plan, Prediction, Told
from tiered.planning.sources import Numbers, adapted, model_of_folder
from tiered.store.opening import SMALLEST_DRAM, budget_of
from tiered.types import format_size

__all__ = ["describe", "planned"]

POINTS = 5
"""Budgets of the picture, from the smallest to the one that holds everything."""


def planned(parsed: argparse.Namespace) -> int:
    """Plan, print, and draw; returns the exit code: 0 also where the model does not fit, which is an answer."""
    parser: Parser = parsed.parser
    refuse_unplottable(parsed.plot, (".svg", ".png"))
    refuse_unwritable(parsed.json)
    if parsed.dram is not None:
        budget_of("a DRAM", parsed.dram, SMALLEST_DRAM)
    if parsed.generate:
        _refuse_options_of_training(parsed, parser)
    if parsed.lora is not None and parsed.model is None:
        parser.error("--lora is of a model of transformers: name MODEL, a folder with its config.json, or org/name")
    if parsed.quantize is not None and parsed.lora is None and not parsed.generate:
        parser.error("--quantize packs what adapters are trained for: give --lora RANK (--generate plans each form)")
    model = _model(parsed, parser)
    if parsed.hbm and parsed.machine is None:
        parser.error("--hbm needs --machine FILE, which has the device's rates and those of its link")
    if parsed.update_tier == "hbm":
        parser.error("--update-tier hbm is not planned: a plan is of updates on the host")
    if parsed.ranks and parsed.machine is None and not parsed.measure:
        parser.error("--ranks needs a machine: leave out --no-measure, or give --machine")
    try:
        with StopRequest() as stop, Progress(sys.stderr, quiet=INTERVAL) as progress:

            def told(what: str, share: float) -> None:
                stop.check()
                progress.working(what, share)

            if parsed.generate:
                assert isinstance(model, nn.Module)
                print_generation(parsed, model, _machine(parsed, told))
                return 0
            plan = _planned(parsed, model, told)
    except Stopped as stopped:
        print("tiered: stopped; nothing was left behind", file=sys.stderr)
        return stopped.exit_code
    if parsed.json != "-":
        print(parser.in_options(describe(plan)).replace(", --", " --"))  # which can be copied into a command line
    if parsed.plot is not None and plan.chosen is not None:
        plot(parsed.plot, plan)
        print(f"\npicture   {parsed.plot}", file=sys.stderr if parsed.json == "-" else sys.stdout)
    write_report(parsed.json, environment() | plan.as_json())
    return 0


def _refuse_options_of_training(parsed: argparse.Namespace, parser: Parser) -> None:
    if parsed.model is None:
        parser.error("--generate is of a model of transformers: name MODEL, a folder with its config.json, or org/name")
    how = "optimizer", "update", "activations", "micro_batch", "accumulate", "lora", "quantize"
    outcome = "ranks", "rated_life", "network", "optimum", "plot"
    given = [f"--{name.replace('_', '-')}" for name in (*how, *outcome) if getattr(parsed, name)]
    if given:
        parser.error(f"{', '.join(given)}: of a training, and --generate plans none")


def _planned(parsed: argparse.Namespace, model: nn.Module | Numbers, told: Told) -> Plan:
    machine = _machine(parsed, told)
    here = parsed.machine is None and machine is not None
    batch, context = parsed.batch or default_of("batch"), parsed.context or default_of("context")
    asked: dict[str, Any] = {
        "workload": tiered.Workload(batch, context, accumulate=parsed.accumulate or 1), "machine": machine, "dram": parsed.dram,
        "optimizer": parsed.optimizer or "adamw", "update": parsed.update, "activations": parsed.activations,
        "micro_batch": parsed.micro_batch, "quantize": parsed.quantize, "measure": here, "progress": told,
    }
    plan = tiered.plan(model, **asked, sweep=tiered.Sweep(ranks=parsed.ranks), optimum=parsed.optimum)
    if parsed.plot is not None and plan.chosen is not None:
        choice = plan.chosen.choice
        mode = {"activations": choice.activations, "micro_batch": choice.micro_batch}
        curve = tiered.plan(model, **{**asked, **mode}, sweep=tiered.Sweep(_budgets(plan))).curve
        plan = replace(plan, curve=curve)
    if parsed.model is not None:
        plan = replace(plan, model=os.path.basename(os.path.abspath(parsed.model)))
    return plan


def _model(parsed: argparse.Namespace, parser: Parser) -> nn.Module | Numbers:
    """Return what is planned for: the model of a folder, numbers, or the model of ``tiered train``. What is wrong with it is
    said before anything is measured."""
    numbers = {name: getattr(parsed, name) for name in ("layers", "width", "heads", "vocabulary")}
    if parsed.model is not None:
        given = [f"--{name}" for name, value in numbers.items() if value is not None]
        if given:
            parser.error(f"{', '.join(given)}: the config.json of MODEL says that")
        model = model_of_folder(parsed.model)
        if parsed.dtype is not None:
            model = model.to(getattr(torch, parsed.dtype))
        return model if parsed.lora is None else adapted(model, parsed.lora)
    shape = {name: numbers[name] or default_of(name) for name in ("layers", "width", "heads")}
    if shape["width"] % shape["heads"]:
        parser.error(f"--width {shape['width']} is not a multiple of --heads {shape['heads']}")
    if numbers["vocabulary"] is not None or parsed.dtype is not None:
        return Numbers(**shape, vocabulary=numbers["vocabulary"] or 256, dtype=parsed.dtype or "float32")
    return build(Shape(**shape, context=parsed.context or default_of("context")))


def _machine(parsed: argparse.Namespace, told: Told) -> Machine | None:
    if parsed.machine is not None:
        machine = Machine.of(parsed.machine)
    elif parsed.measure:
        machine = measured_machine(parsed.folder, progress=told, of="generation" if parsed.generate else "training")
    else:
        return None
    if parsed.rated_life is not None:
        machine = machine.but(rated_life=float(parsed.rated_life))
    if parsed.hbm is not None:
        machine = machine.but(hbm=parsed.hbm)
    return machine if parsed.network is None else machine.but(network=parsed.network * 1e9)


def _budgets(plan: Plan) -> list[int]:
    """Return budgets from a sixteenth of all bytes of the state, or the smallest that works, to one that holds everything."""
    assert plan.chosen is not None
    memory = plan.chosen.memory
    most = int(1.1 * (memory.parameters + memory.states + memory.gradients)) + (4 << 20)
    least = max(plan.smallest, most // 16)
    steps = [least * (most / least) ** (number / (POINTS - 1)) for number in range(POINTS)]
    return sorted({math.ceil(one / 4096) * 4096 for one in (*steps, plan.chosen.choice.dram)})


def describe(plan: Plan) -> str:
    """Format a plan on one screen."""
    lines = [f"model     {plan.model} of {plan.parameters:,} parameters, {_tokens(plan)}{plan.optimizer}"]
    machine = plan.machine
    if machine is not None:
        named = f"{machine.name}: " if machine.name else ""
        lines.append(
            f"machine   {named}drive {machine.read / 1e9:.2f} GB/s read, {machine.write / 1e9:.2f} written; "
            f"products {machine.flops / 1e9:,.0f} GFLOP/s"
        )
        if machine.hbm:
            lines.append(
                f"          a device of {format_size(machine.hbm)}: products {machine.device_flops / 1e9:,.0f} GFLOP/s, "
                f"its link {machine.link / 1e9:.2f} GB/s"
            )
    found = plan.chosen
    if found is None:
        lines.append(f"fits      no: {plan.refused}")
        return "\n".join([*lines, *_listed("would fit", plan.changes)])
    if plan.refused is None:
        least = f"; the smallest budget is {format_size(plan.smallest)}"
        if plan.smallest < plan.enough:
            least = f"; {format_size(plan.enough)} are enough, and {format_size(plan.smallest)} the least that works, slowly"
        device = f" and {format_size(found.memory.device)} of the device" if found.memory.device else ""
        lines.append(f"fits      with {format_size(found.choice.dram)} of DRAM{device}{least}")
    else:
        lines += [f"fits      no: {plan.refused}", *_listed("would fit", plan.changes)]
    lines += [*_memory(found, plan), *_step(found, plan), *_offloading(found)]
    if len(plan.others):
        lines += ["", _modes([found, *plan.others], bool(found.seconds))]
    if plan.ranks:
        lines += ["", _ranks(plan)]
    if plan.refused is None:
        lines += _listed("faster", plan.changes)
    return "\n".join([*lines, *_listed("note", plan.notes)])


def _tokens(plan: Plan) -> str:
    return f"{plan.tokens:,} tokens a step, " if plan.tokens else ""


def _listed(label: str, lines: tuple[str, ...]) -> list[str]:
    return [f"{label if number == 0 else '':9} {line}" for number, line in enumerate(lines)]


def _memory(found: Prediction, plan: Plan) -> list[str]:
    memory = found.memory
    base = f", {format_size(plan.machine.base)} of it imports" if plan.machine is not None else ", and its imports"
    activations = f"activations {format_size(memory.activations)}"
    inside = "" if memory.device else f"{activations}, "
    lines = [
        f"state     parameters {format_size(memory.parameters)}, gradients {format_size(memory.gradients)}, optimizer "
        f"{format_size(memory.states)}; on the drive {format_size(memory.drive)}",
        f"process   {format_size(memory.process)}: pool {format_size(memory.pool)}, {inside}workspace "
        f"{format_size(memory.workspace)}{base}",
    ]
    if memory.device:
        beside = format_size(memory.device - memory.activations)
        lines.append(f"device    {format_size(memory.device)}: {activations}, parameters {beside}")
    return lines


def _step(found: Prediction, plan: Plan) -> list[str]:
    moved = found.read + found.written
    beside = f" ({moved / found.least_bytes:.2f} x the best plan on demand)" if found.least_bytes else ""
    if found.optimum:
        beside = f" ({moved / found.optimum:.2f} x what no plan goes below)"
    lines = [f"drive     {found.read / 1e9:.2f} GB read, {found.written / 1e9:.2f} GB written a step{beside}"]
    if not found.seconds:
        return lines
    kinds = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in found.by_work.items() if seconds >= 0.005)
    lines.append(
        f"step      {found.seconds:.2f} s: {kinds}, waiting {found.waiting:.2f}; the drive works {found.drive_busy:.2f} s of it"
    )
    if found.sending:
        decides = ", which decides" if found.sending >= found.seconds else ", beside computing"
        lines.append(f"link      to the device works {found.sending:.2f} s of a step{decides}")
    life = plan.days_of_life
    rated = f"; its rated life lasts {life:,.0f} days" if life is not None else ""
    lines.append(f"a day     {86_400 / found.seconds:,.0f} steps, {plan.written_per_day / 1e12:.2f} TB written{rated}")
    return lines


def _offloading(found: Prediction) -> list[str]:
    """Say what of the activations goes through the store, and whether the drive hides that."""
    moved = found.offloading
    if moved is None or not moved.stored:
        return []
    line = (
        f"store     {moved.stored / 1e9:.2f} GB of activations a step; of {moved.restored / 1e9:.2f} that come back "
        f"{moved.hidden / max(1.0, moved.restored):.0%} are there in time"
    )
    hidden = found.hides_activations
    if found.in_memory is None or hidden is None:
        return [line]
    return [
        f"{line}, {moved.waited:.2f} s of waiting; with activations in memory a step takes {found.in_memory:.2f} s: the drive "
        f"{'hides' if hidden else 'does not hide'} them"
    ]


def _modes(found: list[Prediction], timed: bool) -> str:
    divided = any(one.choice.micro_batch > 1 for one in found)
    device, misfits = any(one.memory.device for one in found), not all(one.fits for one in found)
    beside = [*(["device"] if device else []), *(["fits"] if misfits else [])]
    parts = ["parts"] if divided else []
    rows = [["update", "activations", *parts, *(["s/step"] if timed else []), "GB/step", "process", *beside]]
    for one in found:
        seconds = [f"{one.seconds:.2f}"] if timed else []
        moved = f"{(one.read + one.written) / 1e9:.2f}"
        parts = [str(one.choice.micro_batch)] if divided else []
        beside = [format_size(one.memory.device)] if device else []
        beside += ["yes" if one.fits else "no"] if misfits else []
        rows.append(
            [one.choice.update, one.choice.activations, *parts, *seconds, moved, format_size(one.memory.process), *beside]
        )
    return table(rows, "ll" + "r" * (len(rows[0]) - 2))


def _ranks(plan: Plan) -> str:
    misfits = [one for one in plan.ranks if not one.fits]
    head = ["ranks", "s/step", "tokens/s", "GB sent", "GB drive", "waiting", "exchange", "process", "a node"]
    rows = [[*head, *(["fits"] if misfits else [])]]
    for one in plan.ranks:
        moved = f"{(one.read + one.written) / 1e9:.2f}"
        numbers = f"{one.seconds:.2f}", f"{one.tokens_per_second:,.0f}", f"{one.sent / 1e9:.2f}", moved
        row = [f"{one.ranks:,}", *numbers, f"{one.waiting:.2f}", f"{one.network:.2f}"]
        row += [format_size(one.process), format_size(one.node), *(["yes" if one.fits else "no"] if misfits else [])]
        rows.append(row)
    lines = [table(rows, "r"), *(one.refused for one in misfits if one.refused is not None)]
    fitting = [one.ranks for one in plan.ranks if one.fits]
    if len(fitting) > 1:
        stops, half = plan.stops_paying, "half of the tokens a second that they would bring at best"
        if stops:
            lines.append(f"more than {counted(stops, 'rank')} do not pay: the ranks that are added bring less than {half}")
        else:
            lines.append(f"each step up to {fitting[-1]:,} ranks pays: the ranks that it adds bring at least {half}")
    return "\n".join(lines)
