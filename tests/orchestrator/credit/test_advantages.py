"""Samples are worth what credit and advantage say of their rollouts, and count in the loss by the aggregation."""

from statistics import fmean
from typing import Literal

import pytest
from msgspec.structs import replace
from smallepisodes import call, episode

from leyden.config import Hyperparameters
from leyden.episodes import Episode
from leyden.learner.sample import Sample
from leyden.orchestrator.credit.advantages import AdvantageEstimator, StepInputs, compute_advantages
from leyden.orchestrator.credit.samples import (
    SampleFilter,
    SelectedRollout,
    StepAccounting,
    make_samples,
    select_rollouts,
)
from leyden.outcomes import Ending
from leyden.records import Call, CallStatus, Reward, RewardKind, Span, Task
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.advantage.gigpo import gigpo
from leyden.rl.advantage.grpo import grpo
from leyden.rl.advantage.ppo import ppo
from leyden.rl.aggregation.rollout_mean import rollout_mean
from leyden.rl.credit.discounted import discounted
from leyden.rl.credit.gae import gae
from leyden.rl.credit.identical import identical
from leyden.rl.credit.last_call import last_call
from leyden.rl.credit.stepwise import stepwise
from leyden.rl.signals import SignalKind, SignalRules, automatic
from leyden.rl.state.prompt import prompt

RULES = SampleFilter(min_group=2, failure_reward=-1.0, roles=None)
ADVANTAGE_ESTIMATOR = AdvantageEstimator(identical, grpo, rollout_mean, Hyperparameters(), "rollout", None, False, None)


def valued(
    groups: list[list[SelectedRollout]],
    rules: AdvantageEstimator = ADVANTAGE_ESTIMATOR,
    accounting: StepAccounting | None = None,
    known: StepInputs | None = None,
) -> list[Sample]:
    return compute_advantages(
        groups, make_samples(groups), known or StepInputs(), rules, accounting or StepAccounting()
    )


def test_samples_have_the_advantage_of_their_rollout_and_the_weight_of_their_tokens() -> None:
    accounting = StepAccounting()
    group = [episode(0, 1.0, [call("a", 2), call("b", 6)]), episode(1, 0.0, [call("c", 4)])]
    scored = select_rollouts(group, RULES, accounting)
    assert scored is not None
    samples = valued([scored], accounting=accounting)
    assert [sample.call for sample in samples] == ["a", "b", "c"]
    assert [sample.advantage for sample in samples] == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5)])
    assert [sample.weight for sample in samples] == pytest.approx([1 / 16, 1 / 16, 1 / 8])
    assert (accounting.requested, accounting.trained, accounting.calls_trained) == (2, 2, 3)


def test_a_rollout_without_a_sampled_token_counts_in_the_statistics_of_its_group() -> None:
    accounting = StepAccounting()
    group = [
        episode(0, 1.0, [call("a"), call("b")]),
        episode(1, None, [], Ending.TIMEOUT),
        episode(2, None, [call("c", 0, status=CallStatus.CUT)], Ending.TIMEOUT),
    ]
    scored = select_rollouts(group, RULES, accounting)
    assert scored is not None
    samples = valued([scored], accounting=accounting)
    # rewards 1, -1, -1: mean -1/3, deviation sqrt(4/3)
    assert [sample.call for sample in samples] == ["a", "b"]
    assert [sample.advantage for sample in samples] == pytest.approx([(4 / 3) / (4 / 3) ** 0.5] * 2)
    assert [sample.weight for sample in samples] == pytest.approx([1 / 6] * 2)
    assert (accounting.groups_single, accounting.groups_flat) == (0, 0)
    assert (accounting.trained, accounting.excluded) == (1, {"no call to train on": 2})
    assert accounting.requested == accounting.trained + accounting.excluded.total()


def test_a_group_without_any_call_to_train_on_is_dropped() -> None:
    accounting = StepAccounting()
    group = [episode(0, 1.0, []), episode(1, None, [], Ending.TIMEOUT)]
    assert select_rollouts(group, RULES, accounting) is None
    assert (accounting.groups_dropped, accounting.excluded) == (1, {"no call to train on": 2})


def test_step_rewards_are_part_of_the_return() -> None:
    step = Reward("s", 0.5, RewardKind.STEP, weight=0.5, call="a")
    scored = select_rollouts(
        [episode(0, 1.0, [call("a")], Ending.SUCCEEDED, step), episode(1, 0.0, [call("b")])], RULES, StepAccounting()
    )
    assert scored is not None
    assert [sample.target for sample in valued([scored])] == [1.25, 0.0]


