"""`leyden replay`: runs the agent of a recorded rollout again, answered from its record, without a model or with one.

The rollout is copied into a new run, so nothing of its own run changes.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from msgspec import Struct
from msgspec.structs import replace
from transformers import AutoConfig

from leyden.api.client import Remote
from leyden.api.wire import GroupSpec, LeaseRequest
from leyden.config import Config, ConfigError, policy_configs
from leyden.config.schema import ServerConfig
from leyden.engine.protocol import ServedEngine, SocketAddress
from leyden.engine.remote import refuse_all
from leyden.episodes import Episode
from leyden.local.engines import running_engines
from leyden.local.policies import load_policies, served_policy
from leyden.local.readable import Readable
from leyden.local.replaying import compare
from leyden.local.stack import SupervisedPart, run_spec, run_with, server_and_worker
from leyden.models.source import ModelSource, find_model
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.records import Origin
from leyden.runs.run_checkpoints import known_runs, with_model
from leyden.runs.run_folder import RunFolder
from leyden.runs.run_names import STORE_NAME
from leyden.server.options import ServedPolicy
from leyden.store.store import Store

_NO_ANSWER = "the record has no answer to this call, and there is no model: --model NAME goes on with one"


class ReplayedRollout(Readable, frozen=True):
    """What a recorded rollout became when its agent ran again."""

    rollout: str
    calls: int
    """Recorded calls that could answer."""
    replayed: int
    """Those that did."""
    sampled: int
    """Calls that a model answered."""
    difference: str | None
    """At which call the agent asked something else than before, and what; None: nowhere."""
    outcome: str
    message: str | None
    reward_recorded: float | None
    reward: float | None
    run: str
    folder: Path


class AbsentEngine(Struct, frozen=True):
    """The engine of a run without a model: every request that the record does not answer fails."""

    address: SocketAddress

    @classmethod
    def of(cls, source: ModelSource) -> "AbsentEngine":
        """Return one in place of an engine with this model."""
        config = AutoConfig.from_pretrained(source.folder).get_text_config()
        return cls(SocketAddress(int(config.max_position_embeddings), int(config.vocab_size), concurrency=64))

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Fail every request of a server process until that is gone."""
        await refuse_all(reader, writer, _NO_ANSWER)

    async def wait_failed(self) -> NoReturn:
        """Wait for ever: there is nothing that could fail."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")


async def replay_rollout(
    config: Config, recorded: Episode, calls: int | None = None, model: str | None = None
) -> ReplayedRollout:
    """Run the agent of a recorded rollout again; its first `calls` calls (None: all) are answered from the record.

    A model answers what the record does not; None: such calls fail.
    """
    made = len(recorded.calls)
    if not made:
        raise ConfigError(f"rollout {recorded.rollout.id} made no call, so there is nothing to replay")
    if calls is not None and calls > made:
        raise ConfigError(f"--from {calls}: rollout {recorded.rollout.id} made {made} calls")
    if not config.rollout.replay:
        raise ConfigError(
            "`rollout.replay` is false, because tools must not run twice with the same arguments: if they may now, "
            "write rollout.replay=true behind the command"
        )
    workers = replace(config.workers, processes=1, concurrency=1)
    config = replace(config, server=ServerConfig(), workers=workers)
    folder = RunFolder.renewed(config, "replay")
    run = folder.path.name
    with folder.acquire(config):
        origin = Origin(await _copy(config, recorded, folder.path / STORE_NAME, run), calls or made)
        spec = _group("replay", recorded, origin)
        async with (
            _engines(config, folder.path, model) as (engines, served),
            server_and_worker(config, folder.path, served, engines, run) as (remote, server, worker),
        ):
            assert worker is not None
            parts: list[SupervisedPart] = [*engines.values(), server, worker]
            again = await run_with(parts, _run(remote, run, spec))
    return _report(config, replace(recorded, calls=recorded.calls[:calls]), again, folder.path)


async def _copy(config: Config, recorded: Episode, store: Path, run: str) -> str:
    """Copy the calls of an episode into a run of a new store; return the attempt that has them there."""
    opened = await Store(store).start()
    try:
        await opened.create_run(run_spec(config, run))
        await opened.enqueue(run, _group("record", recorded))
        [leased] = await opened.lease(LeaseRequest("record", run=run))
        await opened.record_calls(run, leased.attempt.id, [replace(call, origin=None) for call in recorded.calls])
        await opened.cancel_group(run, "record")
    finally:
        await opened.close()
    return leased.attempt.id


def _group(name: str, recorded: Episode, origin: Origin | None = None) -> GroupSpec:
    """Return the request of a rollout as the recorded one was: its purpose and step decide how calls are sampled."""
    was = recorded.rollout
    return GroupSpec(name, recorded.task, 1, was.purpose, max_attempts=1, step=was.step, origin=origin)


@asynccontextmanager
async def _engines(
    config: Config, folder: Path, model: str | None
) -> AsyncIterator[tuple[dict[str, ServedEngine], list[ServedPolicy]]]:
    """Yield an engine for each policy, with a model or without, and what the server must know of the policies."""
    home = Path(config.home)
    if model is not None:
        policies = load_policies(with_model(config, model, home), known_runs(home))
        async with running_engines(folder, policies) as running:
            yield {**running}, [served_policy(one, running[one.name]) for one in policies]
        return
    sources = {name: find_model(own.model, own.base) for name, own in policy_configs(config).items()}
    absent = {name: AbsentEngine.of(source) for name, source in sources.items()}
    served = [ServedPolicy(name, str(one.folder), one.name, absent[name].address) for name, one in sources.items()]
    yield {**absent}, served


async def _run(remote: Remote, run: str, spec: GroupSpec) -> Episode:
    [(_, [found])] = [one async for one in RolloutCollector(remote, run).gather([spec])]
    return found


def _report(config: Config, recorded: Episode, again: Episode, folder: Path) -> ReplayedRollout:
    compared, outcome = compare([(recorded, again)]), again.attempt.outcome
    assert outcome is not None
    return ReplayedRollout(
        rollout=recorded.rollout.id,
        calls=compared.prefixes,
        replayed=compared.exact,
        sampled=sum(call.origin is None and bool(call.completion_ids) for call in again.calls),
        difference=next(iter(compared.differences), None),
        outcome=str(outcome.ending),
        message=outcome.message,
        reward_recorded=recorded.final_reward(config.rollout.failure_reward),
        reward=again.final_reward(config.rollout.failure_reward),
        run=folder.name,
        folder=folder,
    )
