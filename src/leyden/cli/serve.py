"""`leyden serve`: runs a server."""

import argparse
import logging
import os
import sys
from pathlib import Path

import msgspec

from leyden import __version__, defaults
from leyden.cli.arguments import add_store, integer, url
from leyden.cli.train import needs_torch
from leyden.config import ConfigError
from leyden.config.schema import UPSTREAM_KEY_VARIABLE, ServerConfig, UpstreamConfig
from leyden.local.preflight import print_loading
from leyden.server.http.address import bind_port, is_loopback
from leyden.server.options import RunningServer, ServeOptions


def add_serve(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden serve`."""
    command.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    command.add_argument(
        "--port",
        type=integer(0, 65535),
        default=defaults.PORT,
        help="the port; 0 takes a free one (default: %(default)s)",
    )
    add_store(command, "postgresql://... (or set LEYDEN_STORE; default: leyden.db in the home folder)")
    command.add_argument(
        "--advertise", metavar="URL", type=url, help="the URL at which workers and agents elsewhere reach the server"
    )
    command.add_argument("--model", metavar="RUN|DIR", help="serve this model: a run, its folder, or a model's folder")
    command.add_argument("--step", help="with --model RUN: best, last, or a number (default: best)")
    command.add_argument(
        "--vllm-python", metavar="FILE", help="with --model: the Python interpreter that has vLLM (default: this one)"
    )
    command.add_argument("--keyless", action="store_true", help="accept requests without a key; on loopback only")
    command.add_argument(
        "--concurrent-calls",
        type=integer(1, 4096),
        default=defaults.CONCURRENT_CALLS,
        help="the most requests that one rollout may have at the same time (default: %(default)s)",
    )
    command.add_argument(
        "--max-body-mb",
        type=integer(1, 65536),
        default=defaults.MAX_BODY_MB,
        help="the largest request (default: %(default)s)",
    )
    command.add_argument(
        "--upstream",
        metavar="URL",
        type=url,
        help=f"an OpenAI-compatible service for model calls; its key is in {UPSTREAM_KEY_VARIABLE}",
    )
    command.add_argument(
        "--upstream-timeout-s",
        type=integer(1, 86_400),
        default=int(defaults.UPSTREAM_TIMEOUT_S),
        help="how long it may be silent (default: %(default)s)",
    )
    command.set_defaults(run=_run)


async def _run(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serving = ServeOptions(
        options.home,
        ServerConfig(
            host=options.host, port=options.port, advertise=options.advertise, concurrent_calls=options.concurrent_calls
        ),
        UpstreamConfig(url=options.upstream, timeout_s=options.upstream_timeout_s),
        upstream_key=os.environ.get(UPSTREAM_KEY_VARIABLE),
        store=options.store,
        keyless=options.keyless,
        max_body_mb=options.max_body_mb,
    )

    def started(running: RunningServer, model: str | None = None) -> None:
        if options.json:
            text = msgspec.json.encode(running).decode()
        else:
            key = Path(running.admin_key_file).with_name("client.key")
            local = " (on this machine any key will do)" if is_loopback(options.host) else ""
            base_url = f"  base URL   {running.advertised}/v1 (of Anthropic and Google: without /v1)\n"
            text = (
                f"Leyden {__version__} listens on {running.url}\n"
                + (f"  model      {model}\n{base_url}  client key {key}{local}\n" if model else "")
                + f"  store      {running.store}\n"
                f"  admin key  {running.admin_key_file}\n"
                f"  dashboard  {running.dashboard}\n"
                "  stop it with Ctrl-C"
            )
            if running.advertised != running.url:
                text += f"\n  advertised as {running.advertised}"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    if options.model is not None:
        bind_port(options.host, options.port).close()  # refuses one that is taken before the model is loaded
        print_loading(options.model)
        needs_torch()
        from leyden.local.serve import serve_model

        await serve_model(serving, options.model, options.step, options.vllm_python, started)
        return
    if options.step is not None:
        raise ConfigError("--step is for --model RUN")
    if options.vllm_python is not None:
        raise ConfigError("--vllm-python is for --model")
    from leyden.server.serve import serve  # takes seconds to import; other commands must not wait for it

    await serve(serving, started)
