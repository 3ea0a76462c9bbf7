"""How long the dashboard's pages take, cold, until they are rendered in a browser, for a run of 100,000 rollouts.

    python benchmarks/dashboard.py

Generates a store with one run of 100,000 rollouts and 1,000,000 calls, with their spans, rewards, credits, metrics and
events, then opens each page in a browser that has
nothing cached, from a server that has just started. `ratio` is the slowest page's seconds: below 1 is the aim.

Then groups are queued in a copy of the store while the page of the run is open: `live` has the seconds from the reply,
when a group is committed, until the page shows it, and the CPU time of the server for each.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
from playwright.sync_api import Browser, BrowserContext, sync_playwright
from reporting import add_out, report_result

from leyden.records import DEFAULT_POLICY, Call, Reward, RunSettings, Span, VersionRun
from leyden.server.options import RunningServer
from leyden.store import schema
from leyden.store.codec import encode_json
from leyden.store.database import Database
from leyden.store.mapping import call_to_row, reward_to_row, span_to_row

Row = dict[str, Any]
GROUP = 64
TASKS = 16
LIVE_GROUPS = 20
EVALUATED = 20
"""Every so many steps, the rollouts are of held-out tasks."""
METRICS = (
    *("reward/mean", "reward/deviation", "held_out/reward", "held_out/error", "training/entropy", "training/grad_norm"),
    *("training/loss", "training/kl_sampler_k3", "training/kl_proximal_k3", "training/clipped_low", "tokens/sampled"),
    *("training/clipped_high", "training/ess_token", "training/ess_call", "tokens/trained", "tokens/computed"),
    *("time/sampling_s", "time/training_s", "time/publishing_s", "groups/flat", "groups/dropped", "rollouts/succeeded"),
    *("rollouts/agent_error", "training/learning_rate", *(f"training/kl_sampler_k3_turn_{turn}" for turn in range(16))),
)


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=10, help="calls of each rollout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, help="keep the store in this folder, or use the one that is there")
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.home or Path(temporary)
        if not (folder / "leyden.db").exists():
            started = time.perf_counter()
            generate(folder / "leyden.db", options.rollouts, options.calls)
            print(f"generated {options.rollouts} rollouts in {time.perf_counter() - started:.0f} s")
        pages = {
            "runs": "/",
            "run": "/runs/large",
            "rollouts": "/runs/large/rollouts",
            "rollouts, filtered and sorted": "/runs/large/rollouts?ending=agent_error&role=writer&sort=-tokens",
            "rollout": f"/runs/large/rollouts/step-{options.rollouts // GROUP // 2 | 1}-0.0",
            "workers": "/workers",
        }
        times: dict[str, list[float]] = {name: [] for name in pages}
        for _ in range(options.rounds):
            for name, seconds in measure(folder, pages):
                times[name].append(seconds)
        live = measure_live(folder)
    found = {name: round(statistics.median(seconds), 3) for name, seconds in times.items()}
    for name, seconds in found.items():
        print(f"{name:>30}  {seconds:.3f} s")
    took = f"median {live['median_s']} s, most {live['most_s']} s"
    print(f"from a commit to the page: {took}; CPU time of the server {live['cpu_s']} s")
    result = {
        "rollouts": options.rollouts,
        "calls": options.rollouts * options.calls,
        "seconds": found,
        "live": live,
        "ratio": max(found.values()),
    }
    report_result(result, options.out)


@contextmanager
def serve(home: Path) -> Iterator[tuple[RunningServer, int]]:
    """Run a server; yields where it listens, and its process id."""
    command = [sys.executable, "-m", "leyden", "serve", "--json", "--home", str(home), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield msgspec.json.decode(server.stdout.readline(), type=RunningServer), server.pid
        finally:
            server.terminate()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def sign_in(browser: Browser, running: RunningServer) -> BrowserContext:
    """Return a new profile with the key of the server."""
    context = browser.new_context(base_url=running.url)
    context.request.post("/signin", data={"key": running.dashboard.partition("key=")[2]})
    return context


def measure(home: Path, pages: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Open every page with a new server and a new browser profile."""
    with open_browser() as browser:
        for name, path in pages.items():
            with serve(home) as (running, _):
                context = sign_in(browser, running)
                page = context.new_page()
                started = time.perf_counter()
                page.goto(path)
                page.wait_for_selector("body[data-ready=yes]")
                seconds = time.perf_counter() - started
                if page.locator("[role=alert]").count():
                    raise SystemExit(f"{path}: {page.locator('[role=alert]').inner_text()}")
                context.close()
            yield name, seconds


