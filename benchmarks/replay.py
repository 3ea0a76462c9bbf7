"""How much of their recorded rollouts do agents repeat token for token, if the record answers their calls?

    python benchmarks/replay.py --out results/replay

The agents of examples/, unchanged, with the bundled model: sql (LangGraph), rag (OpenAI Agents SDK), calc (AutoGen) and
calc_plain (the plain `openai` client). Each runs some rollouts, then each of them again by `leyden dev --replay`. The
last line is one JSON object: `exact`, the share of calls up to which a rollout can be continued, over all agents, and
that of each; `ratio` is the smallest. What differed in the others is kept with the result.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reporting import add_out, report_result

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


def main() -> None:
    """All agents, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=4)
    add_out(parser)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as home:
        for name, config in AGENTS.items():
            one = found[name] = replay(EXAMPLES / config, home, options.tasks, options.rollouts)
            print(f"{name:24} {one['exact']:5} of {one['prefixes']:5} calls  {one['differences']}", flush=True)
    shares = {name: round(one["exact"] / one["prefixes"], 4) for name, one in found.items()}
    whole = sum(one["exact"] for one in found.values()) / sum(one["prefixes"] for one in found.values())
    report_result({"ratio": min(shares.values()), "exact": round(whole, 4), **shares}, options.out, agents=found)


if __name__ == "__main__":
    main()
