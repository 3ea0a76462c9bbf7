"""The protocol of a learner, and the types that cross it: numbers and arrays, and the weights to publish.

A learner computes with the models that are trained. Every call names the policy that it is about. What is computed
from the weights at the start of a step is returned and given back with the step's updates, so that a learner keeps
nothing about samples.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from leyden.engine.protocol import ModelWeights
from leyden.learner.sample import Sample
from leyden.records import DEFAULT_POLICY, Origin

T = TypeVar("T")
Logprobs = NDArray[np.floating]
"""Of the sampled tokens of one sample, temperature applied, in the precision in which they were computed."""


class SampleEvaluation(Struct, frozen=True):
    """What the credit of samples needs from the weights at the start of a step; None: it is not needed."""

    logprobs: Sequence[Logprobs] | None = None
    values: Sequence[float] | None = None
    """The critic's value of the state before each call."""
    kl_reference: Sequence[float] | None = None
    """The KL divergence of each call from the reference, summed over its tokens."""
    ratios: Sequence[float] | None = None
    """For each sample, the ratio of the policy to the sampler over its whole rollout."""


class OldLogprobs(Struct, frozen=True):
    """What the loss needs from the weights at the start of the step, an entry for each sample."""

    proximal: Sequence[Logprobs] | None = None
    """None: the policy has not changed since."""
    reference: Sequence[Logprobs] | None = None
    ratios: Sequence[float] | None = None
    """As in `SampleEvaluation`, if the correction is at the rollout level."""

    def select(self, samples: Sequence[int]) -> "OldLogprobs":
        """Return those of some samples, by index."""
        return OldLogprobs(
            _chosen(self.proximal, samples), _chosen(self.reference, samples), _chosen(self.ratios, samples)
        )


def _chosen(values: Sequence[T] | None, indices: Sequence[int]) -> list[T] | None:
    return None if values is None else [values[index] for index in indices]


class Update(Struct, frozen=True):
    """The samples of one optimiser update."""

    samples: Sequence[Sample]
    old_logprobs: OldLogprobs = OldLogprobs()
    scale: float = 1.0
    """What multiplies the gradient of these samples and of the parts of the update before them."""


class UpdateMetrics(Struct, frozen=True):
    """Metrics of one update."""

    loss: float
    grad_norm: float
    tokens: int
    """Tokens that have a loss."""
    computed: int
    """Tokens that went through the model, with prompts."""
    saved: int
    """Tokens of its samples that did not go through the model again, because another sample has them too."""
    statistics: dict[str, float]
    """See `leyden.rl.statistics`."""
    critic_loss: float | None = None


class TaskDraw(Struct, frozen=True):
    """How the task of a group was drawn."""

    task: str
    chance: float
    """The expected chance that the rewards of the group differ."""
    probability: float
    """With which the task was drawn."""


class TaskRecord(Struct, frozen=True):
    """What is known of tasks that are drawn by difficulty."""

    rollouts: dict[str, tuple[float, float]] = {}
    """By task, its recent rollouts that succeeded, and those that did not."""
    first: tuple[float, float] = (1.0, 1.0)
    """Recent groups of tasks of which nothing was known: those whose rewards differed, and the others."""


class BestRollout(Struct, frozen=True):
    """The best recent rollout of a task, from inside which its groups can begin."""

    attempt: str
    calls: int
    """Those that can be replayed, and one; at most up to the last that is trained on."""
    reward: tuple[float, float]
    """Its final reward, and the sum of its step rewards."""
    step: int
    """The one that it was trained in."""
    share: float
    """The share of its calls that the next group replays."""


class OpenGroup(Struct, frozen=True):
    """A group that was requested and not trained on yet."""

    position: int
    version: int
    """The one that was served when it was requested: all its tokens are of this one or of later ones."""
    step: int
    """The one that it is meant for."""
    draw: TaskDraw | None = None
    """None: the task was not drawn."""
    task: str | None = None
    """None: it was drawn, or follows from the position."""
    origin: Origin | None = None
    """Inside which rollout it begins; None: it begins with the task."""


