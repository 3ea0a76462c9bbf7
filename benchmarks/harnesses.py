"""Runs agent harnesses, unmodified, against the real gateway with a scripted engine, and counts what was kept.

`make harnesses` installs them and runs all; `--installed` runs those of the main environment. A cell is one harness
with one dialect, streamed or not. It is ok when the harness ends as it should. A proxy records the traffic: `made`
counts the model calls that it saw answered, `captured` those of them that are in the record with tokens and logprobs (a
call that the run routes to an upstream or a fixed answer has none),
`extendable` those that repeat an earlier request and its answer (`harness_traffic.py`), and `exact` those of these
whose prompt begins with that call's prompt and completion, token for token. The last line is one JSON object; `ratio`
is the smallest of the shares of cells that are ok, calls that are captured and turns that are exact. `--document FILE`
also writes the table there.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_coding import coding_agents
from harness_list import HOME, INSTALLED, Harness, apart, node
from harness_traffic import Exchange, Traffic, extendable, watched
from modelserving import END, ModelServer, eventually, model_server
from reporting import add_out, report_result

from leyden.engine.protocol import EngineRequest
from leyden.records import CallStatus, FixedAnswer
from leyden.server.gateway.upstream.client import UpstreamClient

COUNTS = ("made", "captured", "extendable", "exact")
SHARES = (("cells", "ok"), ("made", "captured"), ("extendable", "exact"))
MARKS = ("<!-- begin of the table of make harnesses -->\n", "<!-- end of the table of make harnesses -->\n")


@dataclass
class Cell:
    """The result of one harness with one dialect."""

    harness: str
    version: str
    dialect: str
    stream: bool
    ok: bool = False
    made: int = 0
    captured: int = 0
    extendable: int = 0
    exact: int = 0
    why: str = ""

    @property
    def perfect(self) -> bool:
        """Whether the harness ran, every call was captured, and every turn that could keep its tokens kept them."""
        return self.ok and self.captured == self.made and self.exact == self.extendable

    def row(self) -> str:
        """Return a line of the printed table."""
        mode = "streamed" if self.stream else "whole"
        counts = f"{self.made:5} {self.captured:9} {self.extendable:11} {self.exact:6}"
        return f"{self.harness:31} {self.dialect:10} {mode:9} {'ok' if self.ok else 'FAILED':7} {counts}  {self.why}"


async def run_cell(harness: Harness, dialect: str, stream: bool, timeout_s: float, log: Path | None) -> Cell:
    """Have one conversation in a new attempt of a new server."""
    cell = Cell(harness.name, harness.version, dialect, stream)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        (Path(folder) / "far").mkdir()
        async with (
            model_server(Path(folder)) as server,
            model_server(Path(folder) / "far") as far,
            watched(server.url) as traffic,
        ):
            await _route(harness, server, far)
            server.engine.context_length = 1 << 20  # coding agents begin with 80 KB of text
            server.say = harness.say
            write_files(harness, home, traffic.url, server.key)
            arguments = [dialect, *(["--stream"] if stream else [])] if harness.is_script else []
            aborting = _insert_fault(harness, server, traffic)
            code: int | None = 0
            output = ""
            for command in ([*harness.command, *arguments], *harness.further):
                process = await start(command, harness, home, traffic.url, server.key)
                code, more = await finish(process, timeout_s, aborting)
                output += more
                if code != 0 and aborting is None:
                    break
                aborting, server.engine.delay_s = None, 0.0
            await _count(cell, harness, server, _made(harness, traffic))
            broken = await _broken(harness, server) or _too_small(harness, traffic)
            cell.ok = code == 0 and harness.expected in output and not broken
            if not cell.ok:
                cell.why = f"exit {code}: {broken or output.strip()[-300:]!r}"
            if log is not None:
                _write_log(log / f"{harness.name}-{dialect}-{stream}.json", traffic, output)
    return cell


async def start(command: Sequence[str], harness: Harness, home: Path, url: str, key: str) -> asyncio.subprocess.Process:
    """Start a command of a harness with its own home, in its own process group."""
    environment = {
        "PATH": f"{Path(node()).parent}:{os.environ['PATH']}" if HOME.exists() else os.environ["PATH"],
        "HOME": str(home),
        "CODEX_HOME": str(home / ".codex"),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONIOENCODING": "utf-8",
        **harness.environment,
    }
    pipe, devnull = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env=environment,
        stdin=devnull,
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def finish(
    process: asyncio.subprocess.Process, timeout_s: float, aborting: Callable[[], bool] | None
) -> tuple[int | None, str]:
    """Wait for a command; kill it after a time, or when `aborting` is true. Return its exit code and its output."""
    reading = asyncio.create_task(process.communicate())
    ends: list[asyncio.Task[Any]] = [reading]
    if aborting is not None:
        ends.append(asyncio.create_task(eventually(aborting)))
    done, _ = await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if reading not in done:
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = await reading
    for task in ends:
        task.cancel()
    text = output.decode(errors="replace")
    return (process.returncode, text) if done else (None, f"{text}\n(killed after {timeout_s} s)")


def _insert_fault(harness: Harness, server: ModelServer, traffic: Traffic) -> Callable[[], bool] | None:
    """Have the fault of the harness occur. Return, for an abort, whether the answer has come to its middle."""
    script, engine = server.engine.script, server.engine

    def faulty(request: EngineRequest) -> Sequence[int]:
        if len(engine.requests) != harness.faulty_call:
            engine.delay_s = 0.0
            return script(request)
        if harness.fault == "failure":
            return [*script(request)[:8], -1]
        if harness.fault in ("timeout", "stall"):
            engine.delay_s = 3600.0
            return script(request)
        engine.delay_s = 0.05
        return server.tokenizer.encode("I am thinking about it. " * 1000 + END)

    def halfway() -> bool:
        at = harness.faulty_call - 1
        return len(traffic.exchanges) > at and traffic.exchanges[at].body.count(b"data:") > 10

    if harness.fault is not None:
        engine.script = faulty
    if harness.fault == "stall":
        traffic.stalled = harness.faulty_call
    return halfway if harness.fault == "abort" else None


async def _broken(harness: Harness, server: ModelServer) -> str:
    """Return what is wrong with the record of the call that the fault was in; empty where all is well."""
    calls = (await server.episode()).calls
    for made in calls if harness.routes else ():
        route = harness.routes.get(made.request["model"])
        if made.policy != ("fixed" if isinstance(route, FixedAnswer) else route):
            return f"a call to {made.request['model']!r} is recorded under {made.policy!r}"
    if unused := harness.routes.keys() - {made.request["model"] for made in calls}:
        return f"no calls to {sorted(unused)}"
    if harness.fault is None:
        return ""
    wanted = CallStatus.FAILED if harness.fault == "failure" else CallStatus.ABANDONED
    broken = [made for made in calls if made.status is not CallStatus.OK]
    if [made.status for made in broken] != [wanted]:
        return f"calls that did not end well: {[made.status for made in broken]}"
    retries = [made.retry_of for made in calls if made.retry_of is not None]
    if harness.fault != "abort" and retries != [broken[0].id]:
        return f"retries recorded: {retries}"
    return ""


def _too_small(harness: Harness, traffic: Traffic) -> str:
    """Return what is wrong with the size of the requests; empty where all is well."""
    largest = max((len(json.dumps(exchange.request)) for exchange in traffic.exchanges), default=0)
    return f"the largest request has {largest} bytes" if largest < harness.min_request_bytes else ""


async def _route(harness: Harness, server: ModelServer, far: ModelServer) -> None:
    """Start an attempt with the routes of the harness; `far` is the upstream."""
    gateway = server.service.gateway
    assert gateway is not None
    await far.new_attempt()
    far.say = lambda prompt: "A title from elsewhere" + END
    far.engine.context_length = 1 << 20
    gateway.upstream = UpstreamClient(f"{far.url}/v1", far.key)
    if harness.qwen3:
        server.serve("Qwen/Qwen3-0.6B", "qwen3")
    await server.new_attempt(routes=harness.routes, history="exact" if harness.qwen3 else "template")


def write_files(harness: Harness, home: Path, url: str, key: str) -> None:
    """Make the folder of a harness."""
    home.mkdir()
    (home / "note.txt").write_text("leyden jar\n")
    for name, text in harness.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text.replace("@URL@", url).replace("@KEY@", key))


def _made(harness: Harness, traffic: Traffic) -> list[Exchange]:
    """Return the calls that the harness made, without the one that the fault was in."""
    if harness.fault != "failure":
        return traffic.made
    faulty = next((exchange for exchange in traffic.made if exchange.failed), None)
    return [exchange for exchange in traffic.made if exchange is not faulty]


async def _count(cell: Cell, harness: Harness, server: ModelServer, exchanges: list[Exchange]) -> None:
    """Compare what the harness sent and received with the record."""
    episode = await server.episode()
    recorded = {made.id: made for made in episode.calls}
    cell.made = len(exchanges)
    for exchange in exchanges:
        made = recorded.get(exchange.call or "")
        answered_elsewhere = harness.routes.get(exchange.request.get("model", "")) not in (None, "spark")
        sampled = made is not None and bool(made.completion_ids) and made.logprobs is not None
        cell.captured += made is not None if answered_elsewhere else sampled
    for child, parents in extendable(exchanges).items():
        cell.extendable += 1
        prompt = episode.prompt_ids(recorded[child]) if child in recorded else ()
        starts = [episode.prompt_ids(recorded[id]) + recorded[id].completion_ids for id in parents if id in recorded]
        if cell.dialect == "completions":  # the token that ended a completion is not part of its text
            starts = [start[:-1] for start in starts]
        cell.exact += any(prompt[: len(start)] == start for start in starts)


def _write_log(path: Path, traffic: Traffic, output: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    exchanges = [[e.path, e.status, e.call, e.request, e.body.decode(errors="replace")] for e in traffic.exchanges]
    path.write_text(json.dumps({"others": traffic.others, "output": output, "calls": exchanges}, indent=1))


async def run_all(harnesses: list[Harness], timeout_s: float, log: Path | None) -> list[Cell]:
    """Run every cell, one after the other."""
    cells = []
    counts = f"{'made':>5} {'captured':>9} {'extendable':>11} {'exact':>6}"
    print(f"{'harness':31} {'dialect':10} {'mode':9} {'result':7} {counts}")
    for harness in harnesses:
        for dialect in harness.dialects:
            for stream in harness.modes:
                cells.append(await run_cell(harness, dialect, stream, timeout_s, log))
                print(cells[-1].row(), flush=True)
    return cells


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Sum up the cells, over all and by harness and dialect."""
    by_harness: dict[str, Any] = {}
    for cell in cells:
        dialects = by_harness.setdefault(cell.harness, {"version": cell.version, "dialects": {}})["dialects"]
        dialects[cell.dialect] = _sums([c for c in cells if (c.harness, c.dialect) == (cell.harness, cell.dialect)])
    sums = _sums(cells)
    shares = (sums[part] / sums[whole] for whole, part in SHARES if sums[whole])
    return {"ratio": round(min(shares, default=0.0), 4), **sums, "harnesses": by_harness}


