"""Turns the return value of an agent into the end of its attempt. Functions, commands and endpoints share it."""

from typing import Any

from msgspec import Raw

from leyden.client.attempt.result import (
    MAX_RESULT_BYTES,
    NotAReward,
    Result,
    TwoRewards,
    cut_result,
    describe_too_large,
    parse_final_reward,
    split_returned,
    to_json,
)
from leyden.client.host_protocol import AttemptEnd
from leyden.outcomes import Ending, Outcome


def end_of_attempt(attempt: str, value: Any, has_reward_function: bool) -> AttemptEnd:
    """Return the end of an attempt whose agent returned `value`."""
    try:
        result, reward = split_returned(value, has_reward_function)
    except TwoRewards as error:
        return AttemptEnd(attempt, Outcome(Ending.AGENT_ERROR, str(error)))
    text = to_json(result)
    document = Raw(cut_result(text))
    if len(text) > MAX_RESULT_BYTES and has_reward_function:  # a part of the result must not be scored as the result
        message = describe_too_large(len(text), MAX_RESULT_BYTES)
        return AttemptEnd(attempt, Outcome(Ending.AGENT_ERROR, message), document)
    try:
        given = None if reward is None else parse_final_reward(reward, "the agent")
    except NotAReward as error:
        return AttemptEnd(attempt, Outcome(Ending.NO_REWARD, str(error)), document)
    return AttemptEnd(attempt, Outcome(Ending.SUCCEEDED), document, given)


def result_from_json(document: Any) -> Any:
    """Read an agent's JSON: `{"result": ..., "reward": ...}` becomes a `leyden.Result`; all else is the result."""
    if isinstance(document, dict) and "reward" in document and document.keys() <= {"result", "reward"}:
        return Result(document.get("result"), document["reward"])
    return document
