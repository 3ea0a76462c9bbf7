"""The folder of a run: its files, its lock, and whether a run may be resumed in it.

runs/calc/config.toml      the whole configuration, including defaults
          leyden.db        the store: every rollout, call and reward
          metrics.jsonl    one line per step
          groups.jsonl     the groups that each step trains on
          environment.json machine and packages
          curve.png        a plot of the reward
          fingerprint.json digests of the files with code and with tasks
          step-100/        a checkpoint, which is also a Hugging Face folder; policies/NAME/step-100 if `policy` is set
          train.log        what the training printed: a line per step, and warnings
          server.log       warnings and errors of the server; worker.log: those of the worker
"""

import fcntl
import re
import shutil
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from leyden.config import Config, ConfigError, flattened, read_config, to_toml
from leyden.runs.run_names import STORE_NAME
from leyden.store.files.run_lock import LOCK_NAME, is_run_held
from leyden.user_code.fingerprint import Fingerprint, edited_files, fingerprint

_MAY_CHANGE = (
    *("training.steps", "training.time_limit_s", "evaluation", "checkpoints", "report", "home", "base"),
    *(
        "training.max_staleness",
        "training.batch_tokens",
        "training.gradient_checkpointing",
        "training.layout",
        "training.compile",
        "training.offload",
        "training.devices",
        "training.device_timeout_s",
        "training.restarts",
    ),
    *("engine", "workers", "server", "services", "upstream", "rollout.reward_time_limit_s", "rollout.reward_tries"),
)
"""Keys that may change when a run is resumed: none of them changes the meaning of the steps so far."""
_CHOSEN = ".learning_rate"
"""The end of keys that a run chooses if they are unset; resumed, it keeps what it chose."""
_LOCK_TRIES, _LOCK_RETRY_S = 5, 0.05
"""Who asks whether a run is held has its lock for an instant."""
_STEP = re.compile(rb'{"step": (\d+)')


class Resumption(Struct, frozen=True):
    """How a run starts in its folder."""

    edited: list[str]
    """Code that was edited since the last start of a run that has trained a step."""
    archive: Path | None
    """The folder with what an earlier start had recorded: it had not trained a step, and something has changed."""


