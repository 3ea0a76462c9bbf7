"""`leyden report`: writes a run as one HTML file that needs nothing else and can be mailed."""

import argparse
import json
from pathlib import Path

from leyden.cli.arguments import integer, run_name
from leyden.cli.policies import policy_series
from leyden.cli.printing import format_bytes, print_json, stdout_console
from leyden.cli.report.page import render_report
from leyden.cli.report.samples import read_samples
from leyden.cli.source import add_source, local_folder, open_source


def add_report(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden report`."""
    command.add_argument("name", metavar="RUN", type=run_name)
    command.add_argument("--to", type=Path, metavar="FILE", help="the file to write (default: RUN.html)")
    command.add_argument(
        "--samples", type=integer(0, 1000), default=3, metavar="N", help="tasks to show before and after (default: 3)"
    )
    add_source(command)
    command.set_defaults(run=_report)


async def _report(options: argparse.Namespace) -> None:
    path = options.to or Path(f"{options.name}.html")
    async with open_source(options, options.name) as source:
        run, card = await source.get_run(options.name), await source.run_card(options.name)
        series = await policy_series(source, options.name, card)
        samples = await read_samples(source, options.name, options.samples)
    text = render_report(run, card, series, samples, _environment(local_folder(options)))
    path.write_text(text, encoding="utf-8")
    if options.json:
        print_json({"file": path})
    else:
        stdout_console().print(f"{path} ({format_bytes(len(text.encode()))})", soft_wrap=True)


def _environment(folder: Path | None) -> dict[str, str]:
    """Return what the run recorded of the machine and the packages that it ran with; empty if that is not here."""
    path = folder / "environment.json" if folder is not None else None
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
