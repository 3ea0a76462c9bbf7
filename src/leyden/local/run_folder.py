"""What a run leaves on disk, and whether a run may go on in it.

runs/calc/config.toml      the whole configuration, defaults written out
          leyden.db        everything that happened
          metrics.jsonl    a line a step
          curve.png        how the reward went
          step-100/        a checkpoint, which is a Hugging Face folder too
          server.log       what went wrong in the server, and worker.log in the worker
"""

import fcntl
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from leyden.config import Config, ConfigError, read_stored_config, written

_MAY_CHANGE = (
    *("training.steps", "evaluation", "checkpoints", "report", "home", "base"),
    *("engine", "workers", "server", "services", "upstream", "rollout.reward_time_limit_s", "rollout.reward_tries"),
)
"""What may be another when a run goes on: none of it changes what the steps so far mean."""


class RunFolder(Struct, frozen=True):
    """The folder of one run."""

    path: Path

    @classmethod
    def of(cls, config: Config, suffix: str = "") -> "RunFolder":
        """Where a configuration's run is kept."""
        return cls(Path(config.home).absolute() / f"{config.run}{suffix}")

    @property
    def config(self) -> Path:
        """The configuration that the run has."""
        return self.path / "config.toml"

    @property
    def journal(self) -> Path:
        """The metrics."""
        return self.path / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """How the reward went."""
        return self.path / "curve.png"

    @contextmanager
    def opened(self, config: Config) -> Iterator[Path | None]:
        """Have the folder for oneself, made or gone on in, if the configuration is the same in all that matters.

        It may be another where nothing came of the run yet: what is in the store is put aside, and this is where.
        """
        with self._alone():
            changed = [key for key in _differences(self.config, config) if not key.startswith(_MAY_CHANGE)]
            if changed and self.journal.exists() and self.journal.stat().st_size:
                raise ConfigError(
                    f"`{changed[0]}` is not what run {config.run!r} began with ({self.config}): "
                    "set it back to go on, or begin anew with --restart, or under another name with run=NAME"
                )
            aside = self._put_store_aside() if changed else None
            draft = self.config.with_suffix(".draft")
            draft.write_text(written(config), encoding="utf-8")
            draft.replace(self.config)
            yield aside

    def put_aside(self) -> Path | None:
        """Rename the folder, so that the run can begin anew and nothing is lost; where it is now."""
        if not self.path.exists():
            return None
        with self._alone():
            return self.path.rename(self.path.with_name(f"{self.path.name}.{_before()}"))

    def _put_store_aside(self) -> Path | None:
        files = list(self.path.glob("leyden.db*"))
        if not files:
            return None
        aside = self.path / _before()
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)
        return aside

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Make the folder, and hold a lock in it that the operating system drops with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"another process is at run {self.path.name!r} ({self.path}): wait for it, or take run=NAME"
                ) from error
            yield


def _before() -> str:
    return f"before-{time.strftime('%Y%m%d-%H%M%S')}"


def _differences(path: Path, config: Config) -> list[str]:
    if not path.exists():
        return []
    before = _flat(tomllib.loads(written(config_of(path.parent))))  # with defaults for keys that are newer than the run
    now = _flat(tomllib.loads(written(config)))
    return sorted(key for key in {*before, *now} if before.get(key) != now.get(key))


def _flat(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def config_of(path: Path) -> Config:
    """The configuration that a run's folder has."""
    try:
        return read_stored_config(tomllib.loads((path / "config.toml").read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{path} is not the folder of a run: {error}") from error
