"""Proximal policy optimisation's advantage: better than the critic had expected, over all of the update."""

from leyden.rl.advantage import Calls, Floats, over
from leyden.rl.terms import Terms


def ppo(calls: Calls, terms: Terms) -> Floats:
    """A = (D - mean) / deviation, both of the update's part, D = V - the critic's value."""
    surprise = calls.value - calls.baseline
    return over(surprise - calls.mean(surprise, calls.part), calls.deviation(surprise, calls.part))
