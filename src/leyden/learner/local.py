"""The learner in this process: calls run on one thread, so that the event loop stays responsive.

Checkpoints are written on another.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

import torch
from msgspec import Struct

from leyden.engine.protocol import ModelWeights
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.earlier import EarlierPolicy
from leyden.learner.evaluation import divergence, evaluate, to_arrays
from leyden.learner.objective import Objective
from leyden.learner.policy import CurrentWeights, Policy
from leyden.learner.protocol import Logprobs, SampleEvaluation, TrainerState, Update, UpdateMetrics
from leyden.learner.sample import Sample
from leyden.learner.snapshot import Snapshot

T = TypeVar("T")


class TrainedPolicy(Struct, frozen=True):
    """A policy, what it learns from, and where it is saved."""

    policy: Policy
    objective: Objective
    checkpoints: Checkpoints

    def load(self, step: int) -> None:
        """Replace the weights by those of a checkpoint."""
        self.checkpoints.load(self.policy, step)


class LocalLearner:
    """Trains policies in this process. Use it as a context manager."""

    def __init__(self, policies: Mapping[str, TrainedPolicy], earlier: Mapping[str, EarlierPolicy] = {}) -> None:
        self._policies = policies
        self._served: Mapping[str, TrainedPolicy | EarlierPolicy] = {**policies, **earlier}
        self._thread = ThreadPoolExecutor(1, "learner")
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._copies: dict[str, Snapshot] = {}
        """By policy, the checkpoint that is not written yet."""
        self._grad_norms: dict[str, float] = {}
        self._frozen = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the thread, which ends when it has computed what it was given; a checkpoint is written to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown()
        gc.unfreeze()

    async def restore(self, policy: str) -> TrainerState:
        """Restore the newest checkpoint that is whole."""
        one = self._policies[policy]
        return await self._on_thread(lambda: one.checkpoints.restore_latest(one.policy))

    async def start_step(self, policy: str, step: int) -> float:
        """Begin a step of the run; return its learning rate."""
        found = self._policies[policy].policy
        found.step = step
        return found.learning_rate

    async def evaluate(self, policy: str, samples: Sequence[Sample]) -> SampleEvaluation:
        """Compute what the credit of samples needs."""
        one = self._policies[policy]
        return await self._on_thread(lambda: evaluate(one.policy, one.objective, samples))

    async def logprobs(self, policy: str, samples: Sequence[Sample], reference: bool = False) -> list[Logprobs]:
        """Compute the logprobs of samples."""
        found = self._policies[policy].policy
        compute = found.reference_logprobs if reference else found.logprobs
        return await self._on_thread(lambda: to_arrays(compute(samples)))

    async def divergence(self, policy: str, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> float:
        """Estimate the KL divergence of the policy from one that sampled with these logprobs."""
        return await self._on_thread(lambda: divergence(self._policies[policy].policy, samples, logprobs))

    async def accumulate_part(self, policy: str, part: Update) -> None:
        """Accumulate the gradient of some samples of the next update."""
        one = self._policies[policy]
        await self._on_thread(lambda: one.policy.accumulate_part(part.samples, part.old_logprobs, one.objective))

    async def accumulate(self, policy: str, update: Update) -> UpdateMetrics:
        """Accumulate the gradient of an update."""
        one = self._policies[policy]
        metrics = await self._on_thread(
            lambda: one.policy.accumulate(update.samples, update.old_logprobs, one.objective, update.scale)
        )
        self._grad_norms[policy] = metrics.grad_norm
        return metrics

    async def apply(self, policy: str) -> None:
        """Make an optimiser step."""
        await self._write(lambda: self._policies[policy].policy.apply(self._grad_norms.pop(policy)))
        if not self._frozen:
            self._frozen = True
            await self._on_thread(_freeze_objects)

    def weights(self, policy: str) -> ModelWeights:
        """Return the present weights."""
        found = self._served[policy]
        return CurrentWeights(found.policy) if isinstance(found, TrainedPolicy) else found

    async def save(self, policy: str, state: TrainerState) -> None:
        """Copy what a checkpoint holds; without memory for that, write it."""
        one = self._policies[policy]

        def copy_or_write() -> Snapshot | None:
            snapshot = one.checkpoints.snapshot(one.policy, state)
            copy = snapshot.copy()
            if copy is None:
                one.checkpoints.write(snapshot)
            return copy

        copy = await self._on_thread(copy_or_write)
        if copy is not None:
            self._copies[policy] = copy

    async def finish_save(self, policy: str) -> None:
        """Write the copy on a thread of its own, while the policy is trained."""
        if (copy := self._copies.get(policy)) is not None:
            write = partial(self._policies[policy].checkpoints.write, copy)
            await asyncio.get_running_loop().run_in_executor(self._writer, write)
            del self._copies[policy]

    async def version_of(self, policy: str, step: int) -> int:
        """Return the version of the weights of a checkpoint, if it is whole."""
        return await self._on_thread(lambda: self._served[policy].checkpoints.version_of(step))

    async def load(self, policy: str, step: int) -> None:
        """Replace the weights by those of a checkpoint; the optimiser keeps its state."""
        await self._write(lambda: self._served[policy].load(step))

    async def free_memory(self) -> None:
        """Give the memory of gradients and activations back to the device."""
        await self._on_thread(torch.cuda.empty_cache)

    async def _write(self, write: Callable[[], None]) -> None:
        """Write weights. A cancellation is raised when they are written: the engine may then sample from them."""
        writing = asyncio.get_running_loop().run_in_executor(self._thread, write)
        cancelled: asyncio.CancelledError | None = None
        while not writing.done():
            try:
                await asyncio.wait({writing})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled from writing.exception()
        writing.result()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _freeze_objects() -> None:
    """Exclude all that exists from later garbage collections.

    After the first optimiser step these are millions of objects of torch and of compiled layers. To look through them
    stops every thread of this process, among them the engine's, for half a second.
    """
    gc.collect()
    gc.freeze()
