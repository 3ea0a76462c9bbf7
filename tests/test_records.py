import msgspec
import pytest

from leyden.episodes import Episode
from leyden.outcomes import MEANING, Ending, Outcome
from leyden.records import (
    Attempt,
    Call,
    CallStatus,
    PromptOrigin,
    Purpose,
    Reward,
    RewardKind,
    Rollout,
    RunSettings,
    Sampling,
    Span,
    State,
    Task,
    VersionRun,
    trace_id,
)


def episode(*calls: Call, rewards: tuple[Reward, ...] = (), ending: Ending | None = Ending.SUCCEEDED) -> Episode:
    outcome = None if ending is None else Outcome(ending)
    rollout = Rollout("g.0", "r", "g", "t", 0, Purpose.TRAIN, State.FINISHED, 1, 3, 0.0)
    attempt = Attempt("g.0.1", "r", "g.0", 1, "w", None, 0.0, 60.0, outcome=outcome)
    return Episode(rollout, attempt, Task("t", {}), calls, rewards=rewards)


def sampled(id: str, prompt: tuple[int, ...], completion: tuple[int, ...], **more: object) -> Call:
    return Call(id, prompt_ids=prompt, completion_ids=completion, logprobs=(-0.5,) * len(completion), **more)


def test_a_conversation_is_a_chain_of_differences() -> None:
    first = sampled("a", (1, 2), (3,), messages=("u1",), response="a1", tools=("calculator",))
    second = sampled(
        "b",
        (4,),
        (5, 6),
        parent="a",
        kept_ids=3,
        kept_messages=2,
        messages=("u2",),
        response="a2",
        prompt_origin=PromptOrigin.CONTINUED,
    )
    third = sampled("c", (7,), (8,), parent="b", kept_ids=6, kept_messages=4, messages=("u3",), response="a3")
    whole = episode(first, second, third)
    assert whole.prompt_ids(third) == (1, 2, 3, 4, 5, 6, 7)
    assert whole.messages(third) == ("u1", "a1", "u2", "a2", "u3")
    assert whole.tools(third) == ("calculator",)


def test_an_edited_history_keeps_what_is_common() -> None:
    first = sampled("a", (1, 2, 3), (4,), messages=("s", "u1"), response="a1")
    edited = sampled("b", (9,), (5,), parent="a", kept_ids=1, kept_messages=1, messages=("summary",))
    whole = episode(first, edited)
    assert whole.prompt_ids(edited) == (1, 9)
    assert whole.messages(edited) == ("s", "summary")


def test_further_choices_share_the_prompt_of_the_first() -> None:
    first = sampled("a", (1, 2), (3,), messages=("u",), response="yes")
    other = sampled("b", (), (4,), parent="a", kept_ids=2, kept_messages=1, choice=1)
    whole = episode(first, other)
    assert whole.prompt_ids(other) == (1, 2)
    assert whole.messages(other) == ("u",)


def test_a_transition_is_the_input_the_output_and_the_reward_of_a_call() -> None:
    whole = episode(
        sampled("a", (1,), (2,)),
        sampled("b", (3,), (4,), parent="a", kept_ids=2),
        rewards=(Reward("s", 0.5, RewardKind.STEP, weight=0.2, call="a"), Reward("f", 1.0)),
    )
    assert [(t.prompt_ids, t.completion_ids, t.reward) for t in whole.transitions] == [
        ((1,), (2,), pytest.approx(0.1)),
        ((1, 2, 3), (4,), 0.0),
    ]


def test_a_later_reward_of_the_same_name_replaces_an_earlier() -> None:
    whole = episode(sampled("a", (1,), (2,)), rewards=(Reward("old", 0.0), Reward("new", 1.0)))
    assert whole.final_reward(failure_reward=-1.0) == 1.0


def test_only_selected_and_trainable_calls_are_trained_on() -> None:
    whole = episode(
        sampled("writer", (1,), (2,), role="writer"),
        sampled("critic", (1,), (2,), role="critic"),
        sampled("gone", (1,), (2,), role="writer", status=CallStatus.ABANDONED),
        Call("upstream", role="writer"),
        Call("blind", role="writer", completion_ids=(1,)),
        rewards=(Reward("f", 1.0),),
    )
    assert [whole.exclusion_reason(call, roles={"writer"}) for call in whole.calls] == [
        *(None, "role not selected", "abandoned", "no tokens", "no logprobs")
    ]
    assert [call.untrainable for call in whole.calls] == [None, None, "abandoned", "no tokens", "no logprobs"]


def test_what_a_grammar_chose_is_not_the_models() -> None:
    free, bound = (sampled(name, (1,), (2, 3, 4), allowed=allowed) for name, allowed in CONSTRAINED.items())
    assert (list(free.chosen), free.untrainable) == ([0, 2], None)
    assert (list(bound.chosen), bound.untrainable) == ([], "chosen by a grammar")
    assert list(sampled("text", (1,), (2, 3)).chosen) == [0, 1]


CONSTRAINED = {"free": (1.0, 0.5, 0.99), "bound": (0.98, 0.0, 0.0)}


def test_only_calls_of_the_policy_under_training_are_trained_on() -> None:
    own, other = sampled("a", (1,), (2,)), sampled("b", (1,), (2,), policy="upstream")
    whole = episode(own, other)
    assert [whole.exclusion_reason(call, policy="policy") for call in whole.calls] == [None, "another policy"]
    assert [whole.exclusion_reason(call) for call in whole.calls] == [None, None]


