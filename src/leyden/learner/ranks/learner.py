"""The learner on several devices, as the orchestrator's process has it: it divides samples and joins results."""

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from leyden.learner.checkpoint import Checkpoints, read_state
from leyden.learner.evaluation import divergence_of, rollout_ratios
from leyden.learner.objective import objective_of
from leyden.learner.protocol import Logprobs, SampleEvaluation, TrainerState, Update, UpdateMetrics
from leyden.learner.ranks.division import divide
from leyden.learner.ranks.gathered import GatheredWeights
from leyden.learner.ranks.messages import RankSetup
from leyden.learner.ranks.processes import RankProcesses
from leyden.learner.sample import Sample


class RankedLearner:
    """Trains one policy on several devices, one rank each. The ranks are started and ended by their owner."""

    def __init__(self, ranks: RankProcesses, setup: RankSetup, checkpoints: Checkpoints) -> None:
        self._ranks, self._setup, self._checkpoints = ranks, setup, checkpoints
        self._geometric = objective_of(setup.config).geometric
        self._trees = setup.config.training.layout == "tree"
        self._loop = asyncio.get_running_loop()
        self._weights = GatheredWeights(ranks, self._loop)
        self._copied: TrainerState | None = None
        """The checkpoint that is not written yet."""

    async def start(self) -> str | None:
        """Load the model. Returns why samples cannot be laid out as trees although the configuration selects trees."""
        await self._ranks.call("load", self._setup, patient=True)
        reason: str | None = (await self._ranks.call("build"))[0]
        self._trees = self._trees and reason is None
        return reason

    async def restore(self, policy: str) -> TrainerState:
        """Restore the newest checkpoint that is whole, of any number of devices."""
        if (folder := await asyncio.to_thread(self._checkpoints.find_latest)) is None:
            return TrainerState(policy=policy)
        await self._ranks.call("restore", folder, patient=True)
        return read_state(folder)

    async def start_step(self, policy: str, step: int) -> float:
        """Begin a step of the run; return its learning rate."""
        rate: float = (await self._ranks.call("start_step", step))[0]
        return rate

    async def evaluate(self, policy: str, samples: Sequence[Sample]) -> SampleEvaluation:
        """Compute what the credit of samples needs."""
        parts = await self._divide(samples)
        found = await self._ranks.call("evaluate", by_rank=[_chosen(samples, part) for part in parts])
        fields = ("logprobs", "values", "kl_reference", "ratios")
        whole = SampleEvaluation(**{name: _joined([getattr(one, name) for one in found], parts) for name in fields})
        if whole.ratios is None or whole.logprobs is None:
            return whole
        return replace(whole, ratios=rollout_ratios(samples, whole.logprobs, self._geometric))  # over all ranks

    async def logprobs(self, policy: str, samples: Sequence[Sample], reference: bool = False) -> list[Logprobs]:
        """Compute the logprobs of samples."""
        parts = await self._divide(samples)
        found = await self._ranks.call("logprobs", reference, by_rank=[_chosen(samples, part) for part in parts])
        return _joined(found, parts) or []

    async def divergence(self, policy: str, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> float:
        """Estimate the KL divergence of the policy from one that sampled with these logprobs."""
        return divergence_of(await self.logprobs(policy, samples), logprobs)

    async def accumulate_part(self, policy: str, part: Update) -> None:
        """Accumulate the gradient of some samples of the next update."""
        await self._ranks.call("accumulate_part", by_rank=await self._divided(part))

    async def accumulate(self, policy: str, update: Update) -> UpdateMetrics:
        """Accumulate the gradient of an update."""
        metrics: UpdateMetrics = (await self._ranks.call("accumulate", by_rank=await self._divided(update)))[0]
        return metrics

    async def apply(self, policy: str) -> None:
        """Make an optimiser step."""
        await self._ranks.call("apply")

    def weights(self, policy: str) -> GatheredWeights:
        """Return the present weights; they are gathered one by one when they are read."""
        return self._weights

    async def save(self, policy: str, state: TrainerState) -> None:
        """Copy what a checkpoint holds; without memory for that, write it."""
        if all(await self._ranks.call("copy")):
            self._copied = state
        else:
            await asyncio.to_thread(self._write, state, "compute")

    async def finish_save(self, policy: str) -> None:
        """Write the copy while the policy is trained."""
        if (state := self._copied) is not None:
            await asyncio.to_thread(self._write, state, "files")
            self._copied = None

    async def version_of(self, policy: str, step: int) -> int:
        """Return the version of the weights of a checkpoint, if it is whole."""
        return await asyncio.to_thread(self._checkpoints.version_of, step)

    async def load(self, policy: str, step: int) -> None:
        """Replace the weights by those of a checkpoint; the optimiser keeps its state."""
        await self._ranks.call("read", self._checkpoints.folder_of(step), step == 0, patient=True)

    async def free_memory(self) -> None:
        """Give memory that is not in use back to the devices."""
        await self._ranks.call("free_memory")

    def _write(self, state: TrainerState, channel: Any) -> None:
        """Have the ranks write a checkpoint, from another thread."""
        with self._checkpoints.writing(state) as folder:
            writing = self._ranks.call("write", folder, channel=channel, patient=True)
            asyncio.run_coroutine_threadsafe(writing, self._loop).result()

    async def _divided(self, update: Update) -> list[Update]:
        samples, old_logprobs = update.samples, update.old_logprobs
        return [
            replace(update, samples=_chosen(samples, part), old_logprobs=old_logprobs.select(part))
            for part in await self._divide(samples)
        ]

    async def _divide(self, samples: Sequence[Sample]) -> list[list[int]]:
        return await asyncio.to_thread(divide, samples, self._ranks.number, self._trees)


def _chosen(samples: Sequence[Sample], indices: Sequence[int]) -> list[Sample]:
    return [samples[index] for index in indices]


def _joined(found: Sequence[Sequence[Any] | None], parts: Sequence[Sequence[int]]) -> list[Any] | None:
    """Put what the ranks returned of their samples in the order of all samples; None if they returned nothing."""
    by_index: dict[int, Any] = {}
    for some, part in zip(found, parts, strict=True):
        if some is None:
            return None
        by_index |= dict(zip(part, some, strict=True))
    return [by_index[index] for index in sorted(by_index)]
