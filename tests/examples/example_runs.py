"""Runs an example's agent by itself against a model server, and trains an example for a few steps."""

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from modelserving import ModelServer

from leyden.config import override, read_config, read_file
from leyden.local.train import TrainingResult, train
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.user_code.loading import load_callable, placeholder_keys

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = """
import asyncio, inspect, json, sys
task = json.loads(sys.argv[1])
from {module} import {name} as solve
async def run():
    agent = solve() if isinstance(solve, type) else solve
    answer = agent(task)
    if inspect.isawaitable(answer):
        answer = await answer
    if agent is not solve:
        await agent.aclose()
    return answer
answer = asyncio.run(run())
assert not [name for name in sys.modules if name.partition(".")[0] == "leyden"]
print(json.dumps(answer))
"""


async def run_alone(server: ModelServer, example: str, task: dict[str, Any], agent: str = "agent:solve") -> Any:
    """The answer of an agent in a process without Leyden, which has the endpoint's address and key and nothing else."""
    module, _, name = agent.partition(":")
    code = ALONE.format(module=module, name=name)
    environment = {**os.environ, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
    environment |= {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": server.key}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, json.dumps(task)), cwd=EXAMPLES / example, env=environment, stdout=subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, process.returncode  # negative: the number of the signal that ended it
    return json.loads(printed.splitlines()[-1])


def load(example: str, reference: str) -> Any:
    """A function of an example."""
    with placeholder_keys():
        return load_callable(reference, str(EXAMPLES / example))


def train_example(example: str, folder: Path, toml: str = "spark.toml", **settings: Any) -> TrainingResult:
    """Train with an example's configuration for two small steps, where `settings` do not say otherwise."""
    size = {"training.steps": 2, "training.tasks_per_step": 2, "training.group_size": 4}
    given = {"home": folder / "runs", "held_out": 2, "training.warmup_steps": 0, **size, **settings}
    document = override(read_file(EXAMPLES / example / toml), [f"{key}={value}" for key, value in given.items()])
    return asyncio.run(train(read_config(document)))


def steps_of(trained: TrainingResult) -> list[dict[str, Any]]:
    """The metrics of each training step."""
    return [row for row in read_metrics(trained.folder / "metrics.jsonl", trained.policy) if row["step"] > 0]


class FileServer:
    """Serves the files of a folder over HTTP."""

    def __init__(self, folder: Path) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
