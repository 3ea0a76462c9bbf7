"""Draws curves as SVG text, without scripts and without other files."""

from collections.abc import Sequence
from html import escape
from math import floor, isfinite, log10

from msgspec import Struct

WIDTH, HEIGHT = 520, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
COLOURS = ("#2f6fde", "#d9822b", "#2e9e6b", "#b0479a", "#6c757d", "#c0392b", "#8e6cc9")
_MAX_POINTS = 400


class Line(Struct, frozen=True):
    """One curve; `errors` draws a bar at each point."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    errors: Sequence[float] = ()


def draw(lines: Sequence[Line]) -> str:
    """Return a chart of some curves over steps."""
    lines = [_thin(line) for line in lines if line.steps]
    highs = [v + e for line in lines for v, e in zip(line.values, _errors(line), strict=True) if isfinite(v)]
    lows = [v - e for line in lines for v, e in zip(line.values, _errors(line), strict=True) if isfinite(v)]
    if not highs:
        return ""
    low, high = min(lows), max(highs)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    last = max(1, *(line.steps[-1] for line in lines))

    def x(step: float) -> float:
        return _LEFT + step / last * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    for step in (0, last):
        anchor = "start" if step == 0 else "end"
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>')
    for line, colour in zip(lines, COLOURS * len(lines), strict=False):
        points = list(zip(line.steps, line.values, _errors(line), strict=True))
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value, _ in points if isfinite(value))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for step, value, error in points if line.errors else ():
            top, bottom = y(value + error), y(value - error)
            parts.append(
                f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="{colour}"/>'
            )
            parts.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}"/>')
    return "".join([*parts, "</svg>", _legend(lines)])


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between two values."""
    raw = (high - low) / 4
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = -(-low // step)
    found = []
    while first * step <= high + step * 1e-9:
        found.append(first * step)
        first += 1
    return found


def _errors(line: Line) -> Sequence[float]:
    return line.errors or [0.0] * len(line.values)


def _thin(line: Line) -> Line:
    stride = -(-len(line.steps) // _MAX_POINTS)
    if stride <= 1:
        return line
    return Line(line.name, line.steps[::stride], line.values[::stride], line.errors[::stride])


def _legend(lines: Sequence[Line]) -> str:
    names = (
        f'<span><i style="background:{colour}"></i>{escape(line.name)}</span>'
        for line, colour in zip(lines, COLOURS * len(lines), strict=False)
    )
    return f'<p class="legend">{"".join(names)}</p>'
