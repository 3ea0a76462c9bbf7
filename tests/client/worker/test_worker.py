"""Real workers, real hosts, real clients: each call lands on its attempt, each attempt ends once and as it should."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest
from modelserving import eventually
from worker_harness import AGENTS, WorkerHarness, gone, hosts_of, kill

from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.worker import work
from leyden.outcomes import Ending
from leyden.server.control.keys import KeyKind
from leyden.user_code.loading import reference_to


async def test_calls_of_many_rollouts_in_one_process_land_on_their_own_attempts(harness: WorkerHarness) -> None:
    await harness.open()
    for n in range(32):
        await harness.queue(f"g{n}", {"n": n})
    with harness.worker("asking.py:solve", reward="asking.py:reward", concurrency=32):
        for n in range(32):
            episode = await harness.episode(f"g{n}")
            assert episode.attempt.outcome is not None
            assert (episode.attempt.outcome.ending, episode.final_reward(0.0)) == (Ending.SUCCEEDED, 1.0)
            assert [call.response["content"] for call in episode.calls] == [f"{n}"] * 4
        await harness.queue("lonely", {"n": 1, "lonely": True})
        lonely = await harness.episode("lonely")
    assert lonely.attempt.outcome and not lonely.calls
    assert lonely.attempt.outcome.ending is Ending.AGENT_ERROR
    assert "no known rollout" in lonely.attempt.outcome.message


async def test_tasks_and_threads_of_async_agents_keep_their_attempt(harness: WorkerHarness) -> None:
    await harness.open()
    for n in range(32):
        await harness.queue(f"g{n}", {"n": n})
    with harness.worker("asking.py:solve_async", reward="scores.py:all_right", concurrency=32, processes=2) as worker:
        for n in range(32):
            episode = await harness.episode(f"g{n}")
            assert episode.final_reward(0.0) == 1.0
            assert [call.response["content"] for call in episode.calls] == [f"{n}"] * 4
        assert len(hosts_of(worker)) == 2


async def test_agents_may_call_models_for_as_long_as_the_key_of_their_worker_is_valid(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    with harness.worker("asking.py:solve", reward="asking.py:reward"):
        for group, years in (("now", 0), ("later", 9)):
            harness.server.service.keyring.clock = lambda: time.time() + years * 365 * 86_400  # noqa: B023
            await harness.queue(group, {"n": 1})
            episode = await harness.episode(group)
            assert episode.final_reward(0.0) == 1.0, episode.attempt.outcome


async def test_every_way_an_agent_can_end_has_its_outcome(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=2)
    harness.server.engine.script = lambda _: (-1,)
    tasks = {
        "number": {"do": "return", "value": 0.75},
        "true": {"do": "return", "value": True},
        "nothing": {"do": "return", "value": None},
        "text": {"do": "return", "value": "Paris"},
        "result": {"do": "result"},
        "nan": {"do": "nan"},
        "raise": {"do": "raise"},
        "exit": {"do": "exit"},
        "engine": {"do": "call"},
        "attempt": {"do": "attempt"},
        "environment": {"do": "environment"},
        "object": {"do": "object"},
    }
    for name, task in tasks.items():
        await harness.queue(name, task)
    with harness.worker("moody.py:act"):
        found = {name: await harness.episode(name) for name in tasks}
    outcomes = {name: episode.attempt.outcome for name, episode in found.items()}
    endings = {name: str(outcome.ending) for name, outcome in outcomes.items() if outcome}
    messages = {name: outcome.message for name, outcome in outcomes.items() if outcome}
    assert endings == {
        "number": "succeeded",
        "true": "succeeded",
        "nothing": "no_reward",
        "text": "no_reward",
        "result": "succeeded",
        "nan": "no_reward",
        "raise": "agent_error",
        "exit": "agent_error",
        "engine": "engine_error",
        "attempt": "no_reward",
        "environment": "no_reward",
        "object": "no_reward",
    }
    assert [found[name].final_reward(-1.0) for name in ("number", "true", "result", "raise")] == [0.75, 1.0, 0.25, -1.0]
    assert found["result"].attempt.result == {"answer": 42}
    assert "nan" in messages["nan"] and "finite" in messages["nan"]
    assert messages["raise"].startswith("ValueError: the agent cannot go on\n  in act, ")
    assert 'raise ValueError("the agent cannot go on")' in messages["raise"]
    assert "503" in messages["engine"] and found["engine"].attempt.number == 2
    told = found["attempt"].attempt.result
    assert told["id"] == found["attempt"].attempt.id and told["base_url"] == f"{harness.server.url}/v1"
    variables = found["environment"].attempt.result
    assert variables["LEYDEN_KEY"] is None
    assert variables["OPENAI_BASE_URL"] == f"{harness.server.url}/v1"
    assert variables["ANTHROPIC_BASE_URL"] == harness.server.url
    key = harness.server.service.keyring.verify(variables["OPENAI_API_KEY"])
    assert (key.kind, key.run, key.pool) == (KeyKind.POOL, "r", found["environment"].attempt.pool)
    assert found["object"].attempt.result["odd"].startswith("<object object")


async def test_a_reward_function_sees_the_episode_and_its_failure_is_no_reward(harness: WorkerHarness) -> None:
    await harness.open()
    kinds = ("raise", "nan", "text", "true", "")
    for kind in kinds:
        await harness.queue(f"g-{kind}", {"do": "return", "value": 3, "reward": kind})
    await harness.queue("calls", {"do": "call", "reward": "calls"})
    await harness.queue("two", {"do": "result", "reward": ""})
    await harness.queue("error", {"do": "raise"})
    with harness.worker("moody.py:act", reward="moody.py:score_episode"):
        found = [await harness.episode(f"g-{kind}") for kind in kinds]
        calls, two, error = [await harness.episode(name) for name in ("calls", "two", "error")]
    outcomes = [episode.attempt.outcome for episode in found]
    assert [str(o.ending) for o in outcomes if o] == ["no_reward", "no_reward", "no_reward", "succeeded", "succeeded"]
    assert [episode.final_reward(0.0) for episode in found] == [None, None, None, 1.0, 0.5]
    assert outcomes[0] and outcomes[0].message.startswith(
        "the reward function failed: RuntimeError: the grader is ill\n"
    )
    assert outcomes[1] and "nan" in outcomes[1].message
    assert outcomes[2] and "'good'" in outcomes[2].message
    assert found[3].attempt.result == 3  # with a reward function, what the agent returns is its result
    assert (calls.attempt.result, calls.final_reward(0.0)) == ("7", 1.0)
    assert two.attempt.outcome and two.attempt.outcome.ending is Ending.AGENT_ERROR
    assert "remove `reward` from the configuration" in two.attempt.outcome.message
    assert error.attempt.outcome and error.attempt.outcome.ending is Ending.AGENT_ERROR


async def test_a_long_attempt_outlives_its_lease_and_a_cancelled_one_stops(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open(lease_s=2.0)
    file = str(tmp_path / "cancelled")
    await harness.queue("long", {"do": "sleep", "s": 4.0, "file": file})
    await harness.queue("slow-reward", {"do": "return", "value": 2, "reward_s": 4.0})
    await harness.queue("cancelled", {"do": "sleep", "s": 600, "file": file})
    with harness.worker("moody.py:act_async", reward="moody.py:score_slowly", concurrency=3):
        await harness.event("attempt.started", "cancelled.0.1")
        await harness.remote.cancel_group("r", "cancelled")
        await eventually(lambda: Path(file).exists())
        for name in ("long", "slow-reward"):
            long = await harness.episode(name)
            assert (long.attempt.number, long.final_reward(0.0)) == (1, 1.0)
        for name in ("m", "n", "o"):  # every place is free again
            await harness.queue(name, {"do": "return", "value": 1.0})
            await harness.episode(name)


async def test_a_time_limit_ends_tasks_and_threads_at_once(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open()
    file = tmp_path / "cancelled"
    await harness.queue("task", {"do": "sleep", "s": 600, "file": str(file)})
    with harness.worker("moody.py:act_async", time_limit_s=3.0):
        task = await harness.episode("task")
        await eventually(file.exists)
    await harness.queue("thread", {"do": "sleep", "s": 600})
    await harness.queue("next", {"do": "return", "value": 1.0})
    with harness.worker("moody.py:act", time_limit_s=3.0, concurrency=1):
        thread, following = await harness.episode("thread"), await harness.episode("next")
    for late in (task, thread):
        assert late.attempt.outcome and late.attempt.outcome.ending is Ending.TIMEOUT
        assert late.attempt.outcome.message == "the agent took longer than 3 s (`rollout.time_limit_s`)"
        assert late.attempt.ended and late.attempt.ended - late.attempt.started < 20  # not after 600
    assert following.final_reward(0.0) == 1.0


async def test_a_worker_that_is_stopped_gives_back_its_attempts(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)  # it is not charged for
    await harness.queue("short", {"do": "sleep", "s": 1.0})
    await harness.queue("long", {"do": "sleep", "s": 600})
    with harness.worker("moody.py:act", grace_s=3.0) as worker:
        await harness.event("attempt.started", "long.0.1")
        hosts = hosts_of(worker)
        worker.stop()
        assert (await harness.episode("short")).final_reward(0.0) == 1.0
        await harness.queue("new", {"do": "return", "value": 1.0})
        assert await asyncio.to_thread(worker.process.wait, 60) == 0
        await gone(hosts)
    (long,) = (await harness.remote.get_rollout("r", "long.0")).attempts
    assert long.outcome and long.outcome.ending is Ending.LOST and "gave it back" in long.outcome.message
    assert (await harness.remote.get_rollout("r", "long.0")).rollout.state == "queued"
    assert (await harness.remote.get_rollout("r", "new.0")).attempts == ()


async def test_a_worker_that_is_killed_loses_nothing_and_leaves_nothing(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open(lease_s=1.0)
    child = tmp_path / "child"
    await harness.queue("a", {"do": "leave a child", "file": str(child)})
    await harness.queue("b", {"do": "sleep", "s": 0.5})
    with harness.worker("moody.py:act") as worker:
        await eventually(lambda: child.exists() and child.read_text() != "")
        family = hosts_of(worker)
        assert int(child.read_text()) in {process.pid for process in family}
        kill(psutil.Process(worker.process.pid))
        await gone(family)
    await harness.event("rollout.queued", "a.0")
    await harness.remote.cancel_group("r", "a")
    with harness.worker("moody.py:act"):
        assert (await harness.episode("b")).final_reward(0.0) == 1.0


async def test_a_host_that_is_still_loading_dies_with_its_worker(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open()
    (tmp_path / "slow.py").write_text(f"import time\nopen({str(tmp_path / 'loading')!r}, 'w')\ntime.sleep(600)\n")
    with harness.worker("slow.py:agent", base=str(tmp_path)) as worker:
        await eventually((tmp_path / "loading").exists)
        hosts = hosts_of(worker)
        kill(psutil.Process(worker.process.pid))
        await gone(hosts)


async def test_a_worker_ends_with_its_parent(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {"do": "sleep", "s": 600})
    with harness.worker("moody.py:act") as worker:
        await harness.event("attempt.started", "g.0.1")
        family = hosts_of(worker)
        worker.hang_up()  # as when the parent is killed
        assert await asyncio.to_thread(worker.process.wait, 60) == 1
        await gone(family)


async def test_a_host_that_dies_is_replaced_and_its_attempts_are_tried_again(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open()
    await harness.queue("dies", {"do": "die once", "file": str(tmp_path / "died")})
    await harness.queue("beside", {"do": "sleep", "s": 1.0})
    with harness.worker("moody.py:act") as worker:
        dies, beside = await harness.episode("dies"), await harness.episode("beside")
        while len(hosts := hosts_of(worker)) != 1:  # those that each was tried alone in end  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        kill(hosts[0])
        await harness.queue("later", {"do": "return", "value": 1.0})
        assert (await harness.episode("later")).final_reward(0.0) == 1.0
    assert (dies.attempt.number, dies.final_reward(0.0)) == (2, 1.0)
    assert beside.final_reward(0.0) == 1.0
    lost = (await harness.remote.get_rollout("r", "dies.0")).attempts[0].outcome
    assert lost and lost.ending is Ending.LOST and "exit status 9" in lost.message


async def test_an_agent_without_a_name_travels_as_a_pickle(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open()
    await harness.queue("g", {"n": 20})
    offset = 2
    agent = reference_to(lambda task: task["n"] + offset, str(tmp_path))
    with harness.worker(agent, reward=reference_to(lambda task, result: result - task["n"], str(tmp_path))):
        episode = await harness.episode("g")
    assert (episode.attempt.result, episode.final_reward(0.0)) == (22, 2.0)


async def test_what_cannot_be_loaded_is_one_line_before_any_work(harness: WorkerHarness, capfd: object) -> None:
    await harness.open()
    await harness.queue("g", {"do": "return", "value": 1})
    with harness.worker("moody.py:no_parameters") as worker:
        assert await asyncio.to_thread(worker.process.wait, 60) == 2
    assert (await harness.remote.get_rollout("r", "g.0")).attempts == ()
    error = capfd.readouterr().err
    assert error == (
        "leyden worker: the agent 'moody.py:no_parameters' has no parameter for the task: write def agent(task)\n"
    )


async def test_a_file_of_the_user_replaces_no_module_that_leyden_needs_to_start(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, project = tmp_path / "agents", tmp_path / "project"
    agents.mkdir()
    project.mkdir()
    for name in ("queue", "logging", "socket", "helpers"):  # three that Leyden imports, and one that the agent does
        (project / f"{name}.py").write_text("VALUE = 3\n")
    (agents / "agent.py").write_text("import helpers\ndef solve(task):\n    return helpers.VALUE\n")
    (agents / "reward.py").write_text("import helpers\ndef reward(task, result):\n    return result / helpers.VALUE\n")
    monkeypatch.chdir(project)
    await harness.open()
    await harness.queue("g", {})
    with harness.worker("agent.py:solve", reward="reward.py:reward", base=str(agents)):
        assert (await harness.episode("g")).final_reward(0.0) == 1.0


async def test_a_worker_whose_run_asks_for_nothing_says_so(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("leyden.client.worker.worker._PATIENCE_S", 0.2)
    await harness.open()
    options = WorkerOptions(server=harness.server.url, run="r", agent="moody.py:act", base=str(AGENTS), grace_s=0.0)
    stop, key = asyncio.Event(), harness.server.service.keyring.create(KeyKind.WORKER, 600, run="r")[0]
    working = asyncio.create_task(work(options, key, stop))
    await eventually(lambda: "run r does not ask for rollouts yet; is it being trained?" in caplog.text)
    stop.set()
    await working
