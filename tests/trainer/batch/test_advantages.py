"""Rows are worth what credit and advantage say of their rollouts, and count in the loss by the aggregation."""

import pytest
from msgspec.structs import replace
from smallepisodes import call, episode

from leyden.config import Hyperparameters
from leyden.episodes import Episode
from leyden.outcomes import Ending
from leyden.records import CallStatus, Reward, RewardKind, Span, Task
from leyden.rl.advantage.gigpo import gigpo
from leyden.rl.advantage.grpo import grpo
from leyden.rl.advantage.ppo import ppo
from leyden.rl.aggregation.rollout_mean import rollout_mean
from leyden.rl.credit.discounted import discounted
from leyden.rl.credit.gae import gae
from leyden.rl.credit.identical import identical
from leyden.rl.credit.last_call import last_call
from leyden.rl.credit.stepwise import stepwise
from leyden.rl.state.prompt import prompt
from leyden.trainer.batch.advantages import AdvantageEstimator, StepInputs, value
from leyden.trainer.batch.samples import Sample, SampleFilter, SelectedRollout, StepAccounting, lay_out, score

RULES = SampleFilter(min_group=2, failure_reward=-1.0, roles=None)
VALUATION = AdvantageEstimator(identical, grpo, rollout_mean, Hyperparameters(), "rollout", None, None)


def valued(
    groups: list[list[SelectedRollout]],
    rules: AdvantageEstimator = VALUATION,
    accounts: StepAccounting | None = None,
    known: StepInputs | None = None,
) -> list[Sample]:
    return value(groups, lay_out(groups), known or StepInputs(), rules, accounts or StepAccounting())


def test_rows_carry_the_advantage_of_their_rollout_and_the_weight_of_their_tokens() -> None:
    accounts = StepAccounting()
    group = [episode(0, 1.0, [call("a", 2), call("b", 6)]), episode(1, 0.0, [call("c", 4)])]
    scored = score(group, RULES, accounts)
    assert scored is not None
    rows = valued([scored], accounts=accounts)
    assert [row.call for row in rows] == ["a", "b", "c"]
    assert [row.advantage for row in rows] == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5)])
    assert [row.weight for row in rows] == pytest.approx([1 / 16, 1 / 16, 1 / 8])
    assert (accounts.asked, accounts.trained, accounts.calls_trained) == (2, 2, 3)


def test_step_rewards_are_part_of_the_return() -> None:
    step = Reward("s", 0.5, RewardKind.STEP, weight=0.5, call="a")
    scored = score(
        [episode(0, 1.0, [call("a")], Ending.SUCCEEDED, step), episode(1, 0.0, [call("b")])], RULES, StepAccounting()
    )
    assert scored is not None
    assert [row.target for row in valued([scored])] == [1.25, 0.0]


def test_a_reward_on_a_span_is_the_last_calls_within_it() -> None:
    outer, inner = "1" * 16, "2" * 16
    spans = (span(outer, None), span(inner, outer))
    calls = [call("a", span=outer), call("b", span=inner), call("c")]
    given = [Reward("s", 0.5, RewardKind.STEP, span=outer), Reward("t", 0.25, RewardKind.STEP, span="3" * 16)]
    whole = replace(episode(0, 1.0, calls, Ending.SUCCEEDED, *given), spans=spans)
    # a reward on an unknown span belongs to the last call
    assert [transition.reward for transition in whole.transitions] == [0.0, 0.5, 0.25]
    scored = score([whole], replace(RULES, min_group=1), StepAccounting())
    assert scored is not None
    assert [row.target for row in valued([scored])] == [1.75, 1.75, 1.75]


def span(name: str, parent: str | None) -> Span:
    return Span("0" * 32, name, parent, "work", "internal", 0, 1)


def test_groups_without_variance_are_counted_and_have_no_advantage() -> None:
    accounts = StepAccounting()
    groups = [
        score([episode(0, 1.0, [call("a")]), episode(1, 1.0, [call("b")])], RULES, accounts) or [],
        score([episode(2, 1.0, [call("c")]), episode(3, 0.0, [call("d")])], RULES, accounts) or [],
        score([episode(4, 1.0, [call("e")])], replace(RULES, min_group=1), accounts) or [],
    ]
    rows = valued(groups, accounts=accounts)
    assert [row.call for row in rows if row.advantage] == ["c", "d"]
    assert [row.weight for row in rows] == pytest.approx([1 / 15] * 5)  # all five rollouts are in the mean
    assert (accounts.groups_flat, accounts.groups_single) == (1, 1)


def one_group(*episodes: Episode) -> list[list[SelectedRollout]]:
    return [score(list(episodes), RULES, StepAccounting()) or []]


def test_a_call_without_credit_is_counted_and_not_trained_on() -> None:
    accounts = StepAccounting()
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    rows = valued(groups, replace(VALUATION, credit=last_call), accounts)
    assert [row.call for row in rows] == ["b", "c"]
    assert accounts.calls_left == {"no credit": 1}
    assert accounts.calls_trained == 2


def test_a_call_that_is_left_out_stays_in_time() -> None:
    calls = [call("a"), call("b", status=CallStatus.FAILED), call("c")]
    groups = one_group(episode(0, 1.0, calls), episode(1, 0.0, [call("d")]))
    rows = valued(groups, replace(VALUATION, credit=discounted, hyperparameters=Hyperparameters(gamma=0.5)))
    assert {row.call: row.target for row in rows} == {"a": 0.25, "c": 1.0, "d": 0.0}
    assert {row.call: row.turn for row in rows} == {"a": 0, "c": 2, "d": 0}


def test_what_the_critic_expected_is_taken_off() -> None:
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    rules = replace(VALUATION, credit=gae, advantage=ppo, hyperparameters=Hyperparameters(lam=0.0))
    accounts = StepAccounting()
    rows = valued(groups, rules, accounts, StepInputs(values=[0.25, 0.5, 0.125]))
    assert [row.target for row in rows] == [0.5, 1.0, 0.0]  # what the next state was worth, and the ends
    assert rows[1].advantage > rows[0].advantage > rows[2].advantage  # 0.5, 0.25 and -0.125, normalised
    assert accounts.critic_explained == pytest.approx([1 - (19 / 288) / (1 / 6)])  # of those, over that of the targets


def test_distance_to_the_reference_is_taken_from_the_reward_of_its_call() -> None:
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    rules = replace(VALUATION, credit=stepwise, hyperparameters=Hyperparameters(spread="last"))
    rows = valued(groups, rules, known=StepInputs(penalties=[0.5, 0.25, 0.125]))
    assert [row.target for row in rows] == [-0.5, 0.75, -0.125]


def test_calls_in_the_same_state_are_compared() -> None:
    accounts = StepAccounting()
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    rules = replace(VALUATION, credit=discounted, advantage=gigpo, state=prompt)
    valued(groups, rules, accounts)
    assert accounts.states_shared == [1.0]  # all prompts are the same


def test_global_normalisation_is_by_a_key_of_the_tasks() -> None:
    seen = []

    def looking(calls: object, hyperparameters: object) -> object:
        seen.append(calls)
        return calls.value  # type: ignore[attr-defined]

    episodes = [
        replace(episode(number, 1.0, [call("abcd"[number])]), task=Task("t", {"source": source}))
        for number, source in enumerate(["maths", "sql", "maths", "sql"])
    ]
    valued(one_group(*episodes), replace(VALUATION, advantage=looking, normalize_by="source"))
    assert seen[0].part.tolist() == [0, 1, 0, 1]
