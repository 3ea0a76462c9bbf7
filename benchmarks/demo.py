"""`leyden demo`, and its result kept.

    make demo

The last line is one JSON object: held-out reward before and after, sampled and greedy, optimiser steps, seconds of
training; `ratio` is sampled reward after over before. With `--out FOLDER` it is kept there, with the metrics, the
configuration and the curve of the run.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from reporting import add_out, report_result

ROOT = Path(__file__).parents[1]


def main(out: Path | None, *settings: str) -> None:
    """Run the demo. The settings override those of its configuration."""
    command = [sys.executable, "-m", "leyden", "demo", "--json", *settings]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    run = Path(result.pop("folder"))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "curve.png"):
            shutil.copy(run / name, out / name)
        config = (run / "config.toml").read_text(encoding="utf-8")
        (out / "config.toml").write_text(config.replace(f"{ROOT}/", ""), encoding="utf-8")
    ratio = round(result["after"] / result["before"], 3) if result["before"] else None
    report_result({"ratio": ratio, **result}, out, command="make demo")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    options, settings = parser.parse_known_args()
    main(options.out, *settings)
