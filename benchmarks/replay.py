"""How much of their recorded rollouts do agents repeat token for token, if the record answers their calls?

    python benchmarks/replay.py --out results/replay
    python benchmarks/replay.py --coding --out results/replay      # kept as coding.json

The agents of examples/, unchanged, with the bundled model: sql (LangGraph), rag (OpenAI Agents SDK), calc (AutoGen) and
calc_plain (the plain `openai` client). Each runs some rollouts, then each of them again by `leyden dev --replay`. With
`--coding` the coding agents that `make harnesses` has installed have the conversation of `harness_coding.py` with a
scripted model, and again in a new folder of the same name, because a prompt shows its path. The last line is one JSON
object: `exact`, the share of calls up to which a rollout can be continued, over all agents, and that of each; `ratio`
is the smallest. What differed in the others is kept with the result.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness_coding import claude_code, codex, mini_swe_agent, opencode
from harness_list import HOME, Harness
from harnesses import finish, start, write_files
from modelserving import model_server
from msgspec.structs import asdict
from reporting import add_out, report_result

from leyden.local.replaying import ReplayReport, compare
from leyden.records import Origin

EXAMPLES = Path(__file__).parents[1] / "examples"
AGENTS = {
    "sql (LangGraph)": "sql/spark.toml",
    "rag (OpenAI Agents SDK)": "rag/spark.toml",
    "calc (AutoGen)": "calc/spark.toml",
    "calc_plain (openai)": "calc_plain/calc.toml",
}


def replay(config: Path, home: str, tasks: int, rollouts: int) -> dict[str, Any]:
    """Run some rollouts of an agent, and each of them again; return what `leyden dev` reports of that."""
    if (config.parent / "make_tasks.py").exists():
        subprocess.run([sys.executable, config.parent / "make_tasks.py"], check=True, stdout=subprocess.DEVNULL)
    counts = ["--tasks", str(tasks), "--rollouts", str(rollouts)]
    words = [
        sys.executable,
        "-m",
        "leyden",
        "dev",
        config,
        f"home={home}",
        "model=spark",
        *counts,
        "--replay",
        "--json",
    ]
    printed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, Any] = json.loads(printed)["replay"]
    return found


async def replay_harness(harness: Harness, rollouts: int) -> ReplayReport:
    """Let a coding agent have its conversation, and again, answered from the record; compare."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        async with model_server(Path(folder)) as server:
            server.engine.context_length = 1 << 20
            server.say = harness.say

            async def converse() -> None:
                write_files(harness, home := Path(folder) / "home", server.url, server.key)
                for command in (harness.command, *harness.further):
                    process = await start(command, harness, home, server.url, server.key)
                    code, output = await finish(process, timeout_s=300, aborting=None)
                    if code != 0:
                        raise SystemExit(f"{harness.name} failed, exit {code}: {output[-1000:]}")
                shutil.rmtree(home)

            await server.new_attempt()
            await converse()
            recorded = await server.episode()
            for number in range(rollouts):
                await server.branch(f"again-{number}", Origin(recorded.attempt.id, len(recorded.calls)))
                await converse()
                pairs.append((recorded, await server.episode()))
    return compare(pairs)


def coding_agents() -> dict[str, Harness]:
    """Return the coding agents that are installed."""
    agents = [make() for make in (claude_code, codex, opencode, mini_swe_agent)] if HOME.exists() else []
    return {f"{one.name} {one.version}": one for one in agents if Path(one.command[0]).exists()}


def main() -> None:
    """All agents, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--coding", action="store_true", help="the coding agents instead, kept as coding.json")
    add_out(parser)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, one: dict[str, Any]) -> None:
        found[name] = one
        print(f"{name:24} {one['exact']:5} of {one['prefixes']:5} calls  {one['differences']}", flush=True)

    if options.coding:
        for name, harness in coding_agents().items():
            add(name, asdict(asyncio.run(replay_harness(harness, options.rollouts))))
    else:
        with tempfile.TemporaryDirectory() as home:
            for name, config in AGENTS.items():
                add(name, replay(EXAMPLES / config, home, options.tasks, options.rollouts))
    shares = {name: round(one["exact"] / one["prefixes"], 4) for name, one in found.items()}
    whole = sum(one["exact"] for one in found.values()) / sum(one["prefixes"] for one in found.values())
    result = {"ratio": min(shares.values()), "exact": round(whole, 4), **shares}
    report_result(result, options.out, "coding" if options.coding else "benchmark", agents=found)


if __name__ == "__main__":
    main()
