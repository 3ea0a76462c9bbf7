"""Prints and keeps the results of benchmarks, the same way for all of them.

The last line of a benchmark is one JSON object. With `--out FOLDER` the object is also kept as `FOLDER/benchmark.json`;
its key `measured` has the command, the date and the machine.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOAD = os.getloadavg()[0]
"""Of the minute before the benchmark."""


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option `--out`."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the result in FOLDER/benchmark.json")


def report_result(result: dict[str, Any], out: Path | None, name: str = "benchmark", **about: Any) -> None:
    """Print a result as the last line; keep it as `name`.json where a folder is given."""
    if out is not None:
        given = {"command": command(), "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**result, "measured": {**given, **about}}, indent=1)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(json.dumps(result))


def command() -> str:
    """Return the command line as one would type it in the repository, without `--out`."""
    words = list(sys.argv[1:])
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    for option in ("--against", "--checkout"):
        if option in words:
            words[words.index(option) + 1] = "CHECKOUT"
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def machine() -> str:
    """Describe this machine, and how busy it was before the benchmark."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader", "--id=0"]
    gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which("nvidia-smi") else ""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    parts = [gpu, f"{os.cpu_count()} cores", model, platform.machine(), f"Python {platform.python_version()}"]
    return ", ".join([*(part for part in parts if part), f"load {LOAD:.1f} before"])
