"""The demo says how the model was sampled, and gives the greedy reward beside the sampled one."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

CALC = Path(__file__).parents[2] / "examples" / "calc_plain"


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calc_demo", CALC / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


def test_the_paths_of_the_printed_commands_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_demo()
    for folder in (CALC.parents[1], CALC, tmp_path):
        monkeypatch.chdir(folder)
        words = [word for command, _ in demo.next_commands(tmp_path) for word in command.split()]
        paths = [Path(word) for word in words if word.endswith((".toml", ".jsonl")) or "/" in word]
        assert {path.name for path in paths} >= {"calc.toml", "unseen.jsonl"}
        assert all(path.exists() for path in paths), paths


@pytest.mark.slow
def test_the_demo_gives_the_greedy_reward_beside_the_sampled_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = load_demo()
    held_out = (CALC / "held_out.jsonl").read_text().splitlines()[:4]
    (tmp_path / "held_out.jsonl").write_text("\n".join(held_out))
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2}
    kept = tmp_path / "kept"
    demo.main(kept, home=str(tmp_path / "runs"), held_out=str(tmp_path / "held_out.jsonl"), training=small)
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert {"ratio", "before", "after", "greedy_before", "greedy_after"} <= result.keys()
    assert {path.name for path in kept.iterdir()} == {"benchmark.json", "config.toml", "curve.png", "metrics.jsonl"}
    assert json.loads((kept / "metrics.jsonl").read_text().splitlines()[0])["held_out/reward"] == result["before"]
    assert 'base = "examples/calc_plain"' in (kept / "config.toml").read_text()
    rows = [line.split() for line in printed.splitlines()]
    sampled, greedy = (
        f"{result[f'{kind}before']:.2f} {result[f'{kind}after']:.2f}".split() for kind in ("", "greedy_")
    )
    assert ["sampled", "at", "temperature", "1,", "as", "in", "training", *sampled] in rows
    assert ["greedy,", "at", "temperature", "0", *greedy] in rows
