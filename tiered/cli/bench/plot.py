"""Pictures of ``tiered bench io --plot``, drawn from the same reports that ``--json`` writes. matplotlib is optional."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiered import __version__
from tiered.types import exact_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_rounds", "plot_sustained", "plot_sweep"]

Report = Mapping[str, Any]
STYLES = ("-", "--", ":", "-.")


def plot_rounds(path: str, report: Report) -> None:
    """Draw a bar for the rate of each mode, ours and fio's, with the least and the most."""
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    modes = report["modes"]
    names = [name for name in next(iter(modes.values())) if name != "ratios"]
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        spreads = [found[name]["bytes_per_second"] for found in modes.values()]
        middle = [spread["median"] / 1e9 for spread in spreads]
        below = [(spread["median"] - spread["min"]) / 1e9 for spread in spreads]
        above = [(spread["max"] - spread["median"]) / 1e9 for spread in spreads]
        places = [place + (at - (len(names) - 1) / 2) * width for place in range(len(modes))]
        axes.bar(places, middle, width * 0.9, yerr=[below, above], capsize=3, label=name)
    axes.set_xticks(range(len(modes)), list(modes))
    axes.set_ylabel("GB/s: median, least, most")
    axes.legend()
    _save(figure, path, report)


def plot_sweep(path: str, report: Report) -> None:
    """Draw a panel for each mode and order: the rate by depth, a colour for each backend, a line style for each block."""
    points: Sequence[Report] = report["points"]
    names = list(dict.fromkeys(name for point in points for name in point["by"]))
    blocks = list(dict.fromkeys(point["block_bytes"] for point in points))
    depths = sorted({point["depth"] for point in points})
    panels = list(dict.fromkeys((point["mode"], point["order"]) for point in points))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(5 * columns + 2, 3.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    shown: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for name, block, checksums in itertools.product(names, blocks, ("off", "on")):
            rates = {
                point["depth"]: point["by"][name]["bytes_per_second"]["median"] / 1e9
                for point in points
                if (point["mode"], point["order"]) == panel
                and (point["block_bytes"], point["checksums"]) == (block, checksums)
                and name in point["by"]
            }
            if rates:
                (line,) = axes.plot(
                    sorted(rates),
                    [rates[depth] for depth in sorted(rates)],
                    color=f"C{names.index(name)}",
                    linestyle=STYLES[blocks.index(block) % len(STYLES)],
                    marker="x" if checksums == "on" else "o",
                    markersize=4,
                )
                shown.setdefault(f"{name} {exact_size(block)}{' checked' if checksums == 'on' else ''}", line)
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, list(map(str, depths)))
        axes.set_ylim(bottom=0)
        axes.set_title(", ".join(panel))
        axes.set_xlabel("depth")
        axes.set_ylabel("GB/s")
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize="small")
    _save(figure, path, report)


def plot_sustained(path: str, report: Report) -> None:
    """Draw the rate over time."""
    figure = _figure(8, 4)
    axes = figure.subplots()
    windows = report["sustained"]["windows"]
    edges = [windows[0]["began_seconds"], *(window["ended_seconds"] for window in windows)]
    axes.stairs([window["bytes_per_second"] / 1e9 for window in windows], edges, baseline=None)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GB/s written")
    _save(figure, path, report)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: str, report: Report) -> None:
    io = f"{report['backend']} on " if "backend" in report else ""
    nbytes = report["size_bytes"] if "size_bytes" in report else report.get("tensors", 0) * report.get("tensor_bytes", 0)
    size = f"{exact_size(nbytes)}, " if nbytes else ""
    figure.suptitle(
        f"{io}{report['filesystem'] or 'an unknown filesystem'}, {report['kernel']}, {report['cores']} cores\n"
        f"{size}tiered {report['tiered']}, {report['date'][:10]}"
    )
    figure.savefig(path, format="png", dpi=120, metadata={"Software": f"tiered bench {__version__}"})
