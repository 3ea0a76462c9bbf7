"""Commands that show runs name the policies of a run that trains several, and say nothing new of one."""

import asyncio
import json
from pathlib import Path

import pytest

from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.cli import main
from leyden.outcomes import Ending, Outcome
from leyden.records import Metric, Purpose, Reward, Task, Version
from leyden.store.store import Store

PAIR = {"writer": {}, "checker": {}, "judge": {"trained": False}}


async def fill(folder: Path) -> None:
    """Two runs, of which the first trains two policies; both have an evaluation of one task."""
    store = await Store(folder / "leyden.db").start()
    for run, config in {"pair": {"policies": PAIR}, "single": {}}.items():
        await store.create_run(RunSpec(run, config=config))
        await store.enqueue(run, GroupSpec(f"{run}-eval", Task("t", {}), 1, Purpose.EVAL, step=2))
        (leased,) = await store.lease(LeaseRequest("w", run=run))
        await store.finish(
            run, leased.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", 1.0),))
        )
    await store.publish_version("pair", Version("checker", 2))
    for policy, run in {"policy": "single", "writer": "pair", "checker": "pair"}.items():
        own = {"reward/own": 0.25} if policy == "checker" else {}
        metrics = {"reward/mean": 0.5, "calls/trained": 7, "tokens/trained": 900, "groups/flat": len(policy), **own}
        found = [Metric(step, name, value, float(step), policy) for step in (1, 2) for name, value in metrics.items()]
        await store.record_metrics(run, found)
    await store.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LEYDEN_URL", "LEYDEN_KEY", "LEYDEN_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    asyncio.run(fill(tmp_path))
    return tmp_path


def test_a_run_of_several_policies_is_shown_by_policy(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert main([*arguments, "--home", str(home)]) == 0
        return capsys.readouterr().out

    shown = said("show", "pair")
    rows = [line.split() for line in shown.splitlines()]
    assert ["writer", "0", "0.500", "-", "-", "14", "1,800"] in rows
    assert ["checker", "2", "0.250", "-", "-", "14", "1,800"] in rows
    assert "judge" not in shown and "checker" not in said("show", "single")
    policies = json.loads(said("show", "pair", "--json"))["policies"]
    assert policies["checker"]["version"] == 2 and "policies" not in json.loads(said("show", "single", "--json"))

    top = said("top", "pair", "--once")
    assert "last step of pair, writer: training reward 0.5, 6 groups flat" in top
    assert "last step of pair, checker: training reward 0.5, its own 0.25, 7 groups flat" in top
    assert "last step of single: training reward 0.5, 6 groups flat" in said("top", "single", "--once")

    compared = [line.split() for line in said("compare", "single", "pair").splitlines()]
    assert ["pair:", "checker", "2", "0.250", "-", "-", "14", "1,800"] in compared

    for run, titles in (("pair", ["<h3>writer</h3>", "<h3>checker</h3>"]), ("single", [""])):
        said("report", run, "--to", str(home / "page.html"))
        page = (home / "page.html").read_text()
        assert page.count("<figcaption>reward</figcaption>") == page.count(">calls/trained<") == len(titles)
        assert all(page.count(title) == 2 for title in titles if title) and ("<h3>" in page) == (run == "pair")
