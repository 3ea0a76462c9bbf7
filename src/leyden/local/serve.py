"""`leyden serve --model`: serves a trained model in every dialect, with the engine that its training used."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from leyden.config import Config, EngineConfig
from leyden.learner.loading import check_tokenizer, load_model
from leyden.local.engine import running_engine
from leyden.local.server_process import LocalServer
from leyden.local.stack import run_with
from leyden.models.source import ModelSource, find_model
from leyden.runs.run_checkpoints import find_checkpoint, find_run, known_runs
from leyden.runs.run_folder import stored_config
from leyden.server.options import RunningServer, ServeOptions, ServerProcessOptions


class ServedSource(Struct, frozen=True):
    """What to serve: the files of a model, the name that clients see, and the configuration of its engine.

    Of the configuration in the folder of a run only size and precision of the engine are taken. The folder may come
    from somebody else: no program, argument, address or path that it names is used.
    """

    name: str
    source: ModelSource
    config: Config


def find_served(model: str, home: Path, step: str | None = None, vllm_python: str | None = None) -> ServedSource:
    """Find a model to serve: the folder or the name of a run (its best checkpoint, or `step`), or any other model."""
    run, checkpoint = find_run(model, home), find_checkpoint(model, home, step)
    if run is not None and checkpoint is not None:
        trained = stored_config(run)
        kept = {name: getattr(trained.engine, name) for name in ("kind", "slots", "memory", "dtype")}
        config = _serving(EngineConfig(**kept, vllm_python=vllm_python), trained.deterministic)
        return ServedSource(run.resolve().name, find_model(checkpoint, "."), config)
    source = find_model(model, ".", known_runs(home))
    name = source.folder.name if Path(model).is_dir() else model
    return ServedSource(name, source, _serving(EngineConfig(vllm_python=vllm_python)))


def _serving(engine: EngineConfig, deterministic: bool = False) -> Config:
    return Config(run="serve", agent="", tasks="", engine=engine, deterministic=deterministic)


async def serve_model(
    options: ServeOptions,
    model: str,
    step: str | None,
    vllm_python: str | None,
    started: Callable[[RunningServer, str], None],
) -> None:
    """Serve a model until SIGINT or SIGTERM. `started` gets where the server listens, and the model's name."""
    found = find_served(model, options.home, step, vllm_python)
    check_tokenizer(found.source)
    loaded = load_model(found.source, found.config.engine.dtype, training=False)
    folder = (options.home / f"{found.name.replace('/', '-')}.serve").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running_engine(found.config, folder, loaded, found.source, 0) as engine:
        server_options = ServerProcessOptions(
            serve=replace(options, home=folder, direct=True),
            policy=found.name,
            model=str(found.source.folder),
            name=found.source.name,
            engine=engine.address,
        )
        async with LocalServer(server_options, engine, folder / "server.log") as server:
            started(server.running, found.name)
            await run_with((engine, server), stop.wait())
