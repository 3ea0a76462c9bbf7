"""What an agent returned, told apart and written down."""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import numpy
import pytest
from msgspec.structs import replace

import leyden
from leyden.client.attempt.outcome import end_of_attempt
from leyden.client.attempt.result import (
    MAX_RESULT_BYTES,
    NotAReward,
    TwoRewards,
    cut_result,
    parse_final_reward,
    parse_reward,
    split_returned,
    to_json,
)
from leyden.client.host_protocol import HostSetup
from leyden.outcomes import Ending


def test_a_run_has_one_source_of_the_final_reward() -> None:
    assert split_returned(0.5, has_reward_function=False) == (0.5, 0.5)
    assert split_returned(True, has_reward_function=False) == (True, True)
    assert split_returned("Paris", has_reward_function=False) == ("Paris", None)
    assert split_returned(leyden.Result("Paris", 1), has_reward_function=False) == ("Paris", 1)
    assert split_returned(leyden.Result("Paris"), has_reward_function=True) == ("Paris", None)
    assert split_returned(0.5, has_reward_function=True) == (0.5, None)
    with pytest.raises(TwoRewards):
        split_returned(leyden.Result("Paris", 1), has_reward_function=True)


def test_a_final_reward_may_have_named_parts() -> None:
    assert parse_final_reward({"correct": True, "format": 0.1}, "it") == {"correct": 1.0, "format": 0.1}
    assert parse_final_reward(2, "it") == 2.0
    wrong = {"for part 'a', gave nan": {"a": math.nan}, "no part": {}, r"names \[1\]": {1: 1.0}, "names": {"a\n": 1.0}}
    for message, bad in wrong.items():
        with pytest.raises(NotAReward, match=message):
            parse_final_reward(bad, "it")


def test_rewards_are_finite_numbers() -> None:
    for good, value in ((1, 1.0), (True, 1.0), (numpy.float32(0.5), 0.5), (numpy.array(2), 2.0), (Decimal("0.1"), 0.1)):
        assert parse_reward(good, "it") == value
    for bad in (math.nan, math.inf, -1e31, "1.0", None, [1.0], numpy.ones(3), object()):
        with pytest.raises(NotAReward, match=r"^it gave "):
            parse_reward(bad, "it")


def test_any_result_can_be_written() -> None:
    @dataclass
    class Point:
        x: int

    class Model:
        def model_dump(self, mode: str) -> Any:
            return {"mode": mode}

    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert json.loads(to_json({"p": Point(1), "m": Model(), "n": numpy.float32(1.5), "big": 2**70})) == {
        "p": {"x": 1},
        "m": {"mode": "json"},
        "n": 1.5,
        "big": 2**70,
    }
    assert json.loads(to_json(cyclic)) == "[[...]]"
    assert "a Rude whose repr fails" in json.loads(to_json(Rude()))
    assert json.loads(to_json("\ud800")) == r"'\ud800'"
    long = cut_result(to_json("é" * MAX_RESULT_BYTES))
    assert len(long) < MAX_RESULT_BYTES and msgspec.json.decode(long).endswith(f"has {2 * MAX_RESULT_BYTES + 2} bytes)")


def test_a_part_of_a_result_is_never_scored() -> None:
    value = ["x"] * MAX_RESULT_BYTES
    setup = HostSetup("agent.py:act", ".", (), "", "", concurrency=1, has_reward_function=False)
    scored = end_of_attempt(value, replace(setup, has_reward_function=True))
    assert scored.outcome.ending is Ending.AGENT_ERROR and "the result is too large" in scored.outcome.message
    rewarded = end_of_attempt(leyden.Result(value, 0.5), setup)
    assert rewarded.outcome.ending is Ending.SUCCEEDED and [reward.value for reward in rewarded.rewards] == [0.5]
    for end in (scored, rewarded):  # what is recorded
        assert "(cut: the result has" in end.result