def test_a_reward_on_a_span_is_the_last_calls_within_it() -> None:
    outer, inner = "1" * 16, "2" * 16
    spans = (span(outer, None), span(inner, outer))
    calls = [call("a", span=outer), call("b", span=inner), call("c")]
    given = [Reward("s", 0.5, RewardKind.STEP, span=outer), Reward("t", 0.25, RewardKind.STEP, span="3" * 16)]
    whole = replace(episode(0, 1.0, calls, Ending.SUCCEEDED, *given), spans=spans)
    # a reward on an unknown span belongs to the last call
    assert [transition.reward for transition in whole.transitions] == [0.0, 0.5, 0.25]
    scored = select_rollouts([whole], replace(RULES, min_group=1), StepAccounting())
    assert scored is not None
    assert [sample.target for sample in valued([scored])] == [1.75, 1.75, 1.75]


def span(name: str, parent: str | None) -> Span:
    return Span("0" * 32, name, parent, "work", "internal", 0, 1)


def test_groups_without_variance_are_counted_and_have_no_advantage() -> None:
    accounting = StepAccounting()
    groups = [
        select_rollouts([episode(0, 1.0, [call("a")]), episode(1, 1.0, [call("b")])], RULES, accounting) or [],
        select_rollouts([episode(2, 1.0, [call("c")]), episode(3, 0.0, [call("d")])], RULES, accounting) or [],
        select_rollouts([episode(4, 1.0, [call("e")])], replace(RULES, min_group=1), accounting) or [],
    ]
    samples = valued(groups, accounting=accounting)
    assert [sample.call for sample in samples if sample.advantage] == ["c", "d"]
    assert [sample.weight for sample in samples] == pytest.approx([1 / 15] * 5)  # all five rollouts are in the mean
    assert (accounting.groups_flat, accounting.groups_single) == (1, 1)


def one_group(*episodes: Episode) -> list[list[SelectedRollout]]:
    return [select_rollouts(list(episodes), RULES, StepAccounting()) or []]


def test_a_call_without_credit_is_counted_and_not_trained_on() -> None:
    accounting = StepAccounting()
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    samples = valued(groups, replace(ADVANTAGE_ESTIMATOR, credit=last_call), accounting)
    assert [sample.call for sample in samples] == ["b", "c"]
    assert accounting.calls_excluded == {"no credit": 1}
    assert accounting.calls_trained == 2


def test_a_call_that_is_left_out_stays_in_time() -> None:
    calls = [call("a"), call("b", status=CallStatus.FAILED), call("c")]
    groups = one_group(episode(0, 1.0, calls), episode(1, 0.0, [call("d")]))
    samples = valued(
        groups, replace(ADVANTAGE_ESTIMATOR, credit=discounted, hyperparameters=Hyperparameters(gamma=0.5))
    )
    assert {sample.call: sample.target for sample in samples} == {"a": 0.25, "c": 1.0, "d": 0.0}
    assert {sample.call: sample.call_index for sample in samples} == {"a": 0, "c": 2, "d": 0}


def test_what_the_critic_expected_is_taken_off() -> None:
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    rules = replace(ADVANTAGE_ESTIMATOR, credit=gae, advantage=ppo, hyperparameters=Hyperparameters(lam=0.0))
    accounting = StepAccounting()
    samples = valued(groups, rules, accounting, StepInputs(values=[0.25, 0.5, 0.125]))
    assert [sample.target for sample in samples] == [0.5, 1.0, 0.0]  # what the next state was worth, and the ends
    assert samples[1].advantage > samples[0].advantage > samples[2].advantage  # 0.5, 0.25 and -0.125, normalised
    assert accounting.critic_explained == pytest.approx([1 - (19 / 288) / (1 / 6)])  # of those over the targets'


def test_distance_to_the_reference_is_taken_from_the_reward_of_its_call() -> None:
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    rules = replace(ADVANTAGE_ESTIMATOR, credit=stepwise, hyperparameters=Hyperparameters(spread="last"))
    samples = valued(groups, rules, known=StepInputs(penalties=[0.5, 0.25, 0.125]))
    assert [sample.target for sample in samples] == [-0.5, 0.75, -0.125]


