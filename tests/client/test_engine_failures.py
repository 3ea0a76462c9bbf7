"""Rollouts whose model call the engine failed are retried, however their agent calls the model."""

import sys
from typing import Any

import pytest
from worker_harness import WorkerHarness, echo

from leyden.engine.protocol import EngineLost
from leyden.outcomes import Ending

AGENTS = ("ask_once.py:by_aiohttp", "ask_once.py:by_streamed_response", f"{sys.executable} ask_once.py")


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_is_not_charged_for_a_crash_of_the_engine(harness: WorkerHarness, agent: str) -> None:
    crashes = [EngineLost("the connection to vLLM is lost")]

    def say(prompt: str) -> Any:
        if crashes:
            raise crashes.pop()
        return echo(prompt)

    harness.server.say = say
    await harness.open(max_attempts=1, failure_reward=-1.0)
    await harness.queue("g", {})
    with harness.worker(agent):
        episode = await harness.episode("g")
    assert (episode.attempt.number, episode.final_reward(-1.0)) == (2, 1.0)
    first = (await harness.remote.get_rollout("r", "g.0")).attempts[0].outcome
    assert first is not None and first.ending is Ending.ENGINE_ERROR
    assert first.message.startswith("the engine failed: the connection to vLLM is lost\n")
