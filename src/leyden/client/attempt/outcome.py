"""Turns the return value of an agent into the end of its attempt. Functions, commands and endpoints share it."""

from typing import Any

from leyden.api.wire import FinishRequest
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
from leyden.client.host_protocol import HostSetup
from leyden.decoding import decode_json
from leyden.outcomes import Ending, Outcome
from leyden.records import FINAL_REWARD_ID, final_rewards


def end_of_attempt(value: Any, setup: HostSetup) -> FinishRequest:
    """Return the end of an attempt whose agent returned `value`; without a reward if a function determines that."""
    try:
        result, reward = split_returned(value, setup.has_reward_function)
    except TwoRewards as error:
        return FinishRequest(Outcome(Ending.AGENT_ERROR, str(error)))
    text = to_json(result)
    recorded = decode_json(cut_result(text))
    if len(text) > MAX_RESULT_BYTES and setup.has_reward_function:  # a part must not be scored as the result
        message = describe_too_large(len(text), MAX_RESULT_BYTES)
        return FinishRequest(Outcome(Ending.AGENT_ERROR, message), recorded)
    if reward is None:
        return FinishRequest(Outcome(Ending.SUCCEEDED), recorded)
    try:
        given = parse_final_reward(reward, "the agent")
    except NotAReward as error:
        return FinishRequest(Outcome(Ending.NO_REWARD, str(error)), recorded)
    rewards = final_rewards(FINAL_REWARD_ID, given, "agent", setup.rollout.reward_weights)
    return FinishRequest(Outcome(Ending.SUCCEEDED), recorded, tuple(rewards))


def result_from_json(document: Any) -> Any:
    """Read an agent's JSON: `{"result": ..., "reward": ...}` becomes a `leyden.Result`; all else is the result."""
    if isinstance(document, dict) and "reward" in document and document.keys() <= {"result", "reward"}:
        return Result(document.get("result"), document["reward"])
    return document
