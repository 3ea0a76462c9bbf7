"""REINFORCE++: a value against all of the update's, whatever their group; a group may be of one."""

from leyden.rl.advantage import Calls, Floats, over
from leyden.rl.terms import Terms


def reinforce_pp(calls: Calls, terms: Terms) -> Floats:
    """A = (V - mean) / deviation, both of the update's part."""
    return over(calls.value - calls.mean(calls.value, calls.part), calls.deviation(calls.value, calls.part))
