"""Sends metrics to other trackers, each named by one word in the configuration; imports only those named."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec

from leyden.config import Config, ConfigError, to_toml


class Sink(Protocol):
    """A tracker of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def close(self) -> None:
        """Flush and close."""


@contextmanager
def opened_sinks(config: Config, folder: Path) -> Iterator[list[Sink]]:
    """Open the sinks that a configuration names, and close them at the end. A missing package is a `ConfigError`."""
    sinks: dict[str, Callable[[Config, Path], Sink]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "mlflow": MLflow,
        "trackio": Trackio,
    }
    with ExitStack() as stack:
        opened = []
        for name in config.report:
            opened.append(sinks[name](config, folder))
            stack.callback(opened[-1].close)
        yield opened


def _require(module: str, package: str, sink: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"`report`: {sink} needs the package {package}: pip install {package}") from error


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir` shows them."""

    def __init__(self, config: Config, folder: Path) -> None:
        _require("tensorboard", "tensorboard", "tensorboard")
        self._folder = folder / "tensorboard"
        self._writer: Any = self._open()
        self._writer.add_text("config", f"```\n{to_toml(config)}\n```")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. After an error the next write opens another file: this thread has ended."""
        try:
            self._writer = self._writer or self._open()
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:
            self._writer = None
            raise

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        return import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))


class WeightsAndBiases:
    """A W&B run; offline too, with WANDB_MODE=offline."""

    def __init__(self, config: Config, folder: Path) -> None:
        wandb = _require("wandb", "wandb", "wandb")
        self._run = wandb.init(
            project="leyden", name=config.run, id=config.run, resume="allow", dir=str(folder), config=_plain(config)
        )
        # W&B's own step only rises: it would drop the steps that a resumed run repeats
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


class MLflow:
    """An MLflow run, in the run's folder unless MLFLOW_TRACKING_URI says otherwise. A resumed run goes on in it."""

    def __init__(self, config: Config, folder: Path) -> None:
        mlflow = _require("mlflow", "mlflow", "mlflow")
        self._client = mlflow
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
        mlflow.set_experiment("leyden")
        known = folder / "mlflow_run_id"
        run_id = known.read_text().strip() if known.exists() else None
        try:
            mlflow.start_run(run_id, run_name=config.run)
        except mlflow.MlflowException:  # deleted, or the tracking server is another one
            run_id = None
            mlflow.start_run(run_name=config.run)
        if run_id is None:
            known.write_text(mlflow.active_run().info.run_id)
            mlflow.log_text(to_toml(config), "config.toml")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        self._client.log_metrics({mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Flush and close."""
        self._client.end_run()


def mlflow_name(name: str) -> str:
    """Return the name of a metric as MLflow takes it: a path of words, points and hyphens."""
    parts = re.sub(r"[^\w./ -]", " ", name).split("/")
    return "/".join(part if part.strip(". ") else "_" for part in parts)


class Trackio:
    """A Trackio run on this machine."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._trackio = _require("trackio", "trackio", "trackio")
        self._trackio.init(project="leyden", name=config.run, resume="allow", config=_plain(config), embed=False)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush and close."""
        self._trackio.finish()


def _plain(config: Config) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(config, str_keys=True)
    return plain
