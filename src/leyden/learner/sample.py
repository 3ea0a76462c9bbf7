"""A sample: one call to train on, as the learner gets it."""

from collections.abc import Sequence

from msgspec import Struct


class Sample(Struct, frozen=True, kw_only=True):
    """One call to train on: its tokens, its advantage, and the weight of each of its tokens in the loss."""

    call: str
    rollout: int
    """Index of its rollout among those of the update."""
    call_index: int
    """Index of the call in its rollout."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    token_indices: Sequence[int]
    """Indices in the completion of the tokens that are trained on; the others are context."""
    sampler_logprobs: tuple[float, ...]
    """Logprobs of those tokens when they were sampled, under the model without a grammar's constraint."""
    temperature: float
    """Above 0: that at which `sampler_logprobs` were computed."""
    advantage: float = 0.0
    weight: float = 0.0
    target: float = 0.0
    """The value that the critic learns for the state before the call."""
    old_value: float = 0.0
    """The critic's value of that state at the start of the step."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)
