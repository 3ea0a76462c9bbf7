"""Episodes small enough to be written out in a test."""

from collections.abc import Sequence

from msgspec.structs import replace

from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Attempt, Call, Origin, Purpose, Reward, Rollout, State, Task


def call(name: str, tokens: int = 3, **fields: object) -> Call:
    ids = tuple(range(tokens))
    return Call(id=name, prompt_ids=(9, 9), completion_ids=ids, logprobs=(-1.0,) * tokens, **fields)


def episode(
    index: int, reward: float | None, calls: Sequence[Call], ending: Ending = Ending.SUCCEEDED, *more: Reward
) -> Episode:
    rollout = Rollout(f"g.{index}", "r", "g", "t", index, Purpose.TRAIN, State.FINISHED, 1, 3, 0.0)
    attempt = Attempt(f"g.{index}.1", "r", rollout.id, 1, "w", None, 0.0, 9.0, 1.0, Outcome(ending))
    given = (Reward("final", reward),) if reward is not None else ()
    return Episode(rollout, attempt, Task("t", {}), tuple(calls), (), (*given, *more))


def continuation(origin: Episode, after: int, index: int, reward: float, calls: Sequence[Call]) -> Episode:
    """A rollout that replays the first calls of another one and goes on with its own."""
    name = f"{origin.attempt.id}-{after}"
    replayed = [replace(one, origin=one.origin or origin.attempt.id) for one in origin.calls[:after]]
    found = episode(index, reward, [*replayed, *calls])
    rollout = replace(found.rollout, id=f"{name}.{index}", group=name, origin=Origin(origin.attempt.id, after))
    return replace(found, rollout=rollout, attempt=replace(found.attempt, id=f"{rollout.id}.1", rollout=rollout.id))
