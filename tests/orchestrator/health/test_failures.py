"""When a training warns of its agent, and when it gives up on it."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from smallepisodes import call, episode

from leyden.episodes import Episode
from leyden.learner.errors import TrainingError
from leyden.orchestrator.health.failures import FailureShare, FailureStreak, count_alike, no_calls
from leyden.orchestrator.health.health import Health
from leyden.outcomes import Ending, Outcome
from leyden.records import Task


def rollouts(task: int, *endings: Ending, message: str = "ValueError: no") -> list[Episode]:
    one = episode(0, None, [call("c")])
    outcomes = [Outcome(ending, "" if ending is Ending.SUCCEEDED else message) for ending in endings]
    return [
        replace(one, task=Task(f"t{task}", {}), attempt=replace(one.attempt, outcome=outcome)) for outcome in outcomes
    ]


def add_all(streak: FailureStreak, batches: Sequence[list[Episode]]) -> None:
    for batch in batches:
        streak.add(batch)


def test_an_agent_that_fails_on_most_tasks_trains_on_the_others() -> None:
    streak = FailureStreak(tasks=100)
    for number in range(200):
        ending = Ending.SUCCEEDED if number % 8 == 7 else Ending.AGENT_ERROR
        streak.add(rollouts(number % 100, ending, Ending.AGENT_ERROR))


def test_one_task_that_fails_again_and_again_does_not_end_a_training() -> None:
    streak = FailureStreak(tasks=100)
    add_all(streak, [rollouts(3, Ending.AGENT_ERROR)] * 50)


def test_different_tasks_that_fail_in_a_row_end_it_with_the_commonest_error() -> None:
    streak = FailureStreak(tasks=100)
    streak.add(rollouts(0, Ending.TIMEOUT, message="60 s"))
    with pytest.raises(
        TrainingError, match=r"no rollout of 8 different tasks in a row .*; 14 of 15 ended agent_error: ValueError: no"
    ):
        add_all(streak, [rollouts(number, Ending.AGENT_ERROR, Ending.AGENT_ERROR) for number in range(1, 9)])


def test_after_a_success_more_tasks_may_fail() -> None:
    streak = FailureStreak(tasks=100)
    streak.add(rollouts(0, Ending.SUCCEEDED))
    add_all(streak, [rollouts(number, Ending.AGENT_ERROR) for number in range(1, 32)])
    with pytest.raises(TrainingError, match="no rollout of 32 different tasks"):
        streak.add(rollouts(33, Ending.AGENT_ERROR))


def test_calls_before_a_success_do_not_hide_that_no_later_call_reached_the_gateway() -> None:
    streak = FailureStreak(tasks=2)
    streak.add(rollouts(0, Ending.AGENT_ERROR))
    streak.add(rollouts(1, Ending.SUCCEEDED))
    without_calls = [replace(one, calls=()) for task in range(2) for one in rollouts(task, Ending.AGENT_ERROR)]
    with pytest.raises(TrainingError, match="no model call reached the gateway"):
        streak.add(without_calls)


def test_a_run_with_few_tasks_ends_when_all_of_them_failed() -> None:
    streak = FailureStreak(tasks=2)
    streak.add(rollouts(0, Ending.AGENT_ERROR))
    with pytest.raises(TrainingError, match="no rollout of 2 different tasks"):
        streak.add(rollouts(1, Ending.AGENT_ERROR))


def test_an_agent_that_fails_before_its_first_call_is_named_with_its_error() -> None:
    assert "own base URL?" in no_calls(None)
    said = no_calls("ValueError: no answer.")
    assert said.startswith("the agent failed before a model call reached the gateway: ValueError: no answer. If")
    assert "OPENAI_BASE_URL" in said
    assert "Connection error. If that" in no_calls("APIConnectionError: Connection error.")


def test_an_error_that_no_model_call_raises_does_not_put_the_base_url_in_question() -> None:
    assert no_calls("KeyError: 'q'") == "the agent failed before a model call reached the gateway: KeyError: 'q'"


def test_most_rollouts_that_fail_are_a_warning_once_and_again_after_it_stopped() -> None:
    share = FailureShare("calc")
    failed, fine = [Ending.AGENT_ERROR] * 3, [Ending.SUCCEEDED] * 3
    most = [*rollouts(0, *failed, message="KeyError: 'q'\n  in solve"), *rollouts(1, Ending.TIMEOUT, Ending.SUCCEEDED)]
    assert share.add([*rollouts(0, *failed), *rollouts(1, *fine)]) is None  # a half
    said = share.add(most)
    assert said is not None and said.startswith("4 of 5 rollouts failed")
    assert "3 of them ended agent_error: KeyError: 'q' (leyden show calc --outcome agent_error)" in said
    assert share.add(most) is None
    assert share.add(rollouts(0, *fine)) is None
    assert share.add(rollouts(0, *failed)) is not None


def test_messages_that_differ_only_in_addresses_and_numbers_are_counted_together() -> None:
    texts = ("<Event at 0x7f12a8779050> is bound", "no", "<Event at 0x7f12a876c350> is bound\n  in solve:3")
    counted = count_alike(Outcome(Ending.AGENT_ERROR, text) for text in texts)
    assert [(outcome.message, count) for outcome, count in counted] == [(texts[0], 2), ("no", 1)]


def test_the_share_of_failures_is_said_before_a_streak_of_them_ends_the_run() -> None:
    health = Health("mine", tasks=1)
    failed = rollouts(0, *[Ending.AGENT_ERROR] * 8)
    assert "step 1: 8 of 8 rollouts failed" in (health.add_rollouts("step 1", failed) or "")
    with pytest.raises(TrainingError):
        for number in range(100):
            health.check_streak(rollouts(number, Ending.AGENT_ERROR))