def measure_live(home: Path) -> dict[str, float]:
    """Queue groups while the page of the run is open; return how long each takes to be shown, and what it costs."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as copied, open_browser() as browser:
        shutil.copy(home / "leyden.db", copied)
        with serve(Path(copied)) as (running, pid):
            key = Path(running.admin_key_file).read_text().strip()
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            page = sign_in(browser, running).new_page()
            page.goto("/runs/large")
            page.wait_for_selector("#live.on")
            shown = "dt:text-is('rollouts') + dd"
            count = int(page.locator(shown).inner_text().replace(",", ""))
            before = cpu_seconds(pid)
            for number in range(1, LIVE_GROUPS + 1):
                group = {"id": f"live-{number}", "task": {"id": "live", "input": {}}, "size": 1, "step": 1}
                url, body = f"{running.url}/api/runs/large/groups", msgspec.json.encode(group)
                urlopen(Request(url, body, headers), timeout=60).close()
                started = time.perf_counter()
                page.wait_for_selector(f"{shown}:text-is('{count + number:,}')")
                seconds.append(time.perf_counter() - started)
            cpu = (cpu_seconds(pid) - before) / LIVE_GROUPS
    return {
        "median_s": round(statistics.median(seconds), 3),
        "most_s": round(max(seconds), 3),
        "cpu_s": round(cpu, 3),
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def generate(path: Path, rollouts: int, calls: int) -> None:
    """Write a store with one run, as a training would leave it."""
    chance = random.Random(0)
    database = Database(path)
    steps = range(1, rollouts // GROUP + 1)
    config = {"model": "generated", "training": {"steps": len(steps)}}
    with database.writer.begin() as connection:
        settings = encode_json(RunSettings())
        run = {"id": "large", "state": "open", "settings": settings, "config": encode_json(config), "created": 0.0}
        connection.execute(schema.runs.insert(), run)
        tasks = [{"run_id": "large", "id": f"t{index}", "input": b'{"question": "2 + 3"}'} for index in range(TASKS)]
        connection.execute(schema.tasks.insert(), tasks)
    body = call_to_row("", _call(chance), 220, 3)
    spans = [span_to_row("", span) for span in _spans(calls)]
    for start in range(0, len(steps), 50):  # a single transaction would write everything twice
        with database.writer.begin() as connection:
            for step in steps[start : start + 50]:
                rows = _step(chance, step, calls, body, spans)
                for table, some in rows.items():
                    connection.execute(getattr(schema, table).insert(), some)
    database.close()


def _step(chance: random.Random, step: int, calls: int, body: Row, spans: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of one step by table: a group of training, or each EVALUATED steps groups of held-out tasks."""
    now, evaluation = float(step), step % EVALUATED == 0
    purpose, groups = ("eval", TASKS) if evaluation else ("train", 1)
    rows: dict[str, list[Row]] = defaultdict(list)
    for number in range(groups):
        group, task = (
            f"{'eval' if evaluation else 'step'}-{step}-{number}",
            f"t{(number if evaluation else step) % TASKS}",
        )
        owned = {"run_id": "large", "task_id": task, "purpose": purpose}
        size = GROUP // groups
        totals = {"size": size, "done": size, "priority": 0, "max_attempts": 3, "created": now, "finished": now}
        rows["groups"].append({"id": group, **owned, **totals})
        for place in range(size):
            _add_rollout(rows, chance, owned | {"group_id": group, "place": place, "step": step}, calls, body, spans)
        rows["events"].append(_event(step, rows, "group.finished", group))
    rows["metrics"] = [
        {"run_id": "large", "step": step, "name": name, "value": chance.random(), "at": now} for name in METRICS
    ]
    rows["versions"] = [{"run_id": "large", "policy": DEFAULT_POLICY, "number": step, "at": now}]
    return rows


