"""Every route with every kind of key. The table below is written by hand: a key that may do more fails here first."""

import asyncio
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from serving import ServerProcess

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import (
    EventCursor,
    FinishRequest,
    GroupSpec,
    HeartbeatRequest,
    KeySpec,
    Lease,
    LeaseRequest,
    RunSpec,
)
from leyden.outcomes import Ending, Outcome
from leyden.records import Reward, RewardKind, RunSettings, Task
from leyden.server.control.keys import KeyKind, KeyRefused, Keyring
from leyden.server.control.routes import ROUTES
from leyden.server.http.responses import Route

# Who asks. The requests concern run `mine` and an attempt of it that pool `hall` hosts.
NO_GOOD = {"nobody", "garbage", "payload changed", "signature changed", "expired", "another server's"}
ADMIN = {"admin"}
VIEWERS = {"viewer", "viewer of the run"}
WORKERS = {"worker", "worker of the run"}
AGENTS = {"pool", "pool of the run", "attempt"}
ELSEWHERE = {
    "viewer of another run",
    "worker of another run",
    "pool of another run",
    "another pool",
    "another attempt",
    "attempt of another run",
}
EVERYBODY = NO_GOOD | ADMIN | VIEWERS | WORKERS | AGENTS | ELSEWHERE | {"attempt that ended"}

OTHER_ATTEMPTS = {"another attempt", "attempt of another run"}  # each calls for itself

SEE, STEER, WORK = ADMIN | VIEWERS, ADMIN, ADMIN | WORKERS
RUN, GROUP = "/api/runs/{run}", "/api/runs/{run}/groups/{group}"
ROLLOUT, ATTEMPT = "/api/runs/{run}/rollouts/{rollout}", "/api/runs/{run}/attempts/{attempt}"

MAY: dict[tuple[str, str], set[str]] = {
    ("GET", "/healthz"): EVERYBODY,
    ("GET", "/openapi.json"): EVERYBODY,
    ("GET", "/metrics"): {"admin", "viewer"},
    ("GET", "/api/workers"): {"admin", "viewer"},
    ("GET", "/api/fleet"): {"admin", "viewer"},
    ("GET", "/"): SEE | {"viewer of another run"},
    ("GET", "/workers"): SEE | {"viewer of another run"},
    ("GET", "/compare"): SEE | {"viewer of another run"},
    ("GET", "/runs/{run}"): SEE,
    ("GET", "/runs/{run}/rollouts"): SEE,
    ("GET", "/runs/{run}/tasks"): SEE,
    ("GET", "/runs/{run}/rollouts/{rollout}"): SEE,
    ("GET", "/signin"): EVERYBODY,
    ("POST", "/signin"): EVERYBODY,
    ("GET", "/static/{file}"): EVERYBODY,
    ("GET", "/api/overview"): SEE | {"viewer of another run"},
    ("GET", "/api/stream"): SEE | {"viewer of another run"},
    **{
        ("GET", RUN + path): SEE
        for path in (
            *("/view", "/stream", "/card", "/series", "/series.csv", "/rewards", "/search", "/facets", "/failures"),
            *("/step_times", "/comparison", "/files", "/tasks", "/rollouts/{rollout}/view", "/groups/{group}/tree"),
        )
    },
    ("GET", "/api/runs"): SEE | {"viewer of another run"},
    ("POST", "/api/runs"): STEER,
    ("GET", RUN): SEE,
    ("GET", RUN + "/exists"): WORK,
    ("GET", RUN + "/evaluation"): SEE,
    ("DELETE", RUN): ADMIN,
    ("GET", RUN + "/summary"): SEE,
    ("GET", RUN + "/call_times"): SEE,
    ("GET", RUN + "/events"): SEE,
    ("GET", RUN + "/metrics"): SEE,
    ("POST", RUN + "/metrics"): STEER,
    ("POST", RUN + "/end"): STEER,
    ("POST", RUN + "/credits"): STEER,
    ("GET", RUN + "/versions"): SEE,
    ("POST", RUN + "/versions"): STEER,
    ("POST", RUN + "/policies/{policy}/hold"): STEER,
    ("POST", RUN + "/groups"): STEER,
    ("GET", GROUP): SEE,
    ("GET", GROUP + "/episodes"): SEE | WORKERS,
    ("POST", GROUP + "/cancel"): STEER,
    ("POST", "/api/scorings"): WORK | {"worker of another run"},
    ("POST", GROUP + "/beat"): WORK,
    ("POST", GROUP + "/scores"): WORK,
    ("GET", RUN + "/rollouts"): SEE,
    ("GET", ROLLOUT): SEE,
    ("GET", ROLLOUT + "/credits"): SEE,
    ("POST", ROLLOUT + "/cancel"): STEER,
    ("GET", ATTEMPT): SEE | WORKERS,
    ("POST", ATTEMPT + "/calls"): WORK,
    ("POST", ATTEMPT + "/rewards"): WORK | AGENTS,  # whether the run takes rewards of agents is a test of its own
    ("POST", ATTEMPT + "/finish"): WORK,
    ("POST", ATTEMPT + "/timeout"): WORK,
    ("POST", "/api/lease"): WORK | {"worker of another run"},
    ("POST", "/api/workers/{worker}/beat"): WORK | {"worker of another run"},
    ("POST", "/api/workers/{worker}/withdraw"): WORK | {"worker of another run"},
    ("POST", "/api/keys"): WORK | {"worker of another run"},
    **{
        (method, prefix + "/v1" + path): AGENTS | {"pool of another run", "another pool", *OTHER_ATTEMPTS}
        for prefix in ("", "/role/{role}")
        for method, path in (
            ("POST", "/chat/completions"),
            ("POST", "/messages"),
            ("POST", "/completions"),
            ("POST", "/responses"),
            ("POST", "/responses/input_tokens"),
            ("GET", "/responses/{response_id}"),
            ("DELETE", "/responses/{response_id}"),
            ("GET", "/responses/{response_id}/input_items"),
            ("POST", "/messages/count_tokens"),
            ("POST", "/{path:path}"),
            ("GET", "/models"),
            ("GET", "/models/{model:path}"),
            ("GET", "/{path:path}"),
            ("DELETE", "/{path:path}"),
        )
    },
    **{
        (method, prefix + base + path): AGENTS | {"pool of another run", "another pool", *OTHER_ATTEMPTS}
        for prefix in ("", "/role/{role}")
        for base in ("/v1", "/v1beta")
        for method, path in (
            ("POST", "/models/{model:path}:generateContent"),
            ("POST", "/models/{model:path}:streamGenerateContent"),
            ("POST", "/models/{model:path}:countTokens"),
            ("POST", "/models/{model:path}"),
            ("GET", "/models"),
            ("GET", "/models/{model:path}"),
        )
    },
    ("POST", "/v1/traces"): EVERYBODY - NO_GOOD - VIEWERS - {"viewer of another run", "attempt that ended"},
}


