"""`leyden serve --model`: serves a trained model in every dialect, with the engine that its training used."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from leyden.background import stop_signal
from leyden.config import Config, EngineConfig, trained_policies
from leyden.learner.loading import check_tokenizer, load_model
from leyden.local.engines import running_engines
from leyden.local.policies import LocalPolicy, served_policy
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


def find_served(model: str, home: Path, step: str | None = None, vllm_python: str | None = None) -> list[ServedSource]:
    """Find what to serve: a run (its best checkpoint, or `step`) by its folder or name, or any other model.

    Of a run that trains several policies, all are served by their names.
    """
    if (run := find_run(model, home)) is not None:
        trained = stored_config(run)
        kept = {name: getattr(trained.engine, name) for name in ("kind", "slots", "memory", "dtype")}
        config = _serving(EngineConfig(**kept, vllm_python=vllm_python), trained.deterministic)
        found = {name: find_checkpoint(model, home, step, name) for name in trained_policies(trained)}
        names = {name: name if len(found) > 1 else run.resolve().name for name in found}
        return [ServedSource(names[name], find_model(str(path), "."), config) for name, path in found.items()]
    find_checkpoint(model, home, step)  # refuses a step of what is no run
    source = find_model(model, ".", known_runs(home))
    name = source.folder.name if Path(model).is_dir() else model
    return [ServedSource(name, source, _serving(EngineConfig(vllm_python=vllm_python)))]


def _serving(engine: EngineConfig, deterministic: bool = False) -> Config:
    return Config(run="serve", agent="", tasks="", engine=engine, deterministic=deterministic)


async def serve_model(
    options: ServeOptions,
    model: str,
    step: str | None,
    vllm_python: str | None,
    started: Callable[[RunningServer, str], None],
) -> None:
    """Serve a model until SIGINT or SIGTERM. `started` gets where the server listens, and the names of its models."""
    found = find_served(model, options.home, step, vllm_python)
    policies = []
    for one in found:
        check_tokenizer(one.source)
        loaded = load_model(one.source, one.config.engine.dtype)
        policies.append(LocalPolicy(replace(one.config, policy=one.name), one.source, loaded))
    names = ", ".join(one.name for one in found)
    title = found[0].name if len(found) == 1 else Path(model).name
    folder = (options.home / f"{title.replace('/', '-')}.serve").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    stop = stop_signal()
    async with running_engines(folder, policies) as engines:
        served = tuple(served_policy(one, engines[one.name]) for one in policies)
        server_options = ServerProcessOptions(replace(options, home=folder, direct=True), served)
        async with LocalServer(server_options, engines, folder / "server.log") as server:
            started(server.running, names)
            await run_with((*engines.values(), server), stop.wait())
