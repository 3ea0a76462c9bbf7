"""An agent that asks for its number, says that it is there, and stays until it is let go."""

import os
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

if "UNFIT" in os.environ:
    raise RuntimeError("this machine is not fit for it")
client = OpenAI(max_retries=0)


def solve(task: dict[str, Any], attempt: Any) -> float:
    question: Any = [{"role": "user", "content": f"Say number {task['n']}"}]
    said = client.chat.completions.create(model="any", messages=question).choices[0].message.content
    Path(task["here"], attempt.id).write_text(f"{os.getpid()}")
    while not Path(task["here"], "go").exists():
        time.sleep(0.02)
    return float(said or "nan")
