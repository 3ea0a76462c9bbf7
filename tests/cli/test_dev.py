"""What `leyden dev` shows of a rollout: every conversation, and the reward that counted."""

from io import StringIO
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from smallepisodes import call, episode

from leyden.cli.dev import format_counts, print_report, transcript
from leyden.config import read_config
from leyden.episodes import Episode
from leyden.local.dev import summarise
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Reward, RewardKind, final_rewards


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


def test_a_reward_in_parts_is_their_sum_with_their_names() -> None:
    parts = {"right": 1.0, "short": 0.25}
    shown = episode(0, None, [said("only", "hello", "hi")], Ending.SUCCEEDED)
    shown = replace(shown, rewards=tuple(final_rewards("r", parts, "reward", {"short": 2.0})))
    assert transcript(shown, 0.0).endswith("reward[/] 1.5 (right 1, short 0.25)  (succeeded)")


def test_a_failure_has_the_reward_that_counted() -> None:
    step = Reward("s", 0.25, RewardKind.STEP, "format")
    failed = episode(0, None, [said("only", "hello", "hi")], Ending.AGENT_ERROR, step)
    assert transcript(failed, -1.0).endswith("reward[/] 0.25, -1 (failure_reward)  (agent_error)")
    lost = episode(0, None, [], Ending.LOST)
    assert transcript(lost, -1.0).endswith("reward[/] none  (lost)")


def test_several_calls_are_calls() -> None:
    left = {"no call to train on": 2, "call: chosen by a grammar": 4, "call: no logprobs": 1}
    assert format_counts(left) == "2 no call to train on, 4 calls: chosen by a grammar, 1 call: no logprobs"


CONFIG = read_config(
    {"run": "dev", "agent": "agent.py:solve", "tasks": "tasks.jsonl", "reward": "agent.py:score", "model": "spark"}
)


def printed(episodes: list[Episode]) -> str:
    output = StringIO()
    print_report(Console(file=output, width=200), summarise(CONFIG, episodes, Path("runs/dev")), episodes)
    return output.getvalue()


def failing(index: int, message: str) -> Episode:
    failed = episode(index, None, [said(f"c{index}", "hello", "hi")], Ending.AGENT_ERROR)
    return replace(failed, attempt=replace(failed.attempt, outcome=Outcome(Ending.AGENT_ERROR, message)))


def test_errors_that_differ_only_in_an_address_are_printed_once_with_a_count() -> None:
    errors = [failing(n, f"RuntimeError: <Event at 0x7f12a87{n}> is bound\n  in solve") for n in range(5)]
    lines = printed([failing(9, "KeyError: 'q'"), *errors]).splitlines()
    said = [line for line in lines if "Error: " in line]
    assert said == ["5 × RuntimeError: <Event at 0x7f12a870> is bound", "1 × KeyError: 'q'"]