async def work_on(remote: Remote, run: str, count: int, pool: str | None = None, **settings: bool) -> list[Lease]:
    """Lease so many rollouts of a new run."""
    await remote.create_run(RunSpec(run, RunSettings(lease_s=3600, **settings)))
    await remote.enqueue(run, GroupSpec(f"{run}-g", Task("t", None), size=count))
    return await remote.lease(LeaseRequest("w", count, run=run, pool=pool))


async def fill(server: ServerProcess) -> dict[str, str]:
    async with Remote(server.url, server.admin_key) as remote:
        one, another, ended = await work_on(remote, "mine", 3, pool="hall")
        (elsewhere,) = await work_on(remote, "other", 1, pool="hall")
        await remote.finish("mine", ended.attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR)))
    payload, _, signature = server.key(KeyKind.VIEWER).removeprefix("leyden-").partition(".")
    promoted = msgspec.msgpack.decode(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    promoted[0] = "admin"
    forged = urlsafe_b64encode(msgspec.msgpack.encode(promoted)).rstrip(b"=").decode()
    return {
        "garbage": "leyden-garbage",
        "payload changed": f"leyden-{forged}.{signature}",
        "signature changed": server.admin_key[:-1] + ("0" if server.admin_key[-1] != "0" else "1"),
        "expired": server.key(KeyKind.ADMIN, ttl_s=-1),
        "another server's": Keyring(b"another secret", time.time).create(KeyKind.ADMIN, 3600)[0],
        "admin": server.admin_key,
        "viewer": server.key(KeyKind.VIEWER),
        "viewer of the run": server.key(KeyKind.VIEWER, run="mine"),
        "viewer of another run": server.key(KeyKind.VIEWER, run="other"),
        "worker": server.key(KeyKind.WORKER),
        "worker of the run": server.key(KeyKind.WORKER, run="mine"),
        "worker of another run": server.key(KeyKind.WORKER, run="other"),
        "pool": server.key(KeyKind.POOL, pool="hall"),
        "pool of the run": server.key(KeyKind.POOL, pool="hall", run="mine"),
        "pool of another run": server.key(KeyKind.POOL, pool="hall", run="other"),
        "another pool": server.key(KeyKind.POOL, pool="annex", run="mine"),
        "attempt": one.key,
        "another attempt": another.key,
        "attempt of another run": elsewhere.key,
        "attempt that ended": ended.key,
    }


@pytest.fixture(scope="module")
def keys(server: ServerProcess) -> dict[str, str]:
    return asyncio.run(fill(server))


async def knock(
    session: aiohttp.ClientSession, server: ServerProcess, route: Route, key: str | None, header: str = "authorization"
) -> int:
    """Ask for what would change nothing if it were let in: the body is broken, or the thing named is not there."""
    run = "absent" if route.method == "DELETE" else "mine"
    named = {
        "run": run,
        "group": "absent",
        "rollout": "absent",
        "attempt": "mine-g.0.1",
        "worker": "w",
        "role": "r",
        "policy": "p",
        "response_id": "absent",
        "file": "absent",
    }
    path = route.path.replace(":path}", "}").format(**named, path="embeddings/x", model="a/b")
    headers = {} if key is None else {header: f"Bearer {key}" if header == "authorization" else key}
    if route.body is not None:
        headers["content-type"] = "application/json"
    data = None if route.body is None else b"!"
    async with session.request(route.method, server.url + path, data=data, headers=headers) as reply:
        return reply.status


def test_the_table_names_every_route_and_every_asker(keys: dict[str, str]) -> None:
    assert {(route.method, route.path) for route in ROUTES} == set(MAY)
    assert {"nobody", *keys} == EVERYBODY


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_a_route_accepts_only_keys_with_its_permission(
    route: Route, server: ServerProcess, keys: dict[str, str]
) -> None:
    async with aiohttp.ClientSession() as session:
        found = {name: await knock(session, server, route, keys.get(name)) for name in EVERYBODY}
    may = MAY[route.method, route.path]
    assert {name for name, status in found.items() if status not in (401, 403)} == may
    assert {name for name, status in found.items() if status == 401} == NO_GOOD - may
    assert all(status < 500 for status in found.values()), found


async def test_a_key_may_come_as_x_api_key(server: ServerProcess, keys: dict[str, str]) -> None:
    route = next(route for route in ROUTES if route.path == "/metrics")
    async with aiohttp.ClientSession() as session:
        assert await knock(session, server, route, keys["viewer"], "x-api-key") == 200
        assert await knock(session, server, route, keys["viewer of the run"], "x-api-key") == 403
        assert await knock(session, server, route, keys["expired"], "x-api-key") == 401


async def refused(status: int, asking: Awaitable[object]) -> str:
    """Await something that the server must refuse, and say with which reason it did."""
    with pytest.raises(RemoteError) as error:
        await asking
    assert error.value.status == status, error.value
    return error.value.reason


# What a key is confined to


async def test_a_viewer_of_one_run_sees_that_run_only(server: ServerProcess, keys: dict[str, str]) -> None:
    async with Remote(server.url, keys["viewer of another run"]) as viewer:
        assert [run.id for run in await viewer.list_runs()] == ["other"]
    async with Remote(server.url, keys["viewer"]) as viewer:
        assert {"mine", "other"} <= {run.id for run in await viewer.list_runs()}


async def test_a_worker_of_one_run_gets_work_of_that_run_only(server: ServerProcess, remote: Remote) -> None:
    for run in ("theirs", "ours"):
        await remote.create_run(RunSpec(run))
        await remote.enqueue(run, GroupSpec(f"{run}-g", Task("t", None)))
    async with Remote(server.url, server.key(KeyKind.WORKER, run="ours")) as worker:
        assert await refused(403, worker.lease(LeaseRequest("w", run="theirs"))) == "not_permitted"
        assert [lease.attempt.run for lease in await worker.lease(LeaseRequest("w", count=9))] == ["ours"]
    (lease,) = await remote.lease(LeaseRequest("w", run="theirs"))
    async with Remote(server.url, server.key(KeyKind.WORKER, run="ours")) as worker:
        reply = await worker.heartbeat("w", HeartbeatRequest((lease.attempt.id,)))
        assert (reply.expires, [ended.outcome for ended in reply.ended]) == ({}, [None])


async def test_a_worker_makes_pool_keys_and_no_others(server: ServerProcess, keys: dict[str, str]) -> None:
    async with Remote(server.url, keys["worker"]) as worker:
        for kind in ("admin", "worker", "viewer"):
            assert await refused(403, worker.create_key(KeySpec(kind))) == "not_permitted"
        made = await worker.create_key(KeySpec("pool"))
    async with aiohttp.ClientSession() as session:
        empty = server.key(KeyKind.POOL, pool="nobody")
        for route in ROUTES:
            assert await knock(session, server, route, made.key) == await knock(session, server, route, empty)


async def test_a_key_made_is_no_wider_than_its_maker(server: ServerProcess, keys: dict[str, str]) -> None:
    async with Remote(server.url, keys["worker of the run"]) as worker:
        assert await refused(403, worker.create_key(KeySpec("pool", run="other"))) == "not_permitted"
        made = await worker.create_key(KeySpec("pool"))
    async with aiohttp.ClientSession() as session:
        empty = server.key(KeyKind.POOL, pool="nobody", run="mine")
        for route in ROUTES:
            assert await knock(session, server, route, made.key) == await knock(session, server, route, empty)


async def test_a_key_made_lives_no_longer_than_its_maker(server: ServerProcess) -> None:
    async with Remote(server.url, server.key(KeyKind.WORKER, ttl_s=60)) as worker:
        made = await worker.create_key(KeySpec("pool", ttl_s=86_400))
        assert made.expires <= time.time() + 60
        soon = await worker.create_key(KeySpec("pool", ttl_s=5))
        assert soon.expires <= time.time() + 5


async def test_attempt_keys_cannot_be_requested(remote: Remote) -> None:
    assert await refused(400, remote.create_key(KeySpec("attempt"))) == "invalid_request"


async def test_every_pool_key_has_its_own_pool(remote: Remote) -> None:
    one, another = [await remote.create_key(KeySpec("pool")) for _ in range(2)]
    assert one.pool
    assert another.pool not in (None, one.pool)
    assert (await remote.create_key(KeySpec("viewer"))).pool is None
    assert await refused(400, remote.create_key(KeySpec("admin", run="mine"))) == "invalid_request"


# Rewards from agents


@pytest.mark.parametrize("allowed", [True, False])
async def test_an_agent_sets_rewards_only_where_its_run_allows_it(
    server: ServerProcess, remote: Remote, allowed: bool
) -> None:
    run = f"agent-rewards-{allowed}".lower()
    await remote.create_run(RunSpec(run, RunSettings(lease_s=3600, agent_rewards=allowed)))
    pool, annex = await remote.create_key(KeySpec("pool", run=run)), await remote.create_key(KeySpec("pool", run=run))
    wide = server.key(KeyKind.POOL, pool=pool.pool or "")
    mine, sibling, outside = await work_on(remote, run, 3, pool=pool.pool, agent_rewards=allowed)
    for number, key in enumerate((mine.key, pool.key, wide, sibling.key, annex.key)):
        async with Remote(server.url, key) as agent:
            reward = Reward(f"r{number}", 1.0, RewardKind.STEP, source="grader")
            giving = agent.record_rewards(run, mine.attempt.id, [reward])
            if allowed and key in (mine.key, pool.key, wide):
                assert (await giving).new == 1
            else:
                assert await refused(403, giving) == "not_permitted"
    episode = await remote.get_episode(run, mine.attempt.id)
    assert [reward.id for reward in episode.rewards] == (["r0", "r1", "r2"] if allowed else [])
    assert {reward.source for reward in episode.rewards} <= {"agent"}  # it cannot pose as somebody else
    assert (await remote.get_episode(run, outside.attempt.id)).rewards == ()


@pytest.mark.parametrize("scored", [True, False])
async def test_an_agent_sets_no_final_reward_where_a_function_does_and_never_an_automatic_one(
    server: ServerProcess, remote: Remote, scored: bool
) -> None:
    run = f"scored-{scored}".lower()
    pool = await remote.create_key(KeySpec("pool", run=run))
    (mine,) = await work_on(remote, run, 1, pool=pool.pool, agent_rewards=True, reward_function=scored)
    for key in (mine.key, pool.key):
        async with Remote(server.url, key) as agent:
            giving = agent.record_rewards(run, mine.attempt.id, [Reward("automatic", 1.0, RewardKind.AUTOMATIC)])
            assert await refused(403, giving) == "not_permitted"
            giving = agent.record_rewards(run, mine.attempt.id, [Reward("final", 1.0, RewardKind.FINAL)])
            if scored:
                assert await refused(403, giving) == "not_permitted"
            else:
                await giving
    finals = [reward.kind for reward in (await remote.get_episode(run, mine.attempt.id)).rewards]
    assert finals == ([] if scored else [RewardKind.FINAL])


# How long a key lives


async def trace_with(server: ServerProcess, key: str) -> int:
    """Do with an attempt's key what it is for."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/traces", data=b"{}", headers=headers) as reply,
    ):
        return reply.status


async def test_a_key_dies_with_its_attempt_at_once(server: ServerProcess, remote: Remote) -> None:
    leases = await work_on(remote, "endings", 3)
    finished, cancelled, with_its_run = keys = [lease.key for lease in leases]
    assert [await trace_with(server, key) for key in keys] == [200, 200, 200]

    await remote.finish("endings", leases[0].attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR)))
    assert await trace_with(server, finished) == 403

    await remote.cancel_rollout("endings", leases[1].attempt.rollout)
    assert await trace_with(server, cancelled) == 403
    assert await trace_with(server, with_its_run) == 200

    await remote.delete_run("endings")
    assert await trace_with(server, with_its_run) == 403


async def test_a_key_dies_when_its_lease_runs_out(server: ServerProcess, remote: Remote) -> None:
    await remote.create_run(RunSpec("brief", RunSettings(lease_s=0.1)))
    await remote.enqueue("brief", GroupSpec("brief-g", Task("t", None)))
    (lease,) = await remote.lease(LeaseRequest("w", run="brief"))
    log = await remote.follow_events("brief", EventCursor(wait=30, kind="attempt.ended"))
    assert [event.subject for event in log.events] == [lease.attempt.id]
    assert await trace_with(server, lease.key) == 403


async def test_a_dead_key_stays_dead_when_its_run_is_made_again(server: ServerProcess, remote: Remote) -> None:
    (before,) = await work_on(remote, "again", 1)
    await remote.delete_run("again")
    (after,) = await work_on(remote, "again", 1)
    assert after.attempt.id == before.attempt.id
    assert await trace_with(server, before.key) == 403
    assert await trace_with(server, after.key) == 200


async def test_keys_outlive_a_crash_of_the_server_and_attempts_their_own(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        admin = server.admin_key
        async with Remote(server.url, admin) as remote:
            pool = (await remote.create_key(KeySpec("pool"))).key
            alive, ended = await work_on(remote, "r", 2, pool="hall")
            viewer = (await remote.create_key(KeySpec("viewer"))).key
            await remote.finish("r", ended.attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR)))
        server.kill()
        server.start()
        assert server.admin_key == admin
        assert await trace_with(server, alive.key) == 200
        assert await trace_with(server, pool) == 200
        assert await trace_with(server, ended.key) == 403
        async with Remote(server.url, viewer) as remote:
            assert [run.id for run in await remote.list_runs()] == ["r"]


# Keys by themselves


def test_a_key_says_what_it_was_made_for_until_it_expires() -> None:
    now = [1000.0]
    keyring = Keyring(b"secret", lambda: now[0])
    text, key = keyring.create(KeyKind.POOL, 10, run="r", pool="p")
    assert keyring.verify(text) == key
    assert (key.kind, key.run, key.pool, key.expires) == (KeyKind.POOL, "r", "p", 1010.0)
    now[0] = 1010.0
    with pytest.raises(KeyRefused, match="expired"):
        keyring.verify(text)


@pytest.mark.parametrize("text", ["", "leyden-", "leyden-.", "leyden-e30.", "sk-abc", "leyden-é.é", "x" * 100_000])
def test_what_is_not_a_key_is_refused(text: str) -> None:
    with pytest.raises(KeyRefused) as refusal:
        Keyring(b"secret", time.time).verify(text)
    assert refusal.value.status == 401


@pytest.mark.parametrize("text", ["", "00", "not hexadecimal"])
def test_a_damaged_secret_is_never_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_text(text)
    with pytest.raises(ValueError, match="damaged"):
        Keyring.from_file(tmp_path / "secret", time.time)
