"""What `leyden dev` shows of a rollout: every conversation, and the reward that counted."""

from smallepisodes import call, episode

from leyden.cli.dev import format_counts, transcript
from leyden.outcomes import Ending
from leyden.records import Call, Reward, RewardKind


def said(name: str, asked: str, answered: str, **fields: object) -> Call:
    message, response = {"role": "user", "content": asked}, {"role": "assistant", "content": answered}
    return call(name, messages=(message,), response=response, **fields)


def test_every_conversation_is_shown_once_with_its_role() -> None:
    calls = [
        said("plan", "make a plan", "search first", role="planner"),
        said("search", "find it", "not here", role="searcher"),
        said("more", "and then?", "stop [there]", role="planner", parent="plan", kept_messages=2),
        said("other", "", "or elsewhere", role="searcher", parent="search", kept_messages=1, choice=1),
    ]
    lines = transcript(episode(0, 1.0, calls), 0.0).splitlines()
    heads = [line.strip() for line in lines if "conversation" in line]
    assert heads == [
        "[bold]conversation 1 of 3, role searcher[/]",
        "[bold]conversation 2 of 3, role planner[/]",
        "[bold]conversation 3 of 3, role searcher[/]",
    ]
    planner = lines[lines.index("  " + heads[1]) + 1 :][:4]
    assert [line.split("  ")[-1] for line in planner] == ["make a plan", "search first", "and then?", r"stop \[there]"]
    assert lines[-1] == "  [cyan]reward[/] 1  (succeeded)"


def test_one_conversation_without_a_role_needs_no_title() -> None:
    assert "conversation" not in transcript(episode(0, 1.0, [said("only", "hello", "hi")]), 0.0)


def test_a_failure_has_the_reward_that_counted() -> None:
    step = Reward("s", 0.25, RewardKind.STEP, "format")
    failed = episode(0, None, [said("only", "hello", "hi")], Ending.AGENT_ERROR, step)
    assert transcript(failed, -1.0).endswith("reward[/] 0.25, -1 (failure_reward)  (agent_error)")
    lost = episode(0, None, [], Ending.LOST)
    assert transcript(lost, -1.0).endswith("reward[/] none  (lost)")


def test_several_calls_are_calls() -> None:
    left = {"no call to train on": 2, "call: chosen by a grammar": 4, "call: no logprobs": 1}
    assert format_counts(left) == "2 no call to train on, 4 calls: chosen by a grammar, 1 call: no logprobs"
