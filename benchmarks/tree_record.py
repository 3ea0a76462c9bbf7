"""Record the runs that `benchmarks/tree.py` measures: the bundled model behind the agents of `tree_agents.py`.

    python benchmarks/tree_record.py

Writes `tree_runs/NAME.json.gz`: for each rollout its calls, each with its prompt's and its completion's tokens as the
difference to the call that it continues.
"""

import asyncio
import gzip
import json
import tempfile
from pathlib import Path

import msgspec

from leyden.config import read_config
from leyden.local.dev import run_dev

HERE = Path(__file__).parent
QUESTION = "Which depot north of the river opened before the stone bridge was built, and how many pallets does it hold?"
GROUPS = {"ten_turns": 8, "three_roles": 8, "one_turn": 16}


async def record(name: str, group: int) -> None:
    """Record one group of rollouts of one task."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder, "tasks.jsonl")
        tasks.write_text(json.dumps({"question": QUESTION}))  # noqa: ASYNC240 - a line
        agent = f"tree_agents.py:{name}"
        config = read_config(
            {"run": name, "agent": agent, "tasks": str(tasks), "base": str(HERE), "home": folder, "held_out": 0}
        )
        caught, episodes = await run_dev(config, 1, group)
    assert caught.outcomes == {"succeeded": group}, caught.messages
    kept = ("id", "parent", "kept_ids", "prompt_ids", "completion_ids")
    rollouts = [[{field: getattr(call, field) for field in kept} for call in one.calls] for one in episodes]
    path = HERE / "tree_runs" / f"{name}.json.gz"
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(msgspec.json.encode(rollouts))
    print(f"{path.name}: {caught.calls} calls, {path.stat().st_size} bytes")


async def main() -> None:
    """Record all three runs."""
    for name, group in GROUPS.items():
        await record(name, group)


if __name__ == "__main__":
    asyncio.run(main())
