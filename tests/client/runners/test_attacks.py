"""What code with an attempt's key or a pool's key can do on every route of the server and the gateway."""

import re
import sys
from typing import Any

import aiohttp
import pytest
from worker_harness import WorkerHarness

from leyden.api.wire import LeaseRequest
from leyden.outcomes import Ending
from leyden.records import RewardKind
from leyden.server.control.routes import ROUTES

OPEN = {"/healthz", "/openapi.json", "/signin", "/static/{file}"}
"""Routes without a key."""
AGENTS_OWN = ("/v1", "/role/{role}/v1")
"""Routes on which a key acts for its own attempt, whatever the path says."""


def walked() -> list[tuple[str, str]]:
    """Every route but the open ones, with the gateway's catch-alls for paths that it does not know."""
    routes = [(route.method, route.path.replace(":path}", "}")) for route in ROUTES if route.path not in OPEN]
    assert sum(path.startswith(AGENTS_OWN) for _, path in routes) > 20
    return routes


@pytest.mark.parametrize("agent", ["attacking.py:attack", f"{sys.executable} attacking.py"], ids=["pool", "attempt"])
async def test_a_key_of_an_agent_acts_for_its_own_attempt_and_sets_no_final_reward(
    harness: WorkerHarness, agent: str
) -> None:
    await harness.open(agent_rewards=True, reward_function=True, lease_s=600, max_attempts=1)
    await harness.queue("neighbour", {})
    (lease,) = await harness.remote.lease(LeaseRequest("another-worker", run="r", pool="another-pool"))
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {lease.key}"}) as session,
        session.post(f"{harness.server.url}/v1/responses", json={"model": "any", "input": "number 3"}) as reply,
    ):
        response = (await reply.json())["id"]
    neighbour = {
        "run": "r",
        "group": "neighbour",
        "rollout": lease.attempt.rollout,
        "attempt": lease.attempt.id,
        "worker": "another-worker",
        "policy": "policy",
        "role": "critic",
        "file": "app.js",
        "model": "any",
        "response_id": response,
        "path": "embeddings",
        "traceparent": lease.traceparent,
    }
    await harness.queue("g", {"routes": walked(), "neighbour": neighbour})
    with harness.worker(agent, reward="attacking.py:quarter"):
        episode = await harness.episode("g")
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.SUCCEEDED, episode.attempt.outcome
    did: dict[str, Any] = episode.attempt.result
    control = {
        whose: {route: status for route, status in did[whose].items() if "/v1" not in route}
        for whose in ("neighbour", "mine")
    }
    assert {route for route, status in control["neighbour"].items() if status < 400} == set()
    assert {route for route, status in control["mine"].items() if status < 400} == set()
    assert (did["final"], did["automatic"], did["step"]) == (403, 403, 200)
    # a pool's key acts only for attempts of its pool; an attempt's key for itself, whatever the context says
    calls = {route for route, status in did["neighbour"].items() if "/v1" in route and status < 400}
    harmless = {route for route in calls if re.search("/v1(beta)?/models(/{model})?$", route)} | {"POST /v1/traces"}
    assert calls - harmless == set() if episode.attempt.pool else "POST /v1/chat/completions" in calls
    assert {span.name for span in episode.spans} == {"forged"}  # an attempt's key sends spans for itself
    assert did["mine"]["POST /v1/chat/completions"] == 200
    # the neighbour's response is not there for another attempt, and nothing is recorded for the neighbour
    theirs = {route: status for route, status in did["neighbour"].items() if "{response_id}" in route}
    assert set(theirs.values()) <= {403, 404} and len(theirs) >= 6
    left = await harness.remote.get_episode("r", lease.attempt.id)
    assert (len(left.calls), left.rewards, left.spans, left.attempt.outcome) == (1, (), (), None)
    # and of itself only what an agent may say
    assert {(reward.value, reward.kind, reward.source) for reward in episode.rewards} == {
        (0.25, RewardKind.FINAL, "reward"),
        (0.5, RewardKind.STEP, "agent"),
    }
    assert not any(call.id == "forged" for call in episode.calls)
    assert {run.id for run in await harness.remote.list_runs()} == {"r"}
