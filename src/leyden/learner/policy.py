"""The policy under training: logprobs of samples, gradients, and optimiser updates.

The gradient does not depend on how samples are divided into micro-batches: weights are those of the whole update.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from leyden.config import AdapterConfig, TrainingConfig
from leyden.engine.protocol import LoraWeights
from leyden.learner.compilation import compile_layers
from leyden.learner.critic import Critic
from leyden.learner.errors import OutOfDeviceMemory, TrainingError
from leyden.learner.forward import PolicyForward
from leyden.learner.gradient_checkpointing import GradientCheckpointing
from leyden.learner.learning_rate import default_learning_rate, learning_rate_factor
from leyden.learner.master_weights import MasterWeights
from leyden.learner.microbatch import sequence_microbatches, tree_microbatches
from leyden.learner.objective import Objective, compute_loss, critic_loss
from leyden.learner.offloaded_weights import OffloadedWeights
from leyden.learner.peers import ALONE, Peers
from leyden.learner.protocol import OldLogprobs, UpdateMetrics
from leyden.learner.sample import Sample
from leyden.learner.tree_attention import BLOCK, TreeMasks
from leyden.rl.pack import Cost
from leyden.rl.statistics import Statistics

if TYPE_CHECKING:
    from leyden.learner.lora import LoraAdapter

_CPU_BATCH = 2048
"""Tokens of a micro-batch on a CPU: more do not fit its caches, and each token takes longer."""
_MICROBATCH_OVERHEAD = 64.0
"""The cost of starting a micro-batch, in tokens."""
_CPU_TREE, _GPU_TREE = 1.4, 1.25
"""The cost of a token in a tree, relative to one in a plain sequence, whose attention is faster."""
_CRITIC = "critic."


class PolicyOutputs(NamedTuple):
    """What a policy computes of samples, sample by sample."""

    logprobs: list[Tensor]
    """Of each sampled token, temperature applied."""
    values: list[float]
    """The critic's value of the state before the call; 0 without a critic."""