def test_calls_in_the_same_state_are_compared() -> None:
    accounting = StepAccounting()
    groups = one_group(episode(0, 1.0, [call("a"), call("b")]), episode(1, 0.0, [call("c")]))
    rules = replace(ADVANTAGE_ESTIMATOR, credit=discounted, advantage=gigpo, state=prompt)
    valued(groups, rules, accounting)
    assert accounting.states_shared == [1.0]  # all prompts are the same


def test_global_normalisation_is_by_a_key_of_the_tasks() -> None:
    seen = []

    def looking(calls: object, hyperparameters: object) -> object:
        seen.append(calls)
        return calls.value

    episodes = [
        replace(episode(number, 1.0, [call("abcd"[number])]), task=Task("t", {"source": source}))
        for number, source in enumerate(["maths", "sql", "maths", "sql"])
    ]
    valued(one_group(*episodes), replace(ADVANTAGE_ESTIMATOR, advantage=looking, normalize_by="source"))
    assert seen[0].kind.tolist() == [0, 1, 0, 1]


def annealed(step: int, rules: AdvantageEstimator = ADVANTAGE_ESTIMATOR, final: float = 1.0) -> float:
    """The advantage of the one rollout of four whose answer was cut, which costs 0.1 and less in each of 10 steps."""
    signals = SignalRules({SignalKind.CUT: -0.1}, anneal_steps=10)
    said = {"role": "assistant", "content": "hm"}
    finishes = ("stop", "stop", "stop", "length")
    group = [episode(n, 1.0, [call(f"{n}", finish=finish, response=said)]) for n, finish in enumerate(finishes)]
    group[0] = replace(group[0], rewards=(Reward("final", final),))
    given = [replace(one, rewards=(*one.rewards, *automatic(one, signals, step))) for one in group]
    selected = select_rollouts(given, RULES, StepAccounting())
    assert selected is not None
    return valued([selected], rules)[-1].advantage


def test_an_automatic_reward_that_is_annealed_fades() -> None:
    # Of four values, three are 0 and one is -w: it is -3/4 w from their mean, and the deviation is w / 2.
    faded = [annealed(step) for step in range(1, 12)]
    expected = [-0.75 * w / max(w / 2, 0.125) for w in (0.1 * (1 - step / 10) for step in range(11))]
    assert faded == pytest.approx(expected)
    assert faded[0] == pytest.approx(-0.6)
    assert -0.1 < faded[9] < 0 == faded[10]  # the last step before 0 is not a cliff
    unbounded = replace(ADVANTAGE_ESTIMATOR, hyperparameters=Hyperparameters(deviation_floor=0.0))
    assert [annealed(step, unbounded) for step in range(1, 11)] == pytest.approx([-1.5] * 10)


def test_a_small_distance_to_the_reference_gives_a_small_advantage() -> None:
    groups = one_group(*(episode(number, 1.0, [call(f"{number}")]) for number in range(4)))
    for penalty in (0.04, 0.004):
        samples = valued(groups, known=StepInputs(penalties=[0.0, 0.0, 0.0, penalty]))
        assert samples[-1].advantage == pytest.approx(-0.75 * penalty / 0.125)


def test_step_rewards_can_be_scaled_by_the_deviation_of_the_final_rewards() -> None:
    scaled = replace(ADVANTAGE_ESTIMATOR, scale_steps=True)
    assert annealed(1, scaled) == 0.0  # all final rewards are equal
    # finals 0, 1, 1, 1 have the deviation 1/2, so the cut one has 1 - 0.05
    value = 0.95
    mean = (2 + value) / 4
    deviation = ((mean**2 + 2 * (1 - mean) ** 2 + (value - mean) ** 2) / 3) ** 0.5
    assert annealed(1, scaled, final=0.0) == pytest.approx((value - mean) / deviation)


