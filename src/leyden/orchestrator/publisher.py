"""Lets the learner change its weights, and the engine serve them; model calls are held meanwhile.

An engine that shares the learner's parameters starts no new call from the first change of a step until the weights are
published, unless agents go on (`training.max_staleness`): it pauses for each change by itself. One with its own copy
goes on until they are copied.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from leyden.api.client import Remote
from leyden.config import Config
from leyden.engine.protocol import EngineBackend, Publication
from leyden.learner.protocol import Learner
from leyden.orchestrator.publications import Publications
from leyden.records import Version


class Publisher:
    """Publishes the weights of one policy."""

    def __init__(
        self,
        config: Config,
        remote: Remote,
        engine: EngineBackend,
        learner: Learner,
        version: int,
        publications: Publications,
        held: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`version` is the present one. `held` is entered from the hold of the calls until they resume."""
        self._run, self._policy = config.run, config.policy
        self._remote, self._engine, self._learner = remote, engine, learner
        self._held, self._holding = held, ExitStack()
        self._publications = publications
        self.version = version
        """The number of updates of the weights."""

    @property
    def must_publish(self) -> bool:
        """Whether the engine needs the weights though they have not changed: it slept."""
        return self._engine.sleeps_while_training

    async def make_room(self) -> None:
        """Let an engine that does not fit beside training sleep until the next publication."""
        if self._engine.sleeps_while_training:
            await self._hold_calls()
            await self._engine.sleep()

    async def update(self) -> None:
        """Make the optimiser step that the learner is ready for."""
        await self._change(partial(self._learner.apply, self._policy), self.version + 1)
        self.version += 1

    async def publish(self) -> Publication:
        """Serve the present weights."""
        return await self._publish(self.version)

    async def publish_checkpoint(self, step: int) -> None:
        """Serve the weights of a checkpoint, which the learner has from now on; of step 0 those before training."""
        version = await self._learner.version_of(self._policy, step)
        await self._change(partial(self._learner.load, self._policy, step), version)
        await self._publish(version)

    async def _change(self, write: Callable[[], Awaitable[None]], version: int) -> None:
        if self._engine.shares_parameters and not self._publications.max_staleness:
            await self._hold_calls()
        async with self._engine.changing_weights(version):
            await write()

    async def _publish(self, version: int) -> Publication:
        if self._engine.sleeps_while_training:
            await self._learner.free_memory()
        with self._holding:
            await self._hold_calls()
            publication = await self._engine.publish(self._learner.weights(self._policy), version)
            self._publications.add(version)
            await self._remote.publish_version(self._run, Version(self._policy, version))  # resumes them
        return publication

    async def _hold_calls(self) -> None:
        """Start no model call until the next publication."""
        self._holding.enter_context(self._held())
        await self._remote.hold_calls(self._run, self._policy)
