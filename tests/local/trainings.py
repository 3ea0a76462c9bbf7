"""`leyden train` as a user starts it, in its own folder, with an agent that needs no time."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from forked_commands import ForkedCommand, start_command

AGENT = """
import os
import time
from pathlib import Path

import httpx  # OpenAI's client takes a second to import

client = httpx.Client(verify=False, timeout=600)


def solve(task):
    while Path("slow").exists():
        Path("waiting").touch()
        time.sleep(0.05)
    answer = client.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        json={"model": "spark", "messages": [{"role": "user", "content": task["question"]}], "max_tokens": 8},
    )
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def reward(task, result):
    return float(len(result or "") % 2)
"""
CONFIG = """
agent = "agent.py:solve"
reward = "agent.py:reward"
tasks = "tasks.jsonl"
held_out = 2

[training]
steps = 4
tasks_per_step = 2
group_size = 3
learning_rate = 1e-3

[evaluation]
every = 2
rollouts = 1

[checkpoints]
every = 2

[workers]
processes = 1
"""
ACCOUNTS = ("rollouts/", "groups/requested", "calls/trained", "calls/excluded/", "held_out/succeeded")


class Training:
    """One run's folder, and the process that trains in it."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder, self.settings, self.printed = folder, settings, ""
        (folder / "agent.py").write_text(AGENT)
        (folder / "small.toml").write_text(CONFIG)
        rows = [json.dumps({"question": f"What is {n} plus {n}?"}) for n in range(8)]
        (folder / "tasks.jsonl").write_text("\n".join(rows))

    def start(self, *arguments: str) -> ForkedCommand:
        """Begin, or go on."""
        words = ("train", "small.toml", *self.settings, *arguments)
        return start_command(*words, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, *arguments: str) -> str:
        """Train to the end; what was printed."""
        process = self.start(*arguments)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        return printed

    @property
    def run(self) -> Path:
        """The folder that the run leaves."""
        return self.folder / "runs" / "small"

    def metrics(self) -> list[dict[str, Any]]:
        """What was written down of each step."""
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def accounts(self) -> list[dict[str, float]]:
        """What each step says of its rollouts, and nothing of chance or time."""
        return [
            {name: value for name, value in row.items() if name == "step" or name.startswith(ACCOUNTS)}
            for row in self.metrics()
        ]

    def weights(self) -> bytes:
        """Of the last step."""
        return (self.run / "step-4" / "model.safetensors").read_bytes()


def after_lines(process: ForkedCommand, number: int) -> None:
    """Wait until a training has printed this many lines besides what it says of its parts."""
    assert process.stdout is not None
    while number:
        number -= not process.stdout.readline().startswith(
            ("tasks:", "learning rate", "engine:", "agents:", "dashboard:")
        )


def line_with(process: ForkedCommand, text: str) -> str:
    """Wait for a line with this text; what was printed before it is skipped."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"it ended without saying {text!r}")


def children(parent: int, module: str = "") -> list[int]:
    """The processes that a process started and that live; those that run a module, where one is named."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if int(ppid) == parent and state != "Z" and (not module or module in words):
                found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    """As if the machine had run out of memory."""
    os.kill(pid, signal.SIGKILL)