def test_each_call_can_be_compared_with_calls_of_its_own_role() -> None:
    """Plans are worth 10 and 12, searches 0, 2 and 4: of one role each, and far from those of the other."""

    def calls(name: str, plan: float, *searches: float) -> tuple[list[Call], list[Reward]]:
        made = [
            call(f"{name}-plan", role="planner"),
            *(call(f"{name}-{n}", role="search") for n in range(len(searches))),
        ]
        given = [
            Reward(f"r{n}", value, RewardKind.STEP, call=one.id)
            for n, (one, value) in enumerate(zip(made, (plan, *searches), strict=True))
        ]
        return made, given

    episodes = []
    for number, values in enumerate(((10.0, 0.0, 2.0), (12.0, 4.0))):
        made, given = calls(f"r{number}", *values)
        episodes.append(episode(number, 0.0, made, Ending.SUCCEEDED, *given))
    group = select_rollouts(episodes, RULES, StepAccounting())
    assert group is not None
    rules = replace(ADVANTAGE_ESTIMATOR, credit=stepwise, advantage=dr_grpo, compare="role")
    found = {sample.call: sample.advantage for sample in valued([group], rules)}
    # each rollout counts once in the mean of a role: searches (0 + 2) / 2 and 4, whose mean is 2.5
    assert found == pytest.approx({"r0-plan": -1.0, "r0-0": -2.5, "r0-1": -0.5, "r1-plan": 1.0, "r1-0": 1.5})
    together = {sample.call: sample.advantage for sample in valued([group], replace(rules, compare="group"))}
    assert together["r0-plan"] > 0  # for being a plan
    silent = select_rollouts([*episodes, episode(2, -6.0, [], Ending.SUCCEEDED)], RULES, StepAccounting())
    assert silent is not None
    with_silent = {sample.call: sample.advantage for sample in valued([silent], rules)}
    # a rollout without a call counts in the situation in which its group begins
    assert with_silent["r1-plan"] == pytest.approx(12 - 16 / 3)
    assert with_silent["r1-0"] == pytest.approx(1.5)


def drafted(draft: float, final: float, name: str) -> Episode:
    """Drafts an answer, which a step reward scores, and gives it in the same conversation."""
    question = {"role": "user", "content": "?"}
    calls = [
        call(f"{name}-draft", messages=(question,)),
        call(f"{name}-final", messages=(question,), parent=f"{name}-draft", kept_messages=2),
    ]
    given = Reward("draft", draft, RewardKind.STEP, call=f"{name}-draft")
    return episode(0, final, calls, Ending.SUCCEEDED, given)


def test_calls_are_not_pushed_up_or_down_for_their_position() -> None:
    """A draft earns 1.5 or 1.7 whatever comes of it, and a final answer 0 or 1, in easy and hard groups."""
    groups = [
        one_group(
            *(drafted(1.5 + 0.2 * (n % 2), float(n < right), f"{right}-{n}") for n in range(8)),
        )[0]
        for right in (1, 3, 7)
    ]
    rules = replace(ADVANTAGE_ESTIMATOR, credit=stepwise, hyperparameters=Hyperparameters(spread="last"))

    def mean_advantages(compare: Literal["group", "turn"]) -> tuple[float, float]:
        found = valued(groups, replace(rules, compare=compare))
        return tuple(fmean(one.advantage for one in found if one.call.endswith(kind)) for kind in ("draft", "final"))

    draft, final = mean_advantages("group")
    assert draft > 0.8 and final < -0.8
    assert mean_advantages("turn") == pytest.approx((0.0, 0.0), abs=0.02)
    found = {one.call: one.advantage for one in valued(groups, replace(rules, compare="turn"))}
    assert found["3-1-final"] > 1 > -0.5 > found["3-4-final"]  # what the reward scores is what is compared


def test_a_call_that_is_alone_in_its_situation_is_compared_with_what_other_groups_let_expect() -> None:
    def rollout(name: str, *values: float) -> Episode:
        calls = [call(f"{name}-{n}") for n in range(len(values))]
        given = [Reward(f"{n}", value, RewardKind.STEP, call=f"{name}-{n}") for n, value in enumerate(values)]
        return episode(0, 0.0, calls, Ending.SUCCEEDED, *given)

    usual = [one_group(*(rollout(f"{g}{n}", 1.0 + n, 5.0 + n) for n in (0, 2)))[0] for g in "abc"]
    rules = replace(ADVANTAGE_ESTIMATOR, credit=stepwise, advantage=dr_grpo, compare="turn")

    def alone(second: float) -> float:
        groups = [*usual, *one_group(rollout("x", 1.0, second), rollout("y", 3.0))]
        return {one.call: one.advantage for one in valued(groups, rules)}["x-1"]

    assert alone(9.0) > 1.0 > 0.0 > -1.0 > alone(1.0)  # at second turns of other groups values are 4 higher
    assert abs(alone(5.5)) < 0.5
