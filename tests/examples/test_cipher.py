"""The game of examples/cipher: two policies can win it, and one for both players cannot."""

import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from leyden.config import read_config, read_file, trained_policies
from leyden.config.policies import policy_routes

EXAMPLE = Path(__file__).parents[2] / "examples" / "cipher"


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    import agent

    yield agent
    sys.modules.pop("agent", None)


def test_no_rule_for_both_players_wins(game: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_reward(solve: Any, players: Mapping[str, Mapping[str, str]]) -> float:
        monkeypatch.setattr(game, "say", lambda player, digit: players[player][digit])
        rewards = [game.reward(task, solve(task)) for task in ({"digit": digit} for digit in game.NEXT)]
        return sum(sum(one.values()) for one in rewards) / len(rewards)

    before = {after: digit for digit, after in game.NEXT.items()}
    assert mean_reward(game.solve, {"speaker": game.NEXT, "listener": before}) == 1.0
    assert mean_reward(game.solve_swapped, {"speaker": game.NEXT, "listener": before}) == 0.0
    rules = [dict(zip(game.NEXT, said, strict=True)) for said in product(game.NEXT, repeat=3)]
    assert max(mean_reward(game.solve, {"speaker": rule, "listener": rule}) for rule in rules) < 0.7


def test_each_player_has_the_policy_that_it_asks_for() -> None:
    config = read_config(read_file(EXAMPLE / "cipher.toml"))
    assert trained_policies(config) == ["speaker", "listener"]
    assert policy_routes(config) == {"speaker": "speaker", "listener": "listener"}
