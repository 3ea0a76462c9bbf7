"""An agent that does what its task says, to hang or crash in every way that code in a shared process can."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import leyden


def act(task: dict[str, Any]) -> Any:
    if "file" in task:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(task["file"]).write_text(f"{os.getpid()} {child.pid}")
    print(f"about to {task['do']}", flush=True)
    match task["do"]:
        case "sleep":
            time.sleep(task["s"])
        case "wait":
            while not Path(task["for"]).exists():
                time.sleep(0.05)
        case "block":
            threading.Event().wait()
        case "burn":
            while True:
                pass
        case "hold the lock":
            re.match(r"(a+)+$", "a" * 64 + "b")  # C code that never lets another thread run
        case "exit":
            os._exit(9)
        case "segfault":
            fall()
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "real-time":
            os.kill(os.getpid(), signal.SIGRTMIN + 6)
        case "think":
            import httpx

            with leyden.span("thinking", role="thinker"):
                said = httpx.post(
                    f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
                    headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
                    json={"model": "any", "messages": [{"role": "user", "content": "Say number 3"}]},
                )
                assert said.json()["choices"][0]["message"]["content"] == "3"
                time.sleep(600)
    return 1.0


def fall() -> None:
    ctypes.string_at(0)


async def act_async(task: dict[str, Any]) -> Any:
    await asyncio.sleep(task.get("first_s", 0))
    if task["do"] == "sleep":
        await asyncio.sleep(task["s"])
        return 1.0
    return time.sleep(600)  # noqa: ASYNC251 - it blocks the event loop, and that is the point