class CurrentWeights:
    """The weights of a policy as they are, to be published to an engine."""

    def __init__(self, policy: "Policy") -> None:
        self._policy = policy

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model that is served."""
        return self._policy.served_tensors()

    def adapter(self) -> LoraWeights | None:
        """Return the LoRA adapter, if the policy has one."""
        return self._policy.adapter_weights()


class Policy:
    """A model and its optimiser. One thread uses it at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainingConfig,
        critic: bool = False,
        reference: bool = False,
        peers: Peers = ALONE,
        beside: "Policy | None" = None,
    ) -> None:
        """`peers` compute with it: each then has a part of every parameter.

        `beside` is a policy of the same model: if both have LoRA adapters, they share the weights beside these.
        """
        self.served = model
        """The model that samples: the trained one, or with LoRA a copy with the adapters merged."""
        shared = beside.adapter if beside is not None and config.lora is not None else None
        self.shares_base = shared is not None
        """Whether another policy has the weights beside its adapters."""
        self.adapter: LoraAdapter | None = None
        if config.lora is not None:
            self.adapter = _adapter(model, config.lora, peers.copies, shared)
        self.model = self.adapter.model if self.adapter is not None else model
        self.critic = Critic(model.config.get_text_config().hidden_size, model.device, model.dtype) if critic else None
        self._config, self._peers = config, peers
        self.peak_learning_rate = config.learning_rate or default_learning_rate(
            model.num_parameters(), config.lora is not None
        )
        """The learning rate after the warm-up."""
        self.no_trees_reason = TreeMasks.fit(self.model) if config.layout == "tree" else None
        """Why samples are not laid out as trees although the configuration selects trees."""
        trees = config.layout == "tree" and self.no_trees_reason is None
        masks = TreeMasks(self.model) if trees else None
        self._microbatches = tree_microbatches if trees else sequence_microbatches
        self._forward = PolicyForward(self.model, masks)
        self._reference = None
        if reference and self.adapter is not None:
            self._reference = self._forward  # with its adapters disabled
        elif reference:
            self._reference = PolicyForward(deepcopy(self.model).requires_grad_(False), masks)
        for forward in {self._forward: None, self._reference: None}:
            if forward is not None:
                peers.shard(forward)
                forward.find_head(torch.arange(4, device=model.device)[None])
        if self.critic is not None:
            peers.shard(self.critic)
        computed = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        offloads = config.offload == "optimiser"
        self.masters = OffloadedWeights(computed) if offloads else MasterWeights(computed)
        self.trained = self.masters.by_name
        device = self.model.device
        self.optimiser = AdamW(
            self.trained.values(),
            lr=self.peak_learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=offloads or device.type == "cuda",
        )
        if self.critic is not None:
            self.optimiser.add_param_group({"params": list(self.critic.parameters())})
        self.step = 1
        """Step of the run, which determines the learning rate."""
        self._parts: list[_UpdatePart] = []
        """Of the update whose gradient is being accumulated."""
        if device.type == "cpu":
            self._cost = Cost(min(config.batch_tokens, _CPU_BATCH), _MICROBATCH_OVERHEAD, _CPU_TREE)
        else:
            self._cost = Cost(config.batch_tokens, _MICROBATCH_OVERHEAD, _GPU_TREE, BLOCK)
        self._checkpointing = GradientCheckpointing(self.model)
        if config.compile and device.type != "cpu":
            compile_layers(self.model)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """All trained parameters, by name."""
        critic = self.critic.named_parameters() if self.critic is not None else ()
        return self.trained | {f"{_CRITIC}{name}": parameter for name, parameter in critic}

    @property
    def extra_parameters(self) -> Mapping[str, Tensor]:
        """Trained parameters that are not in the served model: LoRA matrices, a critic."""
        return {name: each for name, each in self.parameters.items() if self.adapter or name.startswith(_CRITIC)}

    @property
    def has_reference(self) -> bool:
        """Whether it keeps the model that training started with."""
        return self._reference is not None

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of the model that is served, by name."""
        return ((name, parameter.detach()) for name, parameter in self.served.named_parameters())

    def adapter_weights(self) -> LoraWeights | None:
        """Return the LoRA adapter, if it has one."""
        return self.adapter.weights() if self.adapter is not None else None

    def weights(self) -> dict[str, Tensor]:
        """Return the state of the model, in the precision of the master weights; with LoRA as it is served, merged."""
        state = self.served.state_dict()
        return state if self.adapter is not None else self.masters.replace_in(state)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `weights` returned."""
        self.served.load_state_dict(state)
        if self.adapter is None:
            self.masters.load(state)

    def load_initial_weights(self, state: Mapping[str, Tensor]) -> None:
        """Restore the model that training started with, whose state is given."""
        self.load_weights(state)
        if self.adapter is not None:
            self.adapter.clear()

    @property
    def learning_rate(self) -> float:
        """The learning rate of this step."""
        return self.peak_learning_rate * learning_rate_factor(self._config, self.step)

    def evaluate(self, samples: Sequence[Sample]) -> PolicyOutputs:
        """Compute the logprobs of each sample, and with a critic the value of its state."""
        return self._evaluate(samples, self._forward, self.critic)

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Compute the logprob of each sampled token of each sample, temperature applied."""
        return self._evaluate(samples, self._forward).logprobs

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Compute logprobs under the model that training started with; needs `reference=True`."""
        assert self._reference is not None
        with self.adapter.disabled() if self.adapter is not None else nullcontext():
            return self._evaluate(samples, self._reference).logprobs

    @torch.no_grad()
    def _evaluate(self, samples: Sequence[Sample], model: PolicyForward, critic: Critic | None = None) -> PolicyOutputs:
        found: dict[int, tuple[Tensor, float]] = {}
        with self._explain_out_of_memory():
            for microbatch in self._peers.level(self._microbatches(samples, self._cost)):
                output = model(microbatch, critic)
                logprobs = output.logprobs.split([len(samples[index].token_indices) for index in microbatch.samples])
                values = [0.0] * len(microbatch.samples) if output.values is None else output.values.tolist()
                found.update(zip(microbatch.samples, zip(logprobs, values, strict=True), strict=True))
        ordered = [found[index] for index in range(len(samples))]
        return PolicyOutputs([logprobs for logprobs, _ in ordered], [value for _, value in ordered])

    def accumulate(
        self, samples: Sequence[Sample], old_logprobs: OldLogprobs, objective: Objective, scale: float = 1.0
    ) -> UpdateMetrics:
        """Accumulate the gradient of an update: of samples, and of its parts before; `scale` multiplies all."""
        self.accumulate_part(samples, old_logprobs, objective)
        parts, self._parts = [one for some in self._peers.gather(self._parts) for one in some], []
        if scale != 1:
            torch._foreach_mul_(self.masters.gradients, scale)
        return _join(parts, scale, self._peers.norm(self.masters.gradients), self.critic is not None)

    def accumulate_part(self, samples: Sequence[Sample], old_logprobs: OldLogprobs, objective: Objective) -> None:
        """Accumulate the gradient of some samples of an update."""
        losses, critic_losses, all_stats = [], [], []
        computed, count = 0, sum(self._peers.gather(len(samples)))
        with self._explain_out_of_memory():
            # results are read after the last
            for microbatch in self._peers.level(self._microbatches(samples, self._cost)):
                some = [samples[index] for index in microbatch.samples]
                too_long = microbatch.computed > self._config.batch_tokens  # one sample may be
                with self._checkpointing.enabled(self._config.gradient_checkpointing or too_long):
                    output = self._forward(microbatch, self.critic, objective.entropy_weight > 0)
                if some:
                    loss, stats = compute_loss(objective, some, output, old_logprobs.select(microbatch.samples))
                    losses.append(loss.detach())
                    all_stats.append(stats)
                else:
                    loss = output.logprobs.sum()  # of none
                if output.values is not None:
                    value_loss = critic_loss(objective, some, output.values, count)
                    critic_losses.append(value_loss.detach())
                    loss = loss + value_loss
                loss.backward()
                computed += microbatch.computed
        statistics = Statistics()
        for stats in all_stats:
            statistics.add(stats.tokens, stats.sampler_logprobs, stats.call_index, stats.metrics, stats.entropies)
        self._parts.append(
            _UpdatePart(
                loss=torch.stack(losses).sum().item() if losses else 0.0,
                critic_loss=torch.stack(critic_losses).sum().item() if critic_losses else 0.0,
                tokens=sum(len(sample.token_indices) for sample in samples),
                computed=computed,
                length=sum(map(len, samples)),
                statistics=statistics,
            )
        )

    @contextmanager
    def _explain_out_of_memory(self) -> Iterator[None]:
        """Raise an `OutOfDeviceMemory` if a GPU has no memory left for a micro-batch."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"step {self.step}: the GPU has no memory left for a micro-batch: lower `training.batch_tokens` (now "
                f"{self._config.batch_tokens}) or `engine.memory`, set `training.gradient_checkpointing = true`, "
                f'`training.offload = "optimiser"` or `training.lora`, or take a smaller model '
                f"({str(error).partition(chr(10))[0]})"
            ) from error

    def apply(self, grad_norm: float) -> None:
        """Make an optimiser step with the accumulated gradient, its norm clipped; raise if it is not finite."""
        gradients = {"policy": self.masters.gradients}
        norms = {"policy": grad_norm}
        if self.critic is not None:
            gradients["critic"] = [each.grad for each in self.critic.parameters() if each.grad is not None]
            norms["critic"] = self._peers.norm(gradients["critic"])
        for whose, norm in norms.items():
            if not isfinite(norm):
                raise TrainingError(_not_finite(self.step, whose, norm))
            if norm > self._config.clip_norm:
                clipped = self._config.clip_norm / (torch.tensor(norm) + 1e-6)  # as torch clips parameters
                torch._foreach_mul_(gradients[whose], clipped.item())
        factor = learning_rate_factor(self._config, self.step)
        rates = (self.peak_learning_rate, self._config.critic_learning_rate)
        for group, rate in zip(self.optimiser.param_groups, rates, strict=False):
            group["lr"] = factor * rate
        self.masters.step(self.optimiser)
        if self.adapter is not None:
            self.adapter.publish()


class _UpdatePart(NamedTuple):
    """What one process has computed of a part of an update."""

    loss: float
    critic_loss: float
    tokens: int
    computed: int
    length: int
    """Tokens of its samples."""
    statistics: Statistics


def _join(parts: Sequence[_UpdatePart], scale: float, grad_norm: float, critic: bool) -> UpdateMetrics:
    computed = sum(part.computed for part in parts)
    return UpdateMetrics(
        loss=scale * sum(part.loss for part in parts),
        grad_norm=grad_norm,
        tokens=sum(part.tokens for part in parts),
        computed=computed,
        saved=sum(part.length for part in parts) - computed,
        statistics=Statistics.joined([part.statistics for part in parts]).finish(),
        critic_loss=sum(part.critic_loss for part in parts) if critic else None,
    )


def _not_finite(step: int, whose: str, norm: float) -> str:
    return (
        f"step {step}: the gradient of the {whose} is not a number (its norm is {norm}); the weights are unchanged: "
        'lower `training.learning_rate`, set `engine.dtype = "float32"`, or look for very large rewards'
    )


def _adapter(
    model: PreTrainedModel, config: AdapterConfig, merged: bool, beside: "LoraAdapter | None"
) -> "LoraAdapter":
    from leyden.learner.lora import LoraAdapter  # peft takes a while to import, and few need it

    return LoraAdapter(model, config, merged, beside)
