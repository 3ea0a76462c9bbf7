"""An agent that does what its task says, to end in every way that an attempt can."""

import asyncio
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

import leyden
from leyden.episodes import Episode


def act(task: dict[str, Any], attempt: Any = None) -> Any:
    match task["do"]:
        case "return":
            return task["value"]
        case "raise":
            raise ValueError("the agent cannot go on")
        case "exit":
            sys.exit(3)
        case "result":
            return leyden.Result({"answer": 42}, 0.25)
        case "nan":
            return math.nan
        case "object":
            return {"odd": object(), "path": Path("/x"), "set": {1}}
        case "attempt":
            return {name: getattr(attempt, name) for name in ("id", "rollout", "base_url", "traceparent")}
        case "environment":
            names = ("LEYDEN_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL")
            return {name: os.environ.get(name) for name in names}
        case "call":
            body = {"model": "any", "messages": [{"role": "user", "content": "Say number 7"}]}
            headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
            answer = httpx.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers)
            return answer.raise_for_status().json()["choices"][0]["message"]["content"]
        case "sleep":
            time.sleep(task["s"])
            return 1.0
        case "wait":
            said = [Path(file).read_text() for file in task["files"]]
            return float(said == ["begun?", "go on"])
        case "leave a child":
            child = subprocess.Popen(["sleep", "600"])
            Path(task["file"]).write_text(f"{child.pid}")
            return time.sleep(600)
        case "die once":
            mark = Path(task["file"])
            if not mark.exists():
                mark.touch()
                os._exit(9)
            return 1.0
        case unknown:
            raise NotImplementedError(unknown)


async def act_async(task: dict[str, Any]) -> Any:
    if task["do"] == "sleep":
        try:
            await asyncio.sleep(task["s"])
        except asyncio.CancelledError:
            Path(task["file"]).touch()  # noqa: ASYNC240 - an agent may
            raise
        return 1.0
    return act(task)


def score(task: dict[str, Any], result: Any) -> Any:
    match task["reward"]:
        case "raise":
            raise RuntimeError("the grader is ill")
        case "nan":
            return math.nan
        case "text":
            return "good"
        case "true":
            return True
        case _:
            return 0.5


def score_slowly(task: dict[str, Any]) -> float:
    time.sleep(task.get("reward_s", 0))
    return 1.0


async def score_episode(task: dict[str, Any], episode: Episode, result: Any) -> Any:
    await asyncio.sleep(0)
    return len(episode.calls) if task["reward"] == "calls" else score(task, result)


def no_parameters() -> float:
    return 1.0