@pytest.mark.parametrize("ending", Ending)
def test_the_reward_of_an_attempt_follows_from_the_outcome_table(ending: Ending) -> None:
    rewards = (Reward("f", 1.0),) if ending is Ending.SUCCEEDED else ()
    whole = episode(sampled("a", (1,), (2,)), rewards=rewards, ending=ending)
    expected = {"given": 1.0, "failure_reward": -1.0, "none": None}[MEANING[ending].reward]
    assert whole.final_reward(failure_reward=-1.0) == expected


def test_a_rescoring_replaces_every_earlier_final_reward() -> None:
    given = (Reward("a", 1.0, name="truth"), Reward("b", 0.5, name="style"), Reward("c", 0.1, RewardKind.STEP))
    assert episode(rewards=given).final_reward(0.0) == 1.5
    rescored = episode(rewards=(*given, Reward("d", 0.25, source="rescore f"), Reward("e", 0.75, source="rescore f")))
    assert rescored.final_reward(0.0) == 0.75
    assert [reward.id for reward in rescored.effective_rewards] == ["c", "e"]


def test_a_success_that_is_still_to_be_scored_has_no_value() -> None:
    waiting = episode(sampled("a", (1,), (2,)), rewards=(Reward("s", 0.3, RewardKind.STEP),))
    assert waiting.final_reward(0.0) is None


def test_an_attempt_that_is_still_alive_has_no_value() -> None:
    assert episode(sampled("a", (1,), (2,)), ending=None).final_reward(0.0) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kept_ids": 1}, "parent"),
        ({"parent": "x"}, "another call"),
        ({"completion_ids": (1, 2), "logprobs": (-0.1,)}, "logprobs"),
        ({"completion_ids": (1,), "logprobs": (float("nan"),)}, "finite"),
        ({"completion_ids": (1, 2), "allowed": (0.5,)}, "allowed"),
        ({"completion_ids": (1, 2), "versions": (VersionRun(1, 0),)}, "versions"),
    ],
)
def test_a_call_cannot_hold_nonsense(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Call("x", **fields)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"value": float("nan")}, "value"),
        ({"value": 1.0, "weight": float("inf")}, "weight"),
        ({"value": 1.0, "kind": RewardKind.STEP, "call": "c", "span": "0" * 16}, "both"),
        ({"value": 1.0, "call": "c"}, "final"),
    ],
)
def test_a_reward_cannot_hold_nonsense(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Reward("x", **fields)


@pytest.mark.parametrize("bad", ["", " a", "a\n", "a/b", "../x", "é", "a" * 161])
def test_an_id_that_cannot_stand_in_a_path_is_refused(bad: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"id": bad, "input": None}), type=Task)


def test_every_ending_has_a_meaning() -> None:
    assert set(MEANING) == set(Ending)


def test_trace_ids_are_valid_and_apart() -> None:
    ids = {trace_id(f"g.{n}.1") for n in range(1000)}
    assert len(ids) == 1000
    assert all(len(id) == 32 and int(id, 16) for id in ids)


DISTORTED = [
    (Sampling(temperature=0), "greedy sampling"),
    (Sampling(temperature=0, top_p=0.5), "greedy sampling"),
    (Sampling(top_p=0.99), "truncated sampling"),
    (Sampling(top_k=50), "truncated sampling"),
    (Sampling(min_p=0.05), "truncated sampling"),
    (Sampling(presence_penalty=-0.1), "penalised sampling"),
    (Sampling(frequency_penalty=0.1), "penalised sampling"),
    (Sampling(repetition_penalty=1.1), "penalised sampling"),
]


@pytest.mark.parametrize(("sampling", "why"), DISTORTED)
def test_biased_samples_are_trained_on_only_where_allowed(sampling: Sampling, why: str) -> None:
    fair = sampled("fair", (1,), (2,), sampling=Sampling(temperature=0.7, max_tokens=1, stop=("x",)), finish="length")
    whole = episode(fair, sampled("other", (1,), (2,), sampling=sampling), rewards=(Reward("r", 1.0),))
    assert [call.untrainable for call in whole.calls] == [None, why]
    assert [whole.exclusion_reason(call) for call in whole.calls] == [None, why]
    assert [whole.exclusion_reason(call, allow_biased_sampling=True) for call in whole.calls] == [None, None]


@pytest.mark.parametrize(("sampling", "why"), DISTORTED)
def test_a_run_cannot_sample_so_that_it_never_trains(sampling: Sampling, why: str) -> None:
    with pytest.raises(ValueError, match=f"{why}.*allow_biased_sampling"):
        RunSettings(sampling=sampling)
    assert RunSettings(sampling=sampling, allow_biased_sampling=True).sampling == sampling


@pytest.mark.parametrize(
    ("attributes", "role"),
    [
        ({"agent.name": "triage", "langgraph_node": "model"}, "triage"),
        ({"metadata": '{"langgraph_node": "planner", "langgraph_step": 1}'}, "planner"),
        ({"metadata": '{"langgraph_node": "model", "lc_agent_name": "researcher"}'}, "researcher"),
        ({"metadata": '{"langgraph_node": "model"}', "leyden.role": "critic"}, "critic"),
        ({"metadata": '{"langgraph_node": ' + "[" * 100_000}, None),
        ({"metadata": "no JSON", "agent.name": 3}, None),
    ],
)
def test_a_span_says_its_role_as_frameworks_write_it(attributes: dict[str, object], role: str | None) -> None:
    assert Span("1" * 32, "2" * 16, None, "s", "internal", 0, 1, attributes=attributes).role == role