def _sums(cells: list[Cell]) -> dict[str, Any]:
    counts = {name: sum(getattr(cell, name) for cell in cells) for name in COUNTS}
    return {"cells": len(cells), "ok": sum(cell.ok for cell in cells), **counts}


def table(result: dict[str, Any]) -> str:
    """Return the table of the documentation for a summary."""
    lines = [
        "| harness | version | dialect | cells, ok | calls, captured | extendable turns, exact |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, harness in result["harnesses"].items():
        for dialect, sums in harness["dialects"].items():
            lines.append(_line(name, harness["version"], dialect, sums))
    lines.append(_line("all", "", "", result))
    return "\n".join(lines) + "\n"


def _line(name: str, version: str, dialect: str, sums: dict[str, Any]) -> str:
    return " | ".join([f"| {name}", version, dialect, *(f"{sums[a]}, {sums[b]}" for a, b in SHARES)]) + " |"


def write_table(path: Path, result: dict[str, Any]) -> None:
    """Replace the table in a page."""
    pattern = re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1])
    page = re.sub(pattern, lambda _: MARKS[0] + table(result) + MARKS[1], path.read_text(), flags=re.DOTALL)
    path.write_text(page)


def main() -> None:
    """Run the harnesses and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", action="store_true", help="only those of the main environment")
    parser.add_argument("--only", action="append", help="only this harness; may be repeated")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one command of a cell")
    parser.add_argument("--log", type=Path, help="a folder for the traffic of each cell")
    parser.add_argument("--document", type=Path, help="a page whose table is replaced")
    add_out(parser)
    args = parser.parse_args()
    harnesses = INSTALLED if args.installed else [*INSTALLED, *apart(), *coding_agents()]
    chosen = [harness for harness in harnesses if not args.only or harness.name in args.only]
    cells = asyncio.run(run_all(chosen, args.timeout_s, args.log))
    result = summary(cells)
    if args.document is not None:
        write_table(args.document, result)
    report_result(result, args.out)
    sys.exit(0 if all(cell.perfect for cell in cells) else 1)


if __name__ == "__main__":
    main()
