"""The script of docs/security.md that runs an attempt in a container, with a stand-in for Docker.

The stand-in has Docker's command line and starts containers from a process that is no relative of the attempt's, as
Docker's daemon does. It has neither images nor namespaces: what a real daemon makes of the options is not tested.
"""

import asyncio
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from modelserving import eventually
from worker_harness import WorkerHarness

from leyden.outcomes import Ending

CLI = f"""#!{sys.executable}
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as daemon:
    daemon.connect(os.environ["DOCKER_STAND_IN"])
    task = sys.stdin.read() if sys.argv[1] == "run" else ""
    daemon.sendall(json.dumps([sys.argv[1:], dict(os.environ), task]).encode() + b"\\n")
    status, output = json.loads(daemon.makefile().readline())
sys.stdout.write(output)
sys.exit(status)
"""
AGENT = f"""#!{sys.executable}
import json, os, sys, time, urllib.request
task = json.load(sys.stdin)
body = {{"model": "any", "messages": [{{"role": "user", "content": "number 7"}}]}}
headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
time.sleep(task["sleep_s"])
print(json.dumps({{"result": sorted(os.environ), "reward": 1.0}}))
"""
FLAGS = ("--rm", "--interactive", "--init")


class DockerStandIn:
    """Runs containers as plain processes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = []
        self.killed: list[str] = []
        self.containers: dict[str, asyncio.subprocess.Process] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (verb, *words), variables, task = json.loads(await reader.readline())
        reply = await (self._run(words, variables, task) if verb == "run" else self._kill(*words))
        with suppress(OSError):
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _run(self, words: list[str], variables: dict[str, str], task: str) -> tuple[int, str]:
        options: dict[str, Any] = {"--env": []}
        while words[0].startswith("--"):
            name = words.pop(0)
            if name == "--env":
                options[name].append(words.pop(0))
            else:
                options[name] = True if name in FLAGS else words.pop(0)
        self.runs.append({**options, "image": words[0]})
        container = await asyncio.create_subprocess_exec(
            *words[1:],
            env={name: variables[name] for name in options["--env"] if name in variables} | {"PATH": self._path},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self.containers[options["--name"]] = container
        output, _ = await container.communicate(task.encode())
        assert container.returncode is not None
        return abs(container.returncode), output.decode()

    async def _kill(self, name: str) -> tuple[int, str]:
        container = self.containers.get(name)
        if container is None or container.returncode is not None or name in self.killed:
            return 1, ""
        self.killed.append(name)
        os.killpg(container.pid, 9)
        return 0, name


def script_of_the_docs() -> str:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    found = re.search(r"```sh\n(#!/bin/sh\n# in_container\.sh:.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the script, an agent for the container and `docker`, which is first in the PATH."""
    folder = tmp_path / "agent"
    (folder / "image").mkdir(parents=True)
    write_program(folder / "in_container.sh", script_of_the_docs())
    write_program(folder / "docker", CLI)
    write_program(folder / "image" / "agent", AGENT)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_STAND_IN", str(folder / "socket"))
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
async def docker(folder: Path) -> AsyncIterator[DockerStandIn]:
    stand_in = DockerStandIn(f"{folder / 'image'}:/usr/bin:/bin")
    async with await asyncio.start_unix_server(stand_in.serve, folder / "socket"):
        yield stand_in


async def test_a_container_gets_the_task_and_the_variables_of_its_attempt(
    harness: WorkerHarness, folder: Path, docker: DockerStandIn
) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("g:1@x~y", {"sleep_s": 0})
    with harness.worker("./in_container.sh", base=str(folder)):
        episode = await harness.episode("g:1@x~y")
    assert episode.attempt.outcome is not None and episode.attempt.outcome.ending is Ending.SUCCEEDED, episode.output
    assert len(episode.calls) == 1 and episode.final_reward(0.0) == 1.0
    named = {"OPENAI_API_KEY", "OPENAI_BASE_URL", "LEYDEN_TASK", "TRACEPARENT"}
    assert named <= set(episode.attempt.result) and "SECRET_OF_THE_HOST" not in episode.attempt.result
    (run,) = docker.runs
    assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", run["--name"])  # Docker's rule
    assert (run["--network"], run["--memory"], run["--pids-limit"]) == ("host", "2g", "256")
    assert run["image"] == "my-agent-image" and all(run[flag] for flag in FLAGS)
    assert docker.killed == []


async def test_a_container_ends_with_its_attempt(harness: WorkerHarness, folder: Path, docker: DockerStandIn) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("g", {"sleep_s": 600})
    with harness.worker("./in_container.sh", base=str(folder), time_limit_s=3.0):
        episode = await harness.episode("g")
        assert episode.attempt.outcome is not None and episode.attempt.outcome.ending is Ending.TIMEOUT
        await eventually(lambda: all(each.returncode is not None for each in docker.containers.values()))
    assert docker.killed == list(docker.containers) and len(docker.killed) == 1
