"""The examples in docs/signals.md work."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from toolconversations import USER, Conversation, assistant, result, tool_call

from leyden.config.schema import SignalsConfig
from leyden.rl.signals import SignalKind, SignalRules, automatic

TEXT = (Path(__file__).parents[3] / "docs" / "signals.md").read_text()
LATE = (
    Conversation()
    .turn([USER], assistant("", tool_call("1")))
    .turn([result("1", "Error: timed out")], assistant("It is"), finish="length")
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_configuration_shown_is_valid() -> None:
    (block,) = blocks("toml")
    config = msgspec.convert(tomllib.loads(block)["signals"], SignalsConfig)
    assert (config.tool_failed, config.rule, config.exempt) == (-0.1, "my_rules.py:worth", ("check_status",))


def test_every_signal_has_a_row() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) == list(SignalKind)


def test_the_python_shown_runs() -> None:
    rule, use = blocks("python")
    scope: dict[str, Any] = {"episode": LATE.episode}
    exec(rule + use, scope)
    assert [(reward.name, reward.weight) for reward in scope["rewards"]] == [("tool_failed/1", -0.1)]
    weights = dict.fromkeys(SignalKind, -0.5)
    assert [r.weight for r in automatic(LATE.episode, SignalRules(weights, scope["worth"]), 1)] == [0.0, -0.5]
