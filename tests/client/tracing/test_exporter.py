"""Spans of whatever emits them are with the server before their attempts end (those of frameworks: test_frameworks)."""

import pytest
from worker_harness import WorkerHarness

from leyden.outcomes import Ending


@pytest.mark.parametrize("late", [False, True])
async def test_a_tracer_provider_of_the_agent_is_used(
    harness: WorkerHarness, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setenv("LATE", "1")
    await harness.open()
    await harness.queue("g", {"name": "work"})
    with harness.worker("own_provider.py:solve"):
        episode = await harness.episode("g")
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.SUCCEEDED
    assert episode.final_reward(0.0) == 1.0  # its own exporter has the span
    assert [span.name for span in episode.spans] == ["work"]  # and so has the server
