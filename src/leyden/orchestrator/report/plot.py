"""Plots a run's reward in training and on the held-out tasks, as a PNG and as text for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HEIGHT, _WIDTH = 10, 60
_HELD_OUT, _TRAIN = "●", "·"

Points = list[tuple[int, float]]


def metric_points(lines: Sequence[dict[str, Any]], name: str) -> Points:
    """Return step and value of a metric for each line of a metrics file that has it."""
    return [(line["step"], line[name]) for line in lines if name in line]


def draw_image(lines: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot the metrics into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label, style in (("reward/mean", "training", "-"), ("held_out/reward", "held out", "o-")):
        points = metric_points(lines, name)
        if points and style == "-":
            axes.plot(*zip(*points, strict=True), style, label=label, alpha=0.5)
        elif points:
            errors = dict(metric_points(lines, "held_out/error"))
            bars = [errors.get(step, 0.0) for step, _ in points]
            label = f"{label} ± standard error{_rollouts(lines)}"
            steps, values = [step for step, _ in points], [value for _, value in points]
            axes.errorbar(steps, values, yerr=bars, fmt=style, label=label, alpha=0.9, capsize=2)
    axes.set(xlabel="step", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _rollouts(lines: Sequence[dict[str, Any]]) -> str:
    """Return of how many rollouts an evaluation is the mean."""
    counted = metric_points(lines, "held_out/counted")
    return f", {counted[-1][1]:.0f} rollouts each" if counted else ""


def draw_text(lines: Sequence[dict[str, Any]]) -> str:
    """Plot the metrics in characters."""
    train, held_out = metric_points(lines, "reward/mean"), metric_points(lines, "held_out/reward")
    points = train + held_out
    if not points:
        return "no rewards yet"
    low, high = min(value for _, value in points), max(value for _, value in points)
    last = max(max(step for step, _ in points), 1)
    grid = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for series, mark in ((train, _TRAIN), (held_out, _HELD_OUT)):
        for step, value in series:
            y = round((high - value) / ((high - low) or 1) * _HEIGHT)
            grid[y][round(step / last * _WIDTH)] = mark
    labels = {0: f"{high:.2f}", _HEIGHT: f"{low:.2f}"}
    text = [f"{labels.get(y, ''):>6} │{''.join(cells).rstrip()}" for y, cells in enumerate(grid)]
    text.append(f"{'':>6} └{'─' * _WIDTH}")
    text.append(f"{'':>8}step 0{f'step {last}':>{_WIDTH - 6}}")
    text.append(f"{'':>8}{_TRAIN} training" + (f"  {_HELD_OUT} held out{_spread(lines)}" if held_out else ""))
    return "\n".join(text)


def _spread(lines: Sequence[dict[str, Any]]) -> str:
    """Return the error of the last evaluation and the rollouts that it rests on."""
    errors = metric_points(lines, "held_out/error")
    return f" (± {errors[-1][1]:.3f}{_rollouts(lines)})" if errors else ""