class RunFolder(Struct, frozen=True):
    """The folder of one run."""

    path: Path

    @classmethod
    def of(cls, config: Config, suffix: str = "") -> "RunFolder":
        """Return the folder of a configuration's run."""
        return cls(Path(config.home).absolute() / f"{config.run}{suffix}")

    @classmethod
    def renewed(cls, config: Config, kind: str) -> "RunFolder":
        """Return a folder for a run of `leyden dev` or `leyden eval`, in place of the last one of its kind.

        While a process uses that one, or if a training has its name, it is the next by number.
        """
        for suffix in chain([f".{kind}"], (f".{kind}-{number}" for number in count(2))):
            folder = cls.of(config, suffix)
            if is_run_held(folder.path) is not True and not folder.metrics_file.exists():
                break
        shutil.rmtree(folder.path, ignore_errors=True)
        return folder

    @property
    def config_file(self) -> Path:
        """The run's configuration."""
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        """The metrics of every step."""
        return self.path / "metrics.jsonl"

    @property
    def groups_file(self) -> Path:
        """The groups that each step trains on."""
        return self.path / "groups.jsonl"

    @property
    def curve(self) -> Path:
        """The plot of the reward."""
        return self.path / "curve.png"

    @property
    def fingerprint_file(self) -> Path:
        """Digests of the files with code and with tasks."""
        return self.path / "fingerprint.json"

    @property
    def environment_file(self) -> Path:
        """Machine and packages of the last process that trained."""
        return self.path / "environment.json"

    @contextmanager
    def acquire(self, config: Config, accept_changes: bool = False) -> Iterator[Resumption]:
        """Create the folder or resume in it, locked, if the configuration is the same in every key that matters.

        So must the tasks be, unless changes of them are accepted. If no step is trained yet, everything may differ:
        what was recorded is then moved aside. A new folder is deleted again if a `ConfigError` is raised before it has
        a store.
        """
        created = not self.path.exists()
        with self.lock():
            try:
                (changed, code), trained = self._check_changes(config, accept_changes), self.has_trained()
                archive = self._archive_start() if changed and not trained else None
                _replace(self.config_file, to_toml(config).encode())
                _replace(self.fingerprint_file, msgspec.json.encode(fingerprint(config)))
                yield Resumption(code if trained else [], archive)
            except ConfigError:
                if created and not (self.path / STORE_NAME).exists():
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def check(self, config: Config, accept_changes: bool = False) -> None:
        """Raise what `acquire` would raise; write nothing."""
        if self.config_file.exists():
            with self.lock():
                self._check_changes(config, accept_changes)

    def _check_changes(self, config: Config, accept_changes: bool) -> tuple[bool, list[str]]:
        """Return whether anything has changed, and the code that has; raise if a trained step forbids it."""
        differences = _differences(self.config_file, config)
        pickled = [key for key, values in differences.items() if all(str(value).endswith(".pkl") for value in values)]
        left_open = [key for key, (_, now) in differences.items() if key.endswith(_CHOSEN) and now is None]
        keys = [key for key in differences if not key.startswith(_MAY_CHANGE) and key not in (*pickled, *left_open)]
        now = fingerprint(config)
        before = self._stored_fingerprint() or now
        code = [*(f"`{key}`" for key in pickled), *edited_files(before.code, now.code)]
        tasks = edited_files(before.tasks, now.tasks)
        trained = self.has_trained()
        if keys and trained:
            was, is_now = ("not set" if value is None else repr(value) for value in differences[keys[0]])
            raise ConfigError(
                f"`{keys[0]}` is not what run {config.run!r} started with ({self.config_file}): it was {was} and is "
                f"{is_now}. Set it back to resume, or start over with --restart, or under another name with run=NAME"
            )
        if tasks and trained and not accept_changes:
            raise ConfigError(
                f"{', '.join(tasks)} changed since run {config.run!r} was trained, so held-out tasks may have been "
                "trained on: continue with --accept-changes, or start over with --restart, or under another name with "
                "run=NAME"
            )
        resized = "evaluation.rollouts" in differences  # groups of the first evaluation may exist, with another size
        return bool(keys or code or tasks or resized), code

    def has_trained(self) -> bool:
        """Whether the metrics have a step after the evaluation of the first model."""
        lines = self.metrics_file.read_bytes().splitlines() if self.metrics_file.exists() else []
        steps = (_STEP.match(line) for line in lines)
        return any(step is not None and int(step[1]) > 0 for step in steps)

    def _stored_fingerprint(self) -> Fingerprint | None:
        """Read the fingerprint of the last start; None if there is no whole one."""
        try:
            return msgspec.json.decode(self.fingerprint_file.read_bytes(), type=Fingerprint)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"run {self.path.name!r} was started by another version of Leyden: resume it with that version, or "
                "start over with --restart, or under another name with run=NAME"
            ) from error
        except (FileNotFoundError, msgspec.DecodeError):  # a start that was killed while it wrote
            return None

    def archive(self) -> Path | None:
        """Rename the folder, so that the run can start over and nothing is lost. Returns the new path."""
        if not self.path.exists():
            return None
        with self.lock():
            return self.path.rename(self._archive_path())

    def _archive_start(self) -> Path | None:
        """Move what a start without a trained step has recorded into a folder like that of `archive`."""
        recorded = list(self.path.glob(f"{STORE_NAME}*"))
        if not recorded:
            return None
        archive = self._archive_path()
        archive.mkdir(mode=0o700)
        recorded += (self.metrics_file, self.groups_file)
        described = (self.environment_file, self.fingerprint_file, self.config_file)
        for file in filter(Path.exists, (*recorded, *described)):
            file.rename(archive / file.name)
        return archive

    def _archive_path(self) -> Path:
        """Return a folder that does not exist yet, beside this one."""
        name = f"{self.path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        return next(path for path in map(self.path.with_name, names) if not path.exists())

    def delete(self) -> None:
        """Delete the folder, unless a process uses it."""
        with self.lock():
            shutil.rmtree(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and hold a lock in it, which the operating system releases with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            self.path.chmod(0o700)  # keys and recorded calls are for its user only
        with (self.path / LOCK_NAME).open("a") as lock:
            tries = _LOCK_TRIES
            while not _try_lock(lock.fileno()):
                tries -= 1
                if not tries:
                    raise ConfigError(
                        f"another process uses run {self.path.name!r} ({self.path}): wait for it, or choose run=NAME"
                    )
                time.sleep(_LOCK_RETRY_S)
            yield


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def folder_size(path: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):  # deleted meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _replace(path: Path, data: bytes) -> None:
    """Write a file that is complete or as it was."""
    temporary = path.with_suffix(".draft")
    temporary.write_bytes(data)
    temporary.replace(path)


def _differences(path: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ, with the earlier value and the present one."""
    if not path.exists():
        return {}
    before, now = (flattened(tomllib.loads(to_toml(one))) for one in (stored_config(path.parent), config))
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return {key: (before.get(key), now.get(key)) for key in changed}


def stored_config(path: Path) -> Config:
    """Read the configuration in the folder of a run."""
    try:
        return read_config(tomllib.loads((path / "config.toml").read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{path} is not the folder of a run: {error}") from error
