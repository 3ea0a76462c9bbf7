"""Branches after the calls of which the model was least certain, in comparison with the other rollouts of the group."""

from statistics import fmean

from leyden.config import Hyperparameters
from leyden.records import Call
from leyden.rl.branch import Point
from leyden.rl.registry import branch


@branch(reads=("branch_points",))
def uncertain(point: Point, hyperparameters: Hyperparameters) -> bool:
    """After a call whose mean -logprob is among the highest of the others': `branch_points` for each of them."""
    others = sorted((_surprise(call) for calls in point.others for call in calls), reverse=True)
    counted = hyperparameters.branch_points * len(point.others)
    return bool(others) and _surprise(point.calls[-1]) >= others[min(counted, len(others)) - 1]


def _surprise(call: Call) -> float:
    """Return the mean negative logprob of a call's tokens; 0 if it is not known."""
    return -fmean(call.logprobs) if call.logprobs else 0.0
