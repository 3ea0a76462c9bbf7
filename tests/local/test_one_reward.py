"""A real small run in which some rollouts fail: its reward is one number wherever it is shown, and its pages work."""

import json
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
import requests
from browsing import AVAILABLE, MISSING, READY, open_browser
from forked_commands import run_command
from serving import ServerProcess
from trainings import AGENT, Training

FAILS = """
    if int(task["question"].split()[2]) % 2:
        raise ValueError("an odd task")
"""
SETTINGS = ("training.steps=1", "evaluation.every=1", "evaluation.rollouts=2", "held_out=4", "test=2")
SETTINGS = (*SETTINGS, "rollout.failure_reward=-0.5", "training.min_group=1")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Four of eight tasks fail; four are held out, two are test tasks."""
    found = Training(tmp_path_factory.mktemp("failing"), *SETTINGS)
    (found.folder / "agent.py").write_text(AGENT.replace('    while Path("slow")', FAILS + '    while Path("slow")'))
    found.finish()
    return found


@pytest.fixture(scope="module")
def server(training: Training) -> Iterator[ServerProcess]:
    with ServerProcess(training.folder / "runs") as running:
        yield running


def held_out(training: Training) -> dict[int, dict[str, float]]:
    """The metrics of each evaluation."""
    return {row["step"]: row for row in training.metrics() if "held_out/reward" in row}


def test_a_failure_counts_alike_in_commands_metrics_and_pages(training: Training, server: ServerProcess) -> None:
    def leyden(*words: str) -> Any:
        done = run_command(*words, cwd=training.folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if "--json" in words else done.stdout

    measured = leyden("eval", "small.toml", *SETTINGS, "--json")
    last = held_out(training)[1]
    assert last["held_out/agent_error"] and last["held_out/succeeded"]

    cards = {run["id"]: run["card"] for run in leyden("runs", "--json")}
    listed = leyden("runs")
    for run, reward, error, counted in (
        ("small", last["held_out/reward"], last["held_out/error"], last["held_out/counted"]),
        (measured["run"], measured["reward"], measured["error"], measured["counted"]),
    ):
        card, shown = cards[run], f"{reward:.3f} ± {error:.3f}"
        assert card["held_out"] and card["state"] == "finished"
        assert card["counted"] == counted == 8  # four tasks, twice; not the test tasks
        assert (card["reward"], card["error"]) == pytest.approx((reward, error))
        assert shown in listed and f"reward {shown} (8 held-out rollouts)" in leyden("show", run)

    session = requests.Session()
    session.post(server.url + "/signin", json={"key": server.admin_key}, timeout=30).raise_for_status()

    def page(path: str) -> Any:
        reply = session.get(server.url + path, timeout=30)
        reply.raise_for_status()
        return reply.json()

    overview = {card["id"]: card for card in page("/api/overview")}
    assert {run: overview[run]["reward"] for run in cards} == {run: cards[run]["reward"] for run in cards}
    curves = page("/api/runs/small/rewards")
    assert [(one["mean"], one["error"]) for one in curves["held_out"]] == [
        pytest.approx((row["held_out/reward"], row["held_out/error"])) for row in held_out(training).values()
    ]
    (trained,) = curves["train"]
    step = next(row for row in training.metrics() if "reward/mean" in row)
    assert (trained["mean"], trained["deviation"]) == pytest.approx((step["reward/mean"], step["reward/deviation"]))
    found = page("/api/runs/small/search?purpose=eval&step_from=1&step_to=1")["rollouts"]
    assert fmean(one["reward"] for one in found) == pytest.approx(last["held_out/reward"])
    assert {one["reward"] for one in found if one["outcome"]["ending"] == "agent_error"} == {-0.5}


def test_the_pages_lead_from_the_list_over_a_curves_point_to_the_rollout(
    training: Training, server: ServerProcess
) -> None:
    if not AVAILABLE:
        pytest.skip(MISSING)
    last = held_out(training)[1]
    with open_browser() as browser:
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.running.dashboard)
        page.wait_for_selector(READY)
        row = page.locator("tr[data-run=small]")
        assert f"{last['held_out/reward']:.3f} ± {last['held_out/error']:.3f}" in row.inner_text()
        row.get_by_role("link", name="small").click()
        page.wait_for_selector("[data-chart='held-out reward'] circle[data-step='1']")
        page.locator("[data-chart='held-out reward'] circle[data-step='1']").click(force=True)
        page.wait_for_selector("tr[data-rollout^='eval-1-']")
        assert page.locator("tr[data-rollout]").count() == 8
        failed = page.locator("tr[data-rollout]", has_text="agent error")
        assert failed.count() == last["held_out/agent_error"]
        assert "ValueError: an odd task" in failed.first.inner_text() and "-0.5" in failed.first.inner_text()
        page.locator("tr[data-rollout]", has_text="succeeded").locator("a.row").first.click()
        page.wait_for_selector(".tokens .token")
        assert "plus" in page.locator("article.call .message.user").inner_text()
        assert "agent · attempt 1" in page.locator(".waterfall").inner_text()
        assert not problems
