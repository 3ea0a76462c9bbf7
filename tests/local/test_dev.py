"""What `leyden dev` counts in the episodes of its rollouts."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from smallepisodes import call, episode

from leyden.config import read_config
from leyden.local.dev import summarise
from leyden.records import Call, Span

CONFIG = read_config(
    {"run": "dev", "agent": "agent.py:solve", "tasks": "tasks.jsonl", "reward": "agent.py:score", "model": "spark"}
)


def uses(id: str, tool: str, **fields: Any) -> Call:
    tool_call = {"id": id, "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return call(id, response={"role": "assistant", "content": "", "tool_calls": [tool_call]}, **fields)


def result(id: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def test_a_failed_tool_is_what_the_signals_call_one() -> None:
    calls = [
        uses("a", "search"),
        uses("b", "search", messages=(result("a", "Error: no such table"),)),
        uses("c", "count", messages=(result("b", "errors in the log: 3"),)),
        call("d", messages=(result("c", "2"),), response={"role": "assistant", "content": "2"}),
    ]
    attributes = {"openinference.span.kind": "TOOL", "tool.name": "count", "tool_call.id": "c"}
    ran = Span("0" * 32, "c" * 16, None, "count", "internal", 0, 1, "error", "out of memory", attributes)
    report = summarise(CONFIG, [replace(episode(0, 1.0, calls), spans=(ran,))], Path("runs/dev"))
    assert report.tools == {"search": 2, "count": 1}
    assert report.tools_failed == {"search": 1, "count": 1}
