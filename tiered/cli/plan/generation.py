"""What ``tiered plan --generate`` prints: what a token takes, in each form of the weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict

from torch import nn

from tiered.cli.output import counted, rate, table, write_report
from tiered.measuring.meters import environment
from tiered.planning.generation import FORMS, PlannedTokens, PlannedWeights, Sequences, plan_generation, weights_of
from tiered.planning.machine import Machine
from tiered.planning.sources import beyond_positions, packed_by
from tiered.store.opening import SMALLEST_DRAM, default_dram
from tiered.types import format_size

__all__ = ["print_generation"]


def print_generation(parsed: argparse.Namespace, model: nn.Module, machine: Machine | None) -> None:
    """Plan tokens of ``model``, and print or write what was found."""
    weights = weights_of(model)
    conversation = Sequences(parsed.context or Sequences.tokens, parsed.batch or 1)
    half = max(SMALLEST_DRAM, machine.dram // 2) if machine is not None and machine.dram else default_dram()
    dram = parsed.dram or half
    asked, dram = dram, max(dram, weights.least[next(iter(FORMS))])
    found = plan_generation(weights, machine, dram, conversation, FORMS)
    name = os.path.basename(os.path.abspath(parsed.model))
    if parsed.json != "-":
        print(_described(name, weights, machine, asked, conversation, found))
        if (beyond := beyond_positions(model, conversation.tokens)) is not None:
            print(f"note      {beyond}")
        if method := packed_by(parsed.model):
            print(
                f"note      the files have packed weights ({method}), which an import takes as they are, in fewer bytes than "
                "the row 'as it is' says: take the row with as many bits a weight"
            )
    budget = {"dram": asked, "planned_dram": dram, "fits": asked == dram}
    report = {"model": name, **budget, "weights": asdict(weights), "conversation": asdict(conversation)}
    forms = [asdict(one) | {"seconds": one.seconds, "limit": one.limit} for one in found]
    write_report(parsed.json, environment() | report | {"machine": machine and asdict(machine), "forms": forms})


def _described(
    name: str, weights: PlannedWeights, machine: Machine | None, dram: int, conversation: Sequences,
    found: Sequence[PlannedTokens],
) -> str:
    first = found[0]
    some = f", of which a token uses {weights.used / weights.parameters:.0%}" if weights.used < weights.parameters else ""
    lines = [f"model     {name} of {weights.parameters:,} parameters{some}; {format_size(round(weights.nbytes))} of weights"]
    if machine is not None:
        device = ""
        if machine.hbm:
            device = f"; a device of {format_size(machine.hbm)}, {rate(machine.link)} to it"
        named = f"{machine.name}: " if machine.name else ""
        lines.append(f"machine   {named}drive {machine.read / 1e9:.2f} GB/s read{device}")
    if dram < first.smallest:
        works = f"{first.smallest:,} bytes work, with which this is"
        lines.append(f"fits      no: {format_size(dram)} of DRAM is too little; {works}")
    else:
        lines.append(
            f"fits      with {format_size(dram)} of DRAM, from {format_size(first.smallest)} on; with "
            f"{format_size(round(first.holds))} nothing is read"
        )
    of = f"{conversation.tokens:,} tokens"
    if conversation.sequences > 1:
        of += f" of {counted(conversation.sequences, 'sequence')}"
    where = "of the device's memory" if machine is not None and machine.hbm else "of that"
    cache = f"keys and values of {of} take {format_size(first.cache)} {where}"
    lines.append(f"process   {format_size(round(first.process))}; {cache}")
    if machine is not None and machine.dram and first.process > machine.room:
        left = f"{format_size(machine.dram)} less {format_size(machine.dram - machine.room)} for the system"
        lines.append(f"          that is more than the machine has, {left}: lower --dram or --context")
    head = ["weights", "on the drive", "read a token", *(["to the device"] if machine is not None and machine.hbm else [])]
    rows = [[*head, *(["s a token", "tokens/s", "limit", "first token"] if machine is not None else [])]]
    for one in found:
        sent = [format_size(round(one.sent))] if machine is not None and machine.hbm else []
        row = [one.form, format_size(round(one.weights)), format_size(round(one.read)), *sent]
        if machine is not None:
            each = conversation.sequences / one.seconds
            row += [f"{one.seconds:.3g}", f"{each:.3g}", one.limit, f"{one.first:.3g} s"]
        rows.append(row)
    columns = "lrr" + ("r" if machine is not None and machine.hbm else "") + "rrlr"
    notes = [f"note      the first token is that after a prompt of {of}, a whole --context; a shorter one takes less"]
    if machine is None:
        notes = []
    packed = ", ".join([form for form in FORMS if FORMS[form] is not None])
    notes += [f"note      {packed}: inexact (tiered import --quantize); unpacking takes computing that is not planned"]
    if weights.experts:
        notes.append("note      experts are taken to be chosen evenly; routers have favourites, so a token reads less")
    return "\n".join([*lines, "", table(rows, columns), *notes])
