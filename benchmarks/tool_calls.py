"""How an untrained model writes its tool calls: in its template's marks, or as JSON in the text, which is no tool call.

    python benchmarks/tool_calls.py examples/calc/calc.toml --model Qwen/Qwen2.5-Coder-1.5B-Instruct --tasks 100

Runs the agent of a configuration on the first held-out tasks and sorts every answer of the model:

    well_formed   a tool call that names an offered tool, with arguments of its schema
    malformed     a tool call in the template's marks that cannot be parsed, names no offered tool or breaks the schema
    fenced        no tool call, but JSON with `name` and `arguments` in a fenced block
    bare          no tool call, but such JSON in plain text
    answer        anything else

The last line is one JSON object; `share` is well_formed over all four ways of writing a tool call. Below a fifth, mend
parser or prompt before you train.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from reporting import add_out, report_result

import leyden
from leyden.config import read_file
from leyden.episodes import Episode
from leyden.rl.signals import SignalKind, find
from leyden.store.database import Database
from leyden.store.read import queries

FENCE = re.compile(r"```\w*\s*\{.*?\}\s*```", re.DOTALL)
CALL = re.compile(r'\{\s*"(?:name|function|tool)"\s*:.*?"(?:arguments|parameters)"\s*:', re.DOTALL)
BROKEN = (SignalKind.MALFORMED_CALL, SignalKind.UNKNOWN_TOOL, SignalKind.BAD_ARGUMENTS)
WAYS = ("well_formed", "malformed", "fenced", "bare")
SHOWN = 3


def sort_answers(episode: Episode) -> list[tuple[str, str]]:
    """Return the kind of every answer of an episode, with its text."""
    broken = {signal.call.id for signal in find(episode) if signal.kind in BROKEN}
    return [
        (kind_of(call.response or {}, call.id in broken), json.dumps(call.response, ensure_ascii=False))
        for call in episode.calls
    ]


def kind_of(response: dict[str, Any], broken: bool) -> str:
    """Return how one answer is written."""
    text = str(response.get("content") or "")
    if broken:
        return "malformed"
    if response.get("tool_calls"):
        return "well_formed"
    if CALL.search(text):
        return "fenced" if any(CALL.search(block) for block in FENCE.findall(text)) else "bare"
    return "answer"


def main() -> None:
    """Run and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--model", help="another model than the configuration's")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--home", type=Path, default=Path("runs"))
    add_out(parser)
    options = parser.parse_args()
    given = read_file(options.config)
    with (Path(given["base"]) / given["held_out"]).open(encoding="utf-8") as file:
        lines = list(islice(file, options.tasks))
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as held_out:
        held_out.writelines(lines)
        held_out.flush()
        model = {"model": options.model} if options.model else {}
        once: dict[str, Any] = {"held_out": held_out.name, "home": str(options.home), "evaluation": {"rollouts": 1}}
        measured = leyden.evaluate(options.config, **once, **model)
    database = Database(str(measured.folder / "leyden.db"), readonly=True)
    with database.reader.begin() as connection:
        groups = [f"eval-{json.loads(line)['id']}" for line in lines]
        episodes = [one for group in groups for one in queries.group_episodes(connection, measured.run, group)]
    database.close()
    answers = [answer for episode in episodes for answer in sort_answers(episode)]
    counts = Counter(kind for kind, _ in answers)
    for way in (*WAYS, "answer"):
        print(f"{way}: {counts[way]}")
        for _, text in islice((answer for answer in answers if answer[0] == way), SHOWN):
            print(f"    {text[:400]}")
    written = sum(counts[way] for way in WAYS)
    called = sum(any(kind == "well_formed" for kind, _ in sort_answers(episode)) for episode in episodes)
    result = {
        "share": round(counts["well_formed"] / written, 3) if written else None,
        "rollouts_with_a_call": round(called / len(episodes), 3),
        "reward": measured.reward,
        "rollouts": len(episodes),
        **{way: counts[way] for way in (*WAYS, "answer")},
    }
    report_result(result, options.out, config=str(options.config), model=measured.model)


if __name__ == "__main__":
    main()
