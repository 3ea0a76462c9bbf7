"""Measures how far the policy has moved from the model that training started with, without keeping that model.

Some calls of the first step are kept with the logprobs that the starting model computed of them. What the policy
computes of them later gives KL(start || policy) by k3, on the starting model's own samples. Both are computed by the
learner, so the first value is exactly 0 whatever the engine rounds. A run that resumes reads the calls from its folder.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from leyden.learner.protocol import Learner
from leyden.learner.sample import Sample
from leyden.orchestrator.credit.samples import Groups, make_samples
from leyden.orchestrator.disk_room import is_disk_full

START_FILE = "start.msgpack"
_EVERY = 5
"""Steps between measurements: one is a forward pass over a few calls."""
_MAX_CALLS, _MAX_TOKENS = 32, 8192


class StartSamples(Struct, frozen=True):
    """Calls of the first step, and the logprobs of their sampled tokens under the starting model."""

    samples: list[Sample]
    logprobs: list[list[float]]


class Divergence:
    """The divergence of a policy from where its training started."""

    def __init__(self, path: Path, learner: Learner, policy: str, last_step: int) -> None:
        """`path` is the file of the calls that are kept."""
        self._path, self._learner, self._policy, self._last = path, learner, policy, last_step
        self._start: StartSamples | None = None
        self._written = True

    async def measure(self, groups: Groups, step: int, moved: bool) -> float | None:
        """Return the divergence before the updates of a step, in nats a token; None if it is not due or not known.

        Until the policy has `moved`, the calls to keep are chosen from the step's groups.
        """
        if not moved and groups:
            samples = await asyncio.to_thread(lambda: _choose(make_samples(groups)))
            logprobs = await self._learner.logprobs(self._policy, samples)
            self._start = StartSamples(samples, [one.tolist() for one in logprobs])
            self._written = False
        elif self._start is None:
            self._start = _read(self._path)
        if not self._written:
            await asyncio.to_thread(self._write)
        if self._start is None or (step % _EVERY != 1 and step != self._last):
            return None
        return await self._learner.divergence(self._policy, self._start.samples, self._start.logprobs)

    def _write(self) -> None:
        """Write the calls that are kept; while the disk is full, the next step tries again."""
        temporary = self._path.with_suffix(".draft")
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.msgpack.encode(self._start))
            temporary.replace(self._path)
        except OSError as error:
            if not is_disk_full(error):
                raise
        else:
            self._written = True


def _choose(samples: Sequence[Sample]) -> list[Sample]:
    """Return some samples from all groups, few enough to be computed at once."""
    some = samples[:: -(-len(samples) // _MAX_CALLS) or 1]
    chosen: list[Sample] = []
    for sample in some:
        if chosen and sum(map(len, chosen)) + len(sample) > _MAX_TOKENS:
            break
        chosen.append(replace(sample, token_indices=tuple(sample.token_indices)))
    return chosen


def _read(path: Path) -> StartSamples | None:
    """Read the calls that an earlier process kept; None if there are none, or no whole ones."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=StartSamples)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