def _add_rollout(
    rows: dict[str, list[Row]], chance: random.Random, owned: Row, calls: int, body: Row, spans: list[Row]
) -> None:
    step, failed = owned["step"], chance.random() < 0.1
    id, now = f"{owned['group_id']}.{owned['place']}", float(step)
    attempt, worker = f"{id}.1", f"w{owned['place'] % 8}"
    message = f"KeyError: {chance.randrange(1000)} is not in the table".encode() if failed else b""
    reward = 0.0 if failed else chance.random()
    end = {"ending": "agent_error" if failed else "succeeded", "message": message, "calls": calls, "reward": reward}
    end["tokens"] = calls * chance.randrange(50, 200)
    queued = {"state": "finished", "position": 0.0, "attempts": 1, "max_attempts": 3, "created": now, "finished": now}
    rows["rollouts"].append({"id": id, **owned, **queued, **end})
    lease = {"number": 1, "worker": worker, "lease_s": 60.0, "started": now, "expires": now, "ended": now}
    result = {"result": b'"a result"', "output": b"x" * 400}
    rows["attempts"].append({"id": attempt, "run_id": "large", "rollout_id": id, **lease, **result, **end})
    rows["roles"] += [{"run_id": "large", "role": role, "rollout_id": id} for role in (b"writer", b"checker")]
    rows["calls"] += [{**body, "attempt_id": attempt, "id": f"c{number}"} for number in range(calls)]
    rows["spans"] += [{**span, "attempt_id": attempt} for span in spans]
    if not failed:
        rows["rewards"].append(reward_to_row(attempt, Reward("final", reward)))
    if owned["purpose"] == "train":
        credit = {"value": reward, "advantage": reward - 0.5, "weight": 1 / calls, "tokens": 100, "excluded": b""}
        known = {"attempt_id": attempt, "policy": DEFAULT_POLICY, "step": step, **credit}
        rows["credits"] += [{**known, "call_id": f"c{number}"} for number in range(calls)]
    for kind, subject in (("rollout.queued", id), ("attempt.started", attempt), ("attempt.ended", attempt)):
        rows["events"].append(_event(step, rows, kind, subject))
    rows["events"].append(_event(step, rows, "rollout.finished", id))


def _event(step: int, rows: dict[str, list[Row]], kind: str, subject: str) -> Row:
    seq = step * GROUP * 5 + len(rows["events"])
    return {"seq": seq, "run_id": "large", "kind": kind, "subject": subject, "at": float(step), "data": b"{}"}


def _spans(calls: int) -> list[Span]:
    """Return the spans of an attempt: an agent that calls a tool between its model calls."""
    second = 1_000_000_000
    agent = Span("t", "agent", None, "agent", "internal", 0, calls * second)
    tools = [Span("t", f"s{n}", "agent", "search", "internal", n * second, n * second + 1) for n in range(calls)]
    return [agent, *tools]


def _call(chance: random.Random) -> Call:
    completion = tuple(chance.randrange(50_000) for _ in range(100))
    return Call(
        "c",
        prompt_ids=tuple(chance.randrange(50_000) for _ in range(120)),
        completion_ids=completion,
        logprobs=tuple(-chance.random() for _ in completion),
        versions=(VersionRun(len(completion), 1),),
        messages=({"role": "user", "content": "a question of some length " * 4},),
        response={"role": "assistant", "content": "an answer of some length " * 8},
    )


if __name__ == "__main__":
    main()
