"""The picture of ``tiered plan --plot``: seconds of a step by budget, a line for each mode, and the choice. It needs
matplotlib, as the pictures of the other commands do."""

from __future__ import annotations

from tiered import __version__
from tiered.planning.plan import Plan, Prediction
from tiered.types import format_size

__all__ = ["plot"]


def plot(path: str, plan: Plan) -> None:
    """Draw ``plan.curve`` as the file ``path``, which is .svg or .png. Where no time is known, bytes take its place."""
    from matplotlib.figure import Figure

    assert plan.chosen is not None
    timed = bool(plan.chosen.seconds)

    def height(one: Prediction) -> float:
        return one.seconds if timed else (one.read + one.written) / 1e9

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, update in enumerate(dict.fromkeys(one.choice.update for one in plan.curve)):
        line = [one for one in plan.curve if one.choice.update == update]
        axes.plot([one.choice.dram for one in line], [height(one) for one in line], marker="o", label=update, zorder=2)
        if timed:
            axes.plot(
                [one.choice.dram for one in line], [one.processor for one in line],
                linestyle=":", color=f"C{number}", label=f"{update}, without waiting", zorder=1,
            )
    chosen = plan.chosen.choice
    parts = f" in {chosen.micro_batch} parts" if chosen.micro_batch > 1 else ""
    what = f"chosen: {chosen.update}, {chosen.activations}{parts}, {format_size(chosen.dram)}"
    axes.plot([chosen.dram], [height(plan.chosen)], marker="*", markersize=16, color="black", linestyle="", label=what)
    axes.axvline(plan.smallest, color="grey", linewidth=0.8, linestyle="--", label="smallest budget")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: format_size(value))
    axes.set_xlabel("budget of DRAM")
    axes.set_ylabel("seconds a step" if timed else "GB a step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.suptitle(f"{plan.model}, {plan.parameters:,} parameters, {plan.optimizer}")
    kind = path.rpartition(".")[2]
    stamp = {"Creator" if kind == "svg" else "Software": f"tiered plan {__version__}"}
    figure.savefig(path, format=kind, dpi=120, metadata=stamp)
