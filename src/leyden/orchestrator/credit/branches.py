"""Finds the groups of an update that continue its rollouts, and how much each call counts beside them.

What followed a point was sampled by the rollout and by each of its n continuations, so each of them counts 1 / (n + 1)
there. Over all of them, calls then count as much as without continuations, and the gradient has the same expectation.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from leyden.episodes import REPLAYED
from leyden.orchestrator.credit.samples import Groups, SelectedRollout
from leyden.rl.aggregation import Lengths, count_rollouts
from leyden.rl.credit import RolloutRewards


class Continuations(Struct, frozen=True):
    """The rollouts that continue another one from a point; rollouts are numbered over all groups of an update."""

    origin: int
    calls: int
    """Of the origin, up to the point."""
    rollouts: range


def find_continuations(groups: Groups) -> list[Continuations]:
    """Return the groups of an update that continue one of its rollouts, by rollout and point."""
    numbers = {rollout.episode.attempt.id: number for number, rollout in enumerate(chain(*groups))}
    found, end = [], 0
    for group in groups:
        start, end = end, end + len(group)
        origin = group[0].episode.rollout.origin
        if origin is not None and origin.attempt in numbers:
            found.append(Continuations(numbers[origin.attempt], origin.calls, range(start, end)))
    return sorted(found, key=lambda one: (one.origin, one.calls))


def add_returns(rewards_R: Sequence[RolloutRewards], found: Sequence[Continuations]) -> list[RolloutRewards]:
    """Return rewards with the returns of continuations."""
    continued_R: list[list[tuple[int, tuple[float, ...]]]] = [[] for _ in rewards_R]
    for one in found:
        continued_R[one.origin].append((one.calls, tuple(rewards_R[number].total for number in one.rollouts)))
    return [
        replace(rewards, continued=tuple(continued)) for rewards, continued in zip(rewards_R, continued_R, strict=True)
    ]


def shares(calls: Iterable[tuple[int, int]], found: Sequence[Continuations]) -> list[float]:
    """Return how much each call counts beside those of continuations; calls are named by rollout and index."""
    points_R: dict[int, list[Continuations]] = {}
    for one in found:
        points_R.setdefault(one.origin, []).append(one)
    origins = {number: (one.origin, one.calls) for one in found for number in one.rollouts}
    return [
        prod(1 / (1 + len(one.rollouts)) for one in points_R.get(rollout, ()) if one.calls <= call)
        for rollout, call in (origins.get(rollout, (rollout, call)) for rollout, call in calls)
    ]


def with_replayed(
    tokens_R: Sequence[Mapping[int, int]],
    rollouts: Sequence[SelectedRollout],
    values_R_C: Sequence[Sequence[float | None]],
) -> list[dict[int, int]]:
    """Return the tokens of each call of each rollout, by index; continuations also have those of what they replay.

    So a continuation is as long as what it continues, and means over a rollout give the same weight to a call of both.
    """
    return [
        {
            index: len(call.completion_ids)
            for index, call in enumerate(one.episode.calls)
            if one.exclusion_reasons[index] == REPLAYED and values_C[index] is not None
        }
        | dict(tokens)
        for tokens, one, values_C in zip(tokens_R, rollouts, values_R_C, strict=True)
    ]


def times_counted(tokens_R_C: Lengths, found: Sequence[Continuations]) -> float:
    """Return how many times as many rollouts an aggregation counts because of continuations."""
    continuing = {number for one in found for number in one.rollouts}
    others = [tokens for number, tokens in enumerate(tokens_R_C) if number not in continuing]
    return count_rollouts(tokens_R_C) / max(count_rollouts(others), 1)


def divide_groups(groups: Groups, number: int) -> list[Groups]:
    """Divide groups evenly into a number of parts, or fewer; continuations stay with what they continue."""
    families: list[list[Sequence[SelectedRollout]]] = []
    attempts: set[str] = set()
    for group in groups:
        origin = group[0].episode.rollout.origin
        if origin is None or origin.attempt not in attempts:
            families.append([])
            attempts = {rollout.episode.attempt.id for rollout in group}
        families[-1].append(group)
    number = min(number, len(families))
    ends = [len(families) * done // number for done in range(number + 1)]
    return [[*chain(*families[start:end])] for start, end in pairwise(ends)]
