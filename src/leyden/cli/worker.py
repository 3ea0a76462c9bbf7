"""`leyden worker`: runs a configuration's agent for a server that is elsewhere."""

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

from leyden.cli.arguments import url, whole
from leyden.cli.train import add_configuration, configuration
from leyden.client.family import adopt_orphans
from leyden.client.worker import work
from leyden.config import ConfigError
from leyden.local.workers import worker_options


def add_worker(commands: Any) -> argparse.ArgumentParser:
    """Add the command."""
    command = add_configuration(commands, "worker", "run agents for a server elsewhere")
    command.add_argument(
        "--server", metavar="URL", type=url, default=os.environ.get("LEYDEN_URL"), help="the server (or set LEYDEN_URL)"
    )
    command.add_argument("--key-file", type=Path, metavar="FILE", help="a file with a worker's key (or set LEYDEN_KEY)")
    command.add_argument("--hosts", type=whole(1, 1000), help="processes with agents in them (default: workers.hosts)")
    command.set_defaults(run=_run)
    return command


async def _run(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.hosts:
        options.settings.append(f"workers.hosts={options.hosts}")
    config = configuration(options)
    if options.server is None:
        raise ConfigError("which server? Name it with --server URL")
    key = options.key_file.read_text().strip() if options.key_file else os.environ.pop("LEYDEN_KEY", "")
    if not key:
        raise ConfigError("a worker needs a key: name its file with --key-file, or set LEYDEN_KEY")
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    adopt_orphans()
    await work(worker_options(config, options.server, config.run), key, stop)
