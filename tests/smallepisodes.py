"""Episodes small enough to be written out in a test."""

from collections.abc import Sequence

from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Attempt, Call, Purpose, Reward, Rollout, State, Task


def call(name: str, tokens: int = 3, **fields: object) -> Call:
    ids = tuple(range(tokens))
    return Call(id=name, prompt_ids=(9, 9), completion_ids=ids, logprobs=(-1.0,) * tokens, **fields)  # type: ignore[arg-type]


def episode(
    index: int, reward: float | None, calls: Sequence[Call], ending: Ending = Ending.SUCCEEDED, *more: Reward
) -> Episode:
    rollout = Rollout(f"g.{index}", "r", "g", "t", index, Purpose.TRAIN, State.FINISHED, 1, 3, 0.0)
    attempt = Attempt(f"g.{index}.1", "r", rollout.id, 1, "w", None, 0.0, 9.0, 1.0, Outcome(ending))
    given = (Reward("final", reward),) if reward is not None else ()
    return Episode(rollout, attempt, Task("t", {}), tuple(calls), (), (*given, *more))
