"""Rewards on the way belong to the calls they were given for, whatever becomes of the attempt."""

import asyncio
import subprocess
import sys

import pytest
from worker_harness import AGENTS, WorkerHarness, worker_harness

from leyden.episodes import Episode
from leyden.outcomes import Ending


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Episode]:
    """What became of agents, all in one process: the clients take seconds to import."""

    async def run() -> dict[str, Episode]:
        async with worker_harness(tmp_path_factory.mktemp("home")) as harness:
            await harness.open()
            kinds = ("all", "dialects", "nan", "unknown")
            for kind in kinds:
                await harness.queue(kind, {"do": kind})
            with harness.worker("rewarding.py:act"):
                return {kind: await harness.episode(kind) for kind in kinds}

    return asyncio.run(run())


def test_a_reward_belongs_to_the_latest_call_unless_another_is_named(rewarded: dict[str, Episode]) -> None:
    episode = rewarded["all"]
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.SUCCEEDED, episode.attempt.outcome
    first, streamed, second, in_span = [call.id for call in episode.calls]
    (span,) = [span for span in episode.spans if span.scope == "leyden"]
    given = [(r.name, r.value, r.weight, r.call, r.span) for r in episode.effective_rewards if r.kind == "step"]
    assert given == [
        ("early", 0.1, 1.0, in_span, None),
        ("reward", 0.2, 1.0, first, None),
        ("reward", 1.0, 0.5, streamed, None),
        ("reward", 0.4, 1.0, second, None),
        ("later", 0.5, 1.0, first, None),
        ("later", 0.6, 1.0, second, None),
        ("reward", 0.7, 1.0, None, span.span_id),
    ]
    assert (span.name, span.attributes["size"], episode.role(episode.calls[-1])) == ("tool", 3, "helper")
    assert episode.final_reward(0.0) == 1.0


def test_a_call_is_named_by_a_response_of_every_dialect(rewarded: dict[str, Episode]) -> None:
    episode = rewarded["dialects"]
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.SUCCEEDED, episode.attempt.outcome
    response, completion = [call.id for call in episode.calls]
    given = [(r.value, r.call) for r in episode.effective_rewards if r.kind == "step"]
    assert given == [(0.1, response), (0.2, completion)]


async def test_branches_reward_their_own_calls(harness: WorkerHarness) -> None:
    await harness.open()
    for n in range(8):
        await harness.queue(f"g{n}", {})
    with harness.worker("rewarding.py:branches"):
        for n in range(8):
            episode = await harness.episode(f"g{n}")
            said = {call.id: float(call.response["content"]) for call in episode.calls}
            assert {r.call: r.value for r in episode.rewards if r.kind == "step"} == said


async def test_a_reward_function_sees_them_and_a_timeout_keeps_them(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("seen", {"do": "all"})
    await harness.queue("late", {"do": "late"})
    with harness.worker("rewarding.py:act", reward="rewarding.py:on_the_way", time_limit_s=5.0):
        seen, late = await harness.episode("seen"), await harness.episode("late")
    assert round(seen.final_reward(0.0) or 0, 6) == round(0.1 + 0.2 + 1.0 + 0.4 + 0.5 + 0.6 + 0.7, 6)
    assert late.attempt.outcome and late.attempt.outcome.ending is Ending.TIMEOUT
    assert [(r.value, r.call) for r in late.rewards] == [(0.3, late.calls[0].id)]
    assert late.role(late.calls[0]) == "asker"  # its spans are there too


def test_what_cannot_be_a_reward_is_the_agents_error(rewarded: dict[str, Episode]) -> None:
    found = {kind: rewarded[kind].attempt.outcome for kind in ("nan", "unknown")}
    assert all(outcome and outcome.ending is Ending.AGENT_ERROR for outcome in found.values())
    assert found["nan"] and "leyden.reward gave nan" in found["nan"].message
    assert found["unknown"] and "call-of-nobody" in found["unknown"].message


def test_an_agents_file_runs_alone() -> None:
    alone = subprocess.run([sys.executable, str(AGENTS / "rewarding.py")], capture_output=True, text=True)
    assert (alone.stdout, alone.stderr) == ("done\n", "")


def test_importing_leyden_imports_no_opentelemetry() -> None:
    program = "import leyden, sys; print(*(m for m in sys.modules if m.startswith('opentelemetry')))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "\n"
