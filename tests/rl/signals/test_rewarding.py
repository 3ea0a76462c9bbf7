"""Signals with a weight become rewards of the calls that caused them, once."""

from collections import defaultdict

import msgspec
import pytest
from msgspec.structs import replace
from toolconversations import USER, Conversation, assistant, result, tool_call

from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.config.schema import SignalsConfig
from leyden.outcomes import Ending, Outcome
from leyden.records import Reward, RewardKind, RunSettings, Task
from leyden.rl.signals import Signal, SignalKind, SignalRules, automatic, find
from leyden.store.read import queries
from leyden.store.store import Store

ALL = SignalRules(dict.fromkeys(SignalKind, -0.5))


@pytest.fixture
def conversation() -> Conversation:
    """Two tools that fail and one that does not, then the last call again."""
    zero = '{"a": 1, "b": 0}'
    conversation = Conversation().turn(
        [USER], assistant("", tool_call("1", "divide", zero), tool_call("2"), tool_call("3", "look", "{}"))
    )
    results = [result("1", "Error: by zero"), result("2"), result("3", "Error: it is dark")]
    return conversation.turn(results, assistant("", tool_call("4"))).turn([result("4")], assistant(""), role="writer")


def test_a_signal_without_a_weight_gives_no_reward(conversation: Conversation) -> None:
    assert automatic(conversation.episode, SignalRules(), 1) == ()
    assert automatic(conversation.episode, SignalRules(dict.fromkeys(SignalKind, 0.0)), 1) == ()


def test_every_signal_has_a_weight_of_that_name_in_the_configuration() -> None:
    config = msgspec.to_builtins(SignalsConfig())
    assert [name for name in config if name not in ("rule", "anneal_steps", "exempt")] == list(SignalKind)
    assert all(config[kind] == 0 for kind in SignalKind)


def test_each_signal_is_a_separate_reward_with_its_evidence(conversation: Conversation) -> None:
    given = automatic(conversation.episode, SignalRules({SignalKind.TOOL_FAILED: -0.5}), 1)
    assert [(reward.call, reward.name) for reward in given] == [("a", "tool_failed/1"), ("a", "tool_failed/3")]
    assert {(reward.kind, reward.source, reward.value) for reward in given} == {(RewardKind.AUTOMATIC, "signals", 1.0)}
    assert given[0].why == "tool call 1 (divide): its result is an error: Error: by zero"
    episode = replace(conversation.episode, rewards=(*given, Reward("s", 1.0, RewardKind.STEP, call="a")))
    assert episode.effective_rewards[:2] == given
    assert episode.transitions[0].reward == 0.0


def test_rewards_of_one_episode_are_deterministic(conversation: Conversation) -> None:
    given = automatic(conversation.episode, ALL, 1)
    assert automatic(conversation.episode, ALL, 1) == given
    assert len({reward.id for reward in given}) == len({(r.call, r.name) for r in given}) == len(given)
    other = automatic(conversation.episode, SignalRules(dict.fromkeys(SignalKind, 0.25)), 1)
    episode = replace(conversation.episode, rewards=given + other)
    assert episode.effective_rewards == other  # other weights replace the first


def test_weights_fall_to_zero_over_anneal_steps(conversation: Conversation) -> None:
    rules = SignalRules({SignalKind.EMPTY_ANSWER: -0.5}, anneal_steps=4)
    weights = [automatic(conversation.episode, rules, step)[0].weight for step in (0, 1, 2, 3, 5, 9)]
    assert weights == [-0.5, -0.5, -0.375, -0.25, 0.0, 0.0]


def test_an_exempt_tool_may_be_called_again(conversation: Conversation) -> None:
    rules = SignalRules({SignalKind.REPEATED_CALL: -1.0})
    assert [reward.call for reward in automatic(conversation.episode, rules, 1)] == ["b"]
    assert automatic(conversation.episode, replace(rules, exempt=frozenset({"divide"})), 1) == ()


def test_a_rule_sees_every_signal_and_overrides_the_weights(conversation: Conversation) -> None:
    seen: dict[str, list[Signal]] = defaultdict(list)

    def rule(signal: Signal) -> float | None:
        seen[signal.call.id].append(signal)
        match signal.kind, signal.tool:
            case SignalKind.TOOL_FAILED, "look":
                return 0.0
            case SignalKind.EMPTY_ANSWER, _:
                return -2 if signal.role == "writer" else None
        return None

    given = automatic(conversation.episode, SignalRules({SignalKind.TOOL_FAILED: -1.0}, rule, anneal_steps=2), 2)
    assert [(r.call, r.name, r.weight) for r in given] == [
        ("a", "tool_failed/1", -0.5),
        ("a", "tool_failed/3", 0.0),
        ("c", "empty_answer", -1.0),
    ]
    assert [signal for call in seen.values() for signal in call] == find(conversation.episode)
    assert [signal.result for signal in seen["a"]] == ["Error: by zero", "3", "Error: it is dark"]


def test_long_evidence_is_cut() -> None:
    conversation = Conversation().turn([USER], assistant("", tool_call("1", "multiply" * 1000, "x" * 10_000)))
    assert all(len(reward.why) < 500 for reward in automatic(conversation.episode, ALL, 1))


async def test_rewards_are_recorded_once_with_their_reason(store: Store, conversation: Conversation) -> None:
    await store.create_run(RunSpec("r", RunSettings()))
    await store.enqueue("r", GroupSpec("g", Task("t", {})))
    (grant,) = await store.lease(LeaseRequest("w", run="r"))
    attempt = grant.attempt.id
    await store.record_calls("r", attempt, conversation.calls)
    await store.finish("r", attempt, FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("final", 1.0),)))
    given = automatic(await store.read(queries.get_episode, "r", attempt), ALL, 1)
    assert [await store.record_rewards("r", attempt, given, rescoring=True) for _ in range(2)] == [len(given), 0]
    episode = await store.read(queries.get_episode, "r", attempt)
    assert [replace(reward, at=0.0) for reward in episode.rewards[1:]] == list(given)
    assert automatic(episode, ALL, 1) == given
    assert episode.final_reward(0.0) == 1.0


def test_rewards_that_were_recorded_without_a_reason_are_still_read() -> None:
    assert msgspec.json.decode(b'{"id": "old", "value": 0.5}', type=Reward) == Reward("old", 0.5)
