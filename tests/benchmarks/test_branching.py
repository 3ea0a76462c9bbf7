"""`benchmarks/branching.py` compares variants at equal sampled tokens."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from branching import compare, measure


def run(variant: str, seed: int, tokens: list[int], held_out: list[float]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [{"held_out/reward": held_out[0]}]
    for before, after, reward in zip(tokens, tokens[1:], held_out[1:], strict=False):
        sampled = {"tokens/sampled": (after - before) / 2, "branches/groups": 3.0}
        rows += [sampled, {**sampled, "held_out/reward": reward}]
    return {"agent": "ledger", "variant": variant, "seed": seed, **measure(rows)}


def test_a_variant_with_the_same_reward_after_half_of_the_tokens_has_a_ratio_of_two() -> None:
    runs = [run("grpo", seed, [0, 50, 100], [0.0, 0.1, 0.2 + seed / 10]) for seed in (-1, 1)]
    runs += [run("prefixes", 0, [0, 100], [0.0, 0.4]), run("sampled", 0, [0, 100], [0.0, 0.1])]
    found = compare("ledger", runs)
    assert found["target"] == pytest.approx(0.2)
    ratios = {name: entry["ratio"] for name, entry in found["variants"].items()}
    assert ratios == {"grpo": 1.0, "prefixes": 2.0, "sampled": None}
    halfway = {name: entry["ratio_halfway"] for name, entry in found["variants"].items()}
    assert (found["halfway"], halfway) == (pytest.approx(0.1), {"grpo": 1.0, "prefixes": 2.0, "sampled": 0.5})
    assert found["variants"]["prefixes"]["branches"] == {"branches/groups": 3.0}
    assert compare("sql", runs) == {}
