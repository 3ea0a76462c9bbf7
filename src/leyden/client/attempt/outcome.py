"""What an agent gave back, as the end of its attempt: the same for functions, commands and endpoints."""

from typing import Any

from msgspec import Raw

from leyden.client.attempt.result import NotAReward, Result, TwoRewards, read_returned, read_reward, to_json
from leyden.client.host_protocol import AttemptEnd
from leyden.outcomes import Ending, Outcome


def ended_with(attempt: str, value: Any, scored: bool) -> AttemptEnd:
    """The end of an attempt whose agent returned this; `scored` says that the run has a reward function."""
    try:
        result, reward = read_returned(value, scored)
    except TwoRewards as error:
        return AttemptEnd(attempt, Outcome(Ending.AGENT_ERROR, str(error)))
    written = Raw(to_json(result))
    try:
        number = None if reward is None else read_reward(reward, "the agent")
    except NotAReward as error:
        return AttemptEnd(attempt, Outcome(Ending.NO_REWARD, str(error)), written)
    return AttemptEnd(attempt, Outcome(Ending.SUCCEEDED), written, number)


def from_json(document: Any) -> Any:
    """What a JSON document of an agent means: `{"result": ..., "reward": ...}` is `leyden.Result`, all else itself."""
    if isinstance(document, dict) and "reward" in document and document.keys() <= {"result", "reward"}:
        return Result(document.get("result"), document["reward"])
    return document
