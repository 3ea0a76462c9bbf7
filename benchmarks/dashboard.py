"""How long the dashboard's pages take, cold, until they are rendered in a browser, for a run of 100,000 rollouts.

    python benchmarks/dashboard.py

Generates a store with one run of 100,000 rollouts and 1,000,000 calls, then opens each page in a browser that has
nothing cached, from a server that has just started. `ratio` is the slowest page's seconds: below 1 is the aim.
"""

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from playwright.sync_api import sync_playwright
from reporting import add_out, report_result

from leyden.records import Call, RunSettings, VersionRun
from leyden.server.options import RunningServer
from leyden.store import schema
from leyden.store.codec import encode_json
from leyden.store.database import Database
from leyden.store.mapping import call_to_row

GROUP = 64
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
            "rollout": f"/runs/large/rollouts/step-{options.rollouts // GROUP // 2}-0.0",
            "workers": "/workers",
        }
        times: dict[str, list[float]] = {name: [] for name in pages}
        for _ in range(options.rounds):
            for name, seconds in measure(folder, pages):
                times[name].append(seconds)
    found = {name: round(statistics.median(seconds), 3) for name, seconds in times.items()}
    for name, seconds in found.items():
        print(f"{name:>30}  {seconds:.3f} s")
    result = {
        "rollouts": options.rollouts,
        "calls": options.rollouts * options.calls,
        "seconds": found,
        "ratio": max(found.values()),
    }
    report_result(result, options.out)


def measure(home: Path, pages: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Open every page with a new server and a new browser profile."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, path in pages.items():
            command = [sys.executable, "-m", "leyden.cli", "serve", "--json", "--home", str(home), "--port", "0"]
            server = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert server.stdout is not None
            running = msgspec.json.decode(server.stdout.readline(), type=RunningServer)
            context = browser.new_context(base_url=running.url)
            context.request.post("/signin", data={"key": running.dashboard.partition("key=")[2]})
            page = context.new_page()
            started = time.perf_counter()
            page.goto(path)
            page.wait_for_selector("body[data-ready=yes]")
            seconds = time.perf_counter() - started
            if page.locator("[role=alert]").count():
                raise SystemExit(f"{path}: {page.locator('[role=alert]').inner_text()}")
            yield name, seconds
            context.close()
            server.terminate()
            server.wait()
        browser.close()


def generate(path: Path, rollouts: int, calls: int) -> None:
    """Write a store with one run, as a training would leave it."""
    chance = random.Random(0)
    database = Database(path)
    config = {"model": "generated", "training": {"steps": rollouts // GROUP}}
    with database.writer.begin() as connection:
        settings = encode_json(RunSettings())
        run = {"id": "large", "state": "open", "settings": settings, "config": encode_json(config), "created": 0.0}
        connection.execute(schema.runs.insert(), run)
        connection.execute(schema.tasks.insert(), [{"run_id": "large", "id": "t", "input": b'{"question": "2 + 3"}'}])
        body = call_to_row("", _call(chance), 220, 3)
    steps = range(1, rollouts // GROUP + 1)
    for start in range(0, len(steps), 50):  # a single transaction would write everything twice
        with database.writer.begin() as connection:
            for step in steps[start : start + 50]:
                _add_step(connection, chance, step, calls, body)
    database.close()


def _add_step(connection, chance, step, calls, body) -> None:  # type: ignore[no-untyped-def]
    group, now = f"step-{step}-0", float(step)
    owned = {"run_id": "large", "task_id": "t", "purpose": "train"}
    connection.execute(
        schema.groups.insert(),
        {"id": group, **owned, "size": GROUP, "done": GROUP, "priority": 0, "max_attempts": 3, "created": now},
    )
    some, attempts, roles, made = [], [], [], []
    for index in range(GROUP):
        id, failed = f"{group}.{index}", chance.random() < 0.1
        ending = "agent_error" if failed else "succeeded"
        message = f"KeyError: {chance.randrange(1000)} is not in the table".encode() if failed else b""
        totals = {"calls": calls, "tokens": calls * chance.randrange(50, 200), "reward": chance.random()}
        end = {"ending": ending, "message": message, **totals}
        some.append(
            {"id": id, **owned, "group_id": group, "place": index, "step": step, "state": "finished", "position": 0.0}
            | {"attempts": 1, "max_attempts": 3, "created": now, "finished": now, **end}
        )
        attempt = f"{id}.1"
        attempts.append(
            {
                "id": attempt,
                "run_id": "large",
                "rollout_id": id,
                "number": 1,
                "worker": f"w{index % 8}",
                "lease_s": 60.0,
            }
            | {"started": now, "expires": now, "ended": now, "result": b'"a result"', "output": b"x" * 400, **end}
        )
        roles += [{"run_id": "large", "role": role, "rollout_id": id} for role in (b"writer", b"checker")]
        made += [{**body, "attempt_id": attempt, "id": f"c{number}"} for number in range(calls)]
    connection.execute(schema.rollouts.insert(), some)
    connection.execute(schema.attempts.insert(), attempts)
    connection.execute(schema.roles.insert(), roles)
    connection.execute(schema.calls.insert(), made)
    metrics = [{"run_id": "large", "step": step, "name": name, "value": chance.random(), "at": now} for name in METRICS]
    connection.execute(schema.metrics.insert(), metrics)


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
