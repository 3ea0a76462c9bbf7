"""Commands in any language: each attempt a process with its own key, and none of its processes is left behind."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from modelserving import eventually
from worker_harness import AGENTS, WorkerHarness, alive, ending, existing, gone, hosts_of, kill, message

from leyden.client.attempt.result import MAX_ANSWER_BYTES
from leyden.client.runners.command_process import AnswerTooLarge, LastJsonLine
from leyden.outcomes import Ending
from leyden.server.control.keys import KeyKind

PYTHON = f"{sys.executable} command.py"


async def family_in(file: Path) -> list[psutil.Process]:
    await eventually(file.exists)
    return read_family(file)


def read_family(file: Path) -> list[psutil.Process]:
    """Those of the processes in a file that are still to be found."""
    return existing(json.loads(file.read_text()))


async def test_a_shell_script_asks_with_curl(harness: WorkerHarness) -> None:
    await harness.open()
    for n in range(6):
        await harness.queue(f"g{n}", {"n": n})
    with harness.worker("./ask.sh", reward="commands_reward.py:said", concurrency=3):
        for n in range(6):
            episode = await harness.episode(f"g{n}")
            assert (episode.attempt.result, episode.final_reward(-1.0)) == ({"said": n}, 1.0), message(episode)
            assert [call.response["content"] for call in episode.calls] == [f"{n}"]
            assert sorted(episode.output.splitlines()) == sorted([f"asking for {n}", f'{{"said": {n}}}', "done"])
            assert episode.attempt.pool is None


async def test_with_fixed_seeds_a_command_finds_the_seed_of_its_task(harness: WorkerHarness, tmp_path: Path) -> None:
    script = tmp_path / "seeds.sh"
    script.write_text('echo "\\"$LEYDEN_SEED $PYTHONHASHSEED\\""\n')
    await harness.open()
    for group, n in (("a", 1), ("b", 1), ("c", 2)):
        await harness.queue(group, {"n": n})
    with harness.worker(f"sh {script}", fixed_seeds=True):
        first, same, other = [(await harness.episode(group)).attempt.result for group in "abc"]
    assert first == same != other and str(first).endswith(" 0") and str(first)[0].isdigit()


async def test_a_node_script_asks_with_fetch_and_sends_a_span(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {"n": 12})
    with harness.worker("node ask.mjs"):
        episode = await harness.episode("g")
    assert (episode.attempt.result, episode.final_reward(-1.0)) == ({"said": 12, "sent": 200}, 0.5), message(episode)
    assert [call.response["content"] for call in episode.calls] == ["12"]
    assert [span.name for span in episode.spans] == ["node agent"]


async def test_bytes_that_are_not_utf8_change_no_outcome(harness: WorkerHarness) -> None:
    await harness.open()
    bad = b"caf\xe9\n"
    tasks: dict[str, Any] = {
        "before": {"do": "bytes", "hex": bad.hex(), "then": "0.75"},
        "quoted": {"do": "bytes", "hex": b'{"reward": "caf\xe9\n'.hex(), "then": "0.75"},
        "inside": {"do": "bytes", "hex": b'{"reward": 0.75, "result": "caf\xe9"}'.hex()},
        "surrogate": {"do": "bytes", "hex": b'{"reward": 0.75, "result": "caf\\udce9"}'.hex()},
        "much": {"do": "bytes", "hex": b'"caf\xe9"\n'.hex(), "times": 100_000, "then": "0.75"},
        "last": {"do": "bytes", "hex": b'0.75\n"caf\xe9'.hex()},
    }
    for name, task in tasks.items():
        await harness.queue(name, task)
    with harness.worker(PYTHON, concurrency=4):
        found = {name: await harness.episode(name) for name in tasks}
    for name, episode in found.items():
        assert (ending(episode), episode.final_reward(-1.0)) == (Ending.SUCCEEDED, 0.75), (name, message(episode))
    assert found["inside"].attempt.result == found["surrogate"].attempt.result == "caf\N{REPLACEMENT CHARACTER}"
    assert found["before"].output == "caf\N{REPLACEMENT CHARACTER}\n0.75\n"


async def test_every_way_a_command_can_end_has_its_outcome(harness: WorkerHarness) -> None:
    await harness.open()
    tasks: dict[str, Any] = {
        "number": {"do": "print", "lines": ["{}", "0.75", "good bye", "NaN"]},
        "not-finite": {"do": "print", "lines": ['{"progress": "half"}', '{"answer": 5, "loss": NaN, "m": -Infinity}']},
        "nothing": {"do": "print", "lines": ["no JSON here"]},
        "text": {"do": "print", "lines": ['"Paris"']},
        "folder": {"do": "folder"},
        "fail": {"do": "fail"},
        "signal": {"do": "signal"},
        "spew": {"do": "spew", "lines": 50_000},
        "large": {"do": "print", "lines": ["0.5"], "padding": "x" * 300_000},
        "raise": {"do": "no such thing"},
    }
    for name, task in tasks.items():
        await harness.queue(name, task)
    with harness.worker(f"{PYTHON} --fast 'two words'", concurrency=4):
        found = {name: await harness.episode(name) for name in tasks}
    assert {name: str(ending(episode)) for name, episode in found.items()} == {
        "number": "succeeded",
        "not-finite": "no_reward",
        "nothing": "no_reward",
        "text": "no_reward",
        "folder": "no_reward",
        "fail": "agent_error",
        "signal": "agent_error",
        "spew": "succeeded",
        "large": "succeeded",
        "raise": "agent_error",
    }
    assert found["number"].final_reward(-1.0) == 0.75
    assert found["not-finite"].attempt.result == {"answer": 5, "loss": None, "m": None}
    assert found["text"].attempt.result == "Paris"
    assert found["folder"].attempt.result == [str(AGENTS), ["--fast", "two words"]]
    assert message(found["fail"]) == "exit status 3\nit was not to be"
    assert message(found["signal"]) == "killed by SIGSEGV\ngoing"
    assert message(found["raise"]).endswith("NotImplementedError: no such thing")
    spewed = found["spew"].output
    assert spewed.startswith("begin\nxxx") and spewed.endswith("y\n1.0\n")
    assert len(spewed) < 66_000 and "bytes dropped" in spewed


async def test_a_result_that_is_too_large_is_an_outcome_and_no_earlier_line_is_scored(harness: WorkerHarness) -> None:
    await harness.open()
    sizes = {"read": 3 << 20, "not-read": 9 << 20}
    for name, size in sizes.items():
        await harness.queue(name, {"do": "large result", "n": 1, "bytes": size})
    with harness.worker(PYTHON, reward="commands_reward.py:said"):
        found = {name: await harness.episode(name) for name in sizes}
    for name, size in sizes.items():
        assert (ending(found[name]), found[name].final_reward(-1.0)) == (Ending.AGENT_ERROR, -1.0)
        assert f"the result is too large: {size:,}"[:-3] in message(found[name])


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 100), (100, 0), (100, MAX_ANSWER_BYTES)])
def test_white_space_around_a_result_that_is_too_large_does_not_hide_it(before: int, after: int) -> None:
    output = LastJsonLine()
    output.add(b'{"progress": "half"}\n' + b" " * before + b'{"answer": "')
    for part in (
        *[b"x" * (1 << 20)] * 9,
        b'"}',
        *[b" " * (1 << 16)] * (after >> 16),
        b" " * (after % (1 << 16)),
        b"\n",
    ):
        output.add(part)
    with pytest.raises(AnswerTooLarge):
        output.value()


async def test_a_command_has_its_own_attempts_key_and_no_other(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {"do": "environment", "prefix": ""})
    with harness.worker(PYTHON):
        episode = await harness.episode("g")
    variables = episode.attempt.result
    url = harness.server.url
    assert json.loads(variables["LEYDEN_TASK"]) == {"do": "environment", "prefix": ""}
    assert variables["OPENAI_BASE_URL"] == f"{url}/v1"
    assert variables["ANTHROPIC_BASE_URL"] == variables["LEYDEN_URL"] == variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == url
    assert episode.attempt.trace_id in variables["TRACEPARENT"]
    assert (variables["LEYDEN_RUN"], variables["LEYDEN_ATTEMPT"]) == ("r", "g.0.1")
    key = variables["LEYDEN_KEY"]
    names = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
    assert {variables[name] for name in names} == {key}
    assert variables["GOOGLE_GEMINI_BASE_URL"] == url
    assert variables["OTEL_EXPORTER_OTLP_HEADERS"] == f"authorization=Bearer%20{key}"
    read = harness.server.service.keyring.verify(key)
    assert (read.kind, read.attempt) == (KeyKind.ATTEMPT, "g.0.1")


async def test_a_command_need_not_read_its_task(harness: WorkerHarness, capfd: pytest.CaptureFixture[str]) -> None:
    await harness.open()
    await harness.queue("g", {"padding": "x" * 200_000}, size=20)
    with harness.worker("echo 0.5", concurrency=4):
        assert [episode.final_reward(-1.0) for episode in await harness.episodes("g")] == [0.5] * 20
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_time_limit_ends_the_command_and_all_that_it_started(
    harness: WorkerHarness, tmp_path: Path, stubborn: bool
) -> None:
    await harness.open()
    file = tmp_path / "children"
    await harness.queue("g", {"do": "leave children", "hang": True, "stubborn": stubborn, "file": str(file)})
    await harness.queue("next", {"do": "print", "lines": ["1"]})
    with harness.worker(PYTHON, time_limit_s=4.0, concurrency=1):
        family = await family_in(file)
        episode = await harness.episode("g")
        assert (await harness.episode("next")).final_reward(-1.0) == 1.0
        assert not any(map(alive, family))
    assert ending(episode) is Ending.TIMEOUT and episode.output == "hanging\n"


async def test_what_a_command_leaves_behind_ends_with_it_and_with_a_cancelled_attempt(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open(lease_s=2.0)
    await harness.queue("ends", {"do": "leave children", "hang": False, "file": str(tmp_path / "ends")})
    await harness.queue("hangs", {"do": "leave children", "hang": True, "file": str(tmp_path / "hangs")})
    with harness.worker(PYTHON):
        assert (await harness.episode("ends")).final_reward(-1.0) == 1.0
        assert not any(map(alive, read_family(tmp_path / "ends")))
        family = await family_in(tmp_path / "hangs")
        assert all(map(alive, family))
        await harness.remote.cancel_group("r", "hangs")
        await gone(family)


async def test_a_command_that_kills_its_parent_ends_with_all_that_it_started(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open()
    await harness.queue("g", {"do": "leave children", "kill parent": True, "file": str(tmp_path / "family")})
    await harness.queue("next", {"do": "print", "lines": ["1"]})
    with harness.worker(PYTHON, concurrency=1):
        episode = await harness.episode("g")
        assert not any(map(alive, read_family(tmp_path / "family")))
        assert (await harness.episode("next")).final_reward(-1.0) == 1.0
    assert ending(episode) is Ending.AGENT_ERROR and message(episode).startswith("killed by SIGKILL")


async def test_nothing_is_left_of_a_worker_that_is_killed(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open()
    await harness.queue("g", {"do": "leave children", "hang": True, "file": str(tmp_path / "family")})
    with harness.worker(PYTHON) as worker:
        family = await family_in(tmp_path / "family") + hosts_of(worker)
        assert len({process.pid for process in family}) >= 5
        kill(psutil.Process(worker.process.pid))
        await gone(family)


async def test_a_worker_continues_when_its_command_host_is_killed(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open()
    await harness.queue("g", {"do": "leave children", "hang": True, "file": str(tmp_path / "family")})
    with harness.worker(PYTHON) as worker:
        await family_in(tmp_path / "family")
        between = hosts_of(worker)[0]
        (command,) = [child for child in hosts_of(worker) if "command.py" in child.cmdline()]
        (tmp_path / "family").unlink()
        family = between.children(recursive=True)
        kill(between)
        await gone([command])
        await family_in(tmp_path / "family")
        (lost, _) = (await harness.remote.get_rollout("r", "g.0")).attempts
        await gone(family)
    assert lost.outcome and lost.outcome.ending is Ending.LOST


async def test_limits_of_memory_and_cpu_end_a_command_and_say_so(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("within", {"do": "memory", "mb": 10})
    await harness.queue("memory", {"do": "memory", "mb": 1000})
    await harness.queue("children", {"do": "memory of children", "mb": 200, "n": 3})
    await harness.queue("shared", {"do": "memory shared with children", "mb": 200, "n": 3})
    await harness.queue("cpu", {"do": "burn"})
    with harness.worker(PYTHON, memory_mb=300, cpu_s=1.0):
        within, memory, children, shared, cpu = [
            await harness.episode(name) for name in ("within", "memory", "children", "shared", "cpu")
        ]
    assert ending(within) is ending(shared) is Ending.SUCCEEDED, message(shared)
    assert ending(memory) is Ending.AGENT_ERROR and "more than 300 MB of memory" in message(memory)
    assert ending(children) is Ending.AGENT_ERROR
    assert message(children).startswith("killed by SIGKILL: its processes together held more than 300 MB of memory")
    assert ending(cpu) is Ending.AGENT_ERROR
    assert message(cpu).startswith("killed by SIGXCPU: it used more than 1 s of CPU time")


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("no-such-program --fast", "there is no 'no-such-program' in "),
        ("./command.py", "'./command.py' is not executable: chmod +x it"),
        ("python 'unclosed", "cannot be read: No closing quotation"),
    ],
)
async def test_a_command_that_cannot_be_run_is_one_line_before_any_work(
    harness: WorkerHarness, agent: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    await harness.open()
    assert not os.access(AGENTS / "command.py", os.X_OK)
    with harness.worker(agent) as worker:
        assert await asyncio.to_thread(worker.process.wait, 60) == 2
    said = capfd.readouterr().err
    assert says in said and said.count("\n") == 1
