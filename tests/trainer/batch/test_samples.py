"""Every rollout of a step is trained on, or left out for a reason that is counted."""

import math

import pytest
from msgspec.structs import replace
from smallepisodes import call, episode

from leyden.config import read_config
from leyden.outcomes import Ending
from leyden.records import Call, CallStatus, Sampling
from leyden.trainer.algorithm.resolve import algorithm_of
from leyden.trainer.batch.samples import SampleFilter, StepAccounting, lay_out, score

RULES = SampleFilter(min_group=2, failure_reward=-1.0, roles=None)


def test_a_failure_of_the_agent_counts_and_one_of_the_machinery_does_not() -> None:
    accounts = StepAccounting()
    group = [
        episode(0, 1.0, [call("a")]),
        episode(1, None, [call("b")], Ending.AGENT_ERROR),
        episode(2, None, [call("c")], Ending.LOST),
        episode(3, None, [call("d")], Ending.NO_REWARD),
    ]
    scored = score(group, RULES, accounts)
    assert scored is not None
    assert [one.final for one in scored] == [1.0, -1.0]
    assert accounts.excluded == {"lost": 1, "no_reward": 1}
    assert accounts.asked == accounts.trained + accounts.excluded.total()
    assert accounts.outcomes == {"succeeded": 1, "agent_error": 1, "lost": 1, "no_reward": 1}


def test_a_group_that_is_too_small_is_dropped_whole() -> None:
    accounts = StepAccounting()
    group = [episode(0, 1.0, [call("a")]), episode(1, None, [], Ending.LOST), episode(2, 1.0, [])]
    assert score(group, RULES, accounts) is None
    assert accounts.excluded == {"lost": 1, "no call to train on": 1, "group too small": 1}
    assert (accounts.trained, accounts.groups_dropped) == (0, 1)
    assert accounts.asked == accounts.excluded.total()


def test_calls_that_may_not_be_trained_on_are_counted_by_why() -> None:
    accounts = StepAccounting()
    rules = SampleFilter(1, 0.0, roles=("writer",))
    calls = [
        call("a", role="writer"),
        call("b", role="checker"),
        call("c", status=CallStatus.ABANDONED),
        Call(id="d", completion_ids=(1,), role="writer"),
        call("e", role="writer", policy="upstream"),
        call("f", role="writer", sampling=Sampling(top_p=0.9)),
    ]
    scored = score([episode(0, 1.0, calls)], rules, accounts)
    assert scored is not None
    assert [(turn, one.call.id) for turn, one in scored[0].transitions] == [(0, "a")]
    why = ("role not selected", "abandoned", "no logprobs", "another policy", "truncated sampling")
    assert accounts.calls_left == dict.fromkeys(why, 1)


def test_calls_that_were_not_drawn_fairly_are_trained_on_where_asked_for() -> None:
    whole = episode(0, 1.0, [call("a", sampling=Sampling(top_p=0.9))])
    asked = algorithm_of(
        read_config({"run": "r", "agent": "a", "tasks": "t", "training": {"allow_biased_sampling": True}})
    )
    scored = score([whole], replace(asked.admission, min_group=1), StepAccounting())
    assert scored is not None
    assert [one.call.id for _, one in scored[0].transitions] == ["a"]


def test_only_what_the_model_chose_is_trained_on() -> None:
    accounts = StepAccounting()
    calls = [call("a"), call("b", allowed=(1.0, 0.2, 0.995)), call("c", allowed=(0.0,) * 3)]
    scored = score([episode(index, 1.0, calls) for index in range(2)], RULES, accounts)
    assert scored is not None
    assert accounts.calls_left == {"chosen by a grammar": 2}
    rows = lay_out([scored])
    assert rows[1].sampler == pytest.approx((-1.0, -1.0 + math.log(0.995)))  # the model's own, not the grammar's
    assert [(row.call, list(row.chosen), len(row.sampler)) for row in rows[:2]] == [
        ("a", [0, 1, 2], 3),
        ("b", [0, 2], 2),
    ]