class PrefixRecord(Struct, frozen=True):
    """What is known of tasks that are continued from inside their best rollouts."""

    best: dict[str, BestRollout] = {}
    """By task."""
    waiting: tuple[OpenGroup, ...] = ()
    """The groups that may be requested next, in turn. Each still has the position, the version and the step of the
    group whose task it continues."""
    continued: int = 0
    """How many such groups were requested: their positions are not in the order of tasks."""
    share: float = 0.5
    """The share that a task begins with: the mean of those that others had lately."""


class PooledVersion(Struct, frozen=True):
    """A checkpoint that a policy may meet in self-play, and how it fared."""

    step: int = 0
    """0 is the model before training."""
    won: int = 0
    """Rollouts in which the policy in training succeeded."""
    played: int = 0

    @property
    def lost_rate(self) -> float:
        """The estimated share of rollouts that the policy in training does not win; one half if nothing is known."""
        return 1 - (self.won + 1) / (self.played + 2)


class TrainerState(Struct, frozen=True):
    """The progress of the training of one policy, apart from its weights."""

    step: int = 0
    policy: str = DEFAULT_POLICY
    position: int = 0
    """Groups that were requested so far, which is the position in the endless order of tasks."""
    version: int = 0
    """Version of the weights: the number of their updates."""
    published: tuple[int, ...] = ()
    """The latest versions that were published; empty: only the present one."""
    open_groups: tuple[OpenGroup, ...] = ()
    """Oldest first."""
    task_record: TaskRecord = TaskRecord()
    prefixes: PrefixRecord = PrefixRecord()
    branch_debt: float = 0.0
    """Tokens that were sampled for continuations beyond their budget."""
    best_step: int | None = None
    """Step with the highest held-out reward; 0 is the model before training."""
    best_reward: float | None = None
    kept_step: int | None = None
    """Checkpoint that is kept because the run collapsed after it."""
    pools: dict[str, tuple[PooledVersion, ...]] = {}
    """By policy that plays earlier versions, those that it may play; their checkpoints are kept."""


class Learner(Protocol):
    """Trains policies. The calls about one policy are carried out in the order in which they are made."""

    async def restore(self, policy: str) -> TrainerState:
        """Restore the newest checkpoint that is whole; return the first state if there is no checkpoint."""

    async def start_step(self, policy: str, step: int) -> float:
        """Begin a step of the run; return its learning rate."""

    async def evaluate(self, policy: str, samples: Sequence[Sample]) -> SampleEvaluation:
        """Compute what the credit of samples needs."""

    async def logprobs(self, policy: str, samples: Sequence[Sample], reference: bool = False) -> list[Logprobs]:
        """Compute the logprobs of samples, under the model that training started with if `reference`."""

    async def divergence(self, policy: str, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> float:
        """Estimate the KL divergence of the policy from one that sampled with these logprobs, in nats a token."""

    async def accumulate_part(self, policy: str, part: Update) -> None:
        """Accumulate the gradient of some samples of the next update."""

    async def accumulate(self, policy: str, update: Update) -> UpdateMetrics:
        """Accumulate the gradient of an update: of its samples, and of its parts before."""

    async def apply(self, policy: str) -> None:
        """Make an optimiser step with the gradient of the last update, which writes the parameters."""

    def weights(self, policy: str) -> ModelWeights:
        """Return the present weights, to be published to an engine."""

    async def save(self, policy: str, state: TrainerState) -> None:
        """Copy what a checkpoint holds, for `finish_save`; the one before must be finished.

        Without memory for a copy it is written here. Raises an `OSError` if the disk is full then.
        """

    async def finish_save(self, policy: str) -> None:
        """Write the checkpoint that was copied, while training goes on; it is then complete on the disk.

        Raises an `OSError` if the disk is full; the copy is kept, to be written by another call.
        """

    async def version_of(self, policy: str, step: int) -> int:
        """Return the version of the weights of a checkpoint. Raises a `TrainingError` if it is damaged."""

    async def load(self, policy: str, step: int) -> None:
        """Replace the weights by those of a checkpoint, of step 0 by those that training started with."""

    async def free_memory(self) -> None:
        """Give memory that is not in use back to the device, for an engine that wakes up there."""
