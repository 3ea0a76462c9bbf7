"""A run's curve: reward in training and on the tasks held out, as an image and in the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROWS, _COLUMNS = 10, 60
_HELD_OUT, _TRAIN = "●", "·"

Points = list[tuple[int, float]]


def metric_points(rows: Sequence[dict[str, Any]], name: str) -> Points:
    """The steps of a journal at which a number was written down, with the number."""
    return [(row["step"], row[name]) for row in rows if name in row]


def draw_image(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the curve into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label, style in (("reward/mean", "training", "-"), ("held_out/reward", "held out", "o-")):
        found = metric_points(rows, name)
        if found:
            axes.plot(*zip(*found, strict=True), style, label=label, alpha=0.9 if style == "o-" else 0.5)
    axes.set(xlabel="step", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_text(rows: Sequence[dict[str, Any]]) -> str:
    """Draw the curve in characters."""
    train, held_out = metric_points(rows, "reward/mean"), metric_points(rows, "held_out/reward")
    every = train + held_out
    if not every:
        return "no rewards yet"
    low, high = min(value for _, value in every), max(value for _, value in every)
    last = max(max(step for step, _ in every), 1)
    grid = [[" "] * (_COLUMNS + 1) for _ in range(_ROWS + 1)]
    for found, mark in ((train, _TRAIN), (held_out, _HELD_OUT)):
        for step, value in found:
            row = round((high - value) / ((high - low) or 1) * _ROWS)
            grid[row][round(step / last * _COLUMNS)] = mark
    labels = {0: f"{high:.2f}", _ROWS: f"{low:.2f}"}
    lines = [f"{labels.get(number, ''):>6} │{''.join(row).rstrip()}" for number, row in enumerate(grid)]
    lines.append(f"{'':>6} └{'─' * _COLUMNS}")
    lines.append(f"{'':>8}step 0{f'step {last}':>{_COLUMNS - 6}}   {_TRAIN} training  {_HELD_OUT} held out")
    return "\n".join(lines)
