"""Divides rollouts evenly, as long as the other rollouts of their group are."""

from statistics import fmean

from leyden.config import Hyperparameters
from leyden.rl.branch import Point
from leyden.rl.registry import branch


@branch(reads=("branch_points",))
def even(point: Point, hyperparameters: Hyperparameters) -> bool:
    """After k L / (points + 1) calls for k = 1, 2, ..., points, where others have L calls on average."""
    length = fmean(map(len, point.others)) if point.others else 0.0
    parts = hyperparameters.branch_points + 1
    return len(point.calls) in {max(1, round(number * length / parts)) for number in range(1, parts)}
