"""The policy under training: what it says of rows, gradients, and optimiser updates.

However the rows are divided into batches, the gradient is the same: weights are those of the whole update.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from math import isfinite
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.config import AdapterConfig, TrainingConfig
from leyden.rl.pack import Cost
from leyden.rl.statistics import Statistics
from leyden.trainer.batch.microbatch import lay_rows, lay_trees
from leyden.trainer.batch.samples import Sample
from leyden.trainer.errors import TrainingError
from leyden.trainer.policy.critic import Critic
from leyden.trainer.policy.forward import PolicyForward
from leyden.trainer.policy.lr_schedule import factor
from leyden.trainer.policy.master_weights import MasterWeights
from leyden.trainer.policy.objective import Objective, OldLogprobs, critic_loss, total
from leyden.trainer.policy.tree_attention import BLOCK, TreeMasks

if TYPE_CHECKING:
    from leyden.trainer.policy.lora import LoraAdapter

_CPU_BATCH = 2048
"""Tokens at once on a CPU: more do not fit its caches, and take longer each."""
_SHEET = 64.0
"""Tokens that could be computed in the time that a batch more takes to start."""
_CPU_TREE, _GPU_TREE = 1.4, 1.25
"""What a token takes in a tree, where it takes 1 in a line: its attention is fast, but not the fastest."""
_CRITIC = "critic."


class UpdateMetrics(Struct, frozen=True):
    """What an update looked like."""

    loss: float
    grad_norm: float
    tokens: int
    """Whose loss was computed."""
    computed: int
    """That went through the model for it, prompts and all."""
    statistics: dict[str, float]
    """See `leyden.rl.statistics`."""
    critic_loss: float | None = None


class PolicyUpdate:
    """An optimiser step that is about to be made: the weights that an engine is to serve next."""

    def __init__(self, policy: "Policy", grad_norm: float) -> None:
        self._policy, self._grad_norm = policy, grad_norm

    def apply(self) -> None:
        """Make the optimiser step."""
        self._policy.apply(self._grad_norm)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the model that is served, after `apply`."""
        return ((name, parameter.detach()) for name, parameter in self._policy.served.named_parameters())


class Policy:
    """A model and its optimiser. One thread uses it at a time."""

    def __init__(
        self, model: PreTrainedModel, config: TrainingConfig, critic: bool = False, reference: bool = False
    ) -> None:
        self.served = model
        """The model that samples: that which is trained, or with LoRA one that has what was learnt merged into it."""
        self.adapter = _adapter(model, config.lora) if config.lora is not None else None
        self.model = self.adapter.model if self.adapter is not None else model
        self.critic = Critic(model.config.get_text_config().hidden_size, model.device, model.dtype) if critic else None
        self._config = config
        self.masters = MasterWeights({name: each for name, each in self.model.named_parameters() if each.requires_grad})
        self.trained = self.masters.by_name
        self.optimiser = AdamW(
            self.trained.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=model.device.type == "cuda",
        )
        if self.critic is not None:
            self.optimiser.add_param_group({"params": list(self.critic.parameters())})
        self.step = 1
        """Of the run, which the learning rate goes by."""
        self.unfit = TreeMasks.fit(self.model) if config.layout == "tree" else None
        """Why rows are not laid as trees although they should be."""
        on_cpu = model.device.type == "cpu"
        trees = config.layout == "tree" and self.unfit is None
        masks = TreeMasks(self.model) if trees else None
        self._lay = lay_trees if trees else lay_rows
        if on_cpu:
            self._cost = Cost(min(config.batch_tokens, _CPU_BATCH), _SHEET, _CPU_TREE)
        else:
            self._cost = Cost(config.batch_tokens, _SHEET, _GPU_TREE, BLOCK)
        self._forward = PolicyForward(self.model, masks)
        self._reference = None
        if reference and self.adapter is not None:
            self._reference = self._forward  # with its adapters aside
        elif reference:
            self._reference = PolicyForward(deepcopy(self.model).requires_grad_(False), masks)
        if config.gradient_checkpointing:
            _checkpoint(self.model)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Everything that is trained, by name."""
        critic = self.critic.named_parameters() if self.critic is not None else ()
        return self.trained | {f"{_CRITIC}{name}": parameter for name, parameter in critic}

    @property
    def beside(self) -> Mapping[str, Tensor]:
        """What is trained and is not in the model that is served."""
        return {name: each for name, each in self.parameters.items() if self.adapter or name.startswith(_CRITIC)}

    def weights(self) -> dict[str, Tensor]:
        """The state of the model that is served, in the precision of the master weights."""
        state = self.served.state_dict()
        return state if self.adapter is not None else self.masters.replace_in(state)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `weights` returned."""
        self.served.load_state_dict(state)
        if self.adapter is None:
            self.masters.load(state)

    @property
    def learning_rate(self) -> float:
        """Of this step."""
        return self._config.learning_rate * factor(self._config, self.step)

    def logprobs(self, rows: Sequence[Sample]) -> list[Tensor]:
        """Of each sampled token of each row, temperature applied."""
        return [logprobs for logprobs, _ in self._look(rows, self._forward)]

    def reference_logprobs(self, rows: Sequence[Sample]) -> list[Tensor]:
        """Those of the model that training began with, where the policy was asked to keep it."""
        assert self._reference is not None
        with self.adapter.aside() if self.adapter is not None else nullcontext():
            return [logprobs for logprobs, _ in self._look(rows, self._reference)]

    def values(self, rows: Sequence[Sample]) -> list[float]:
        """What the critic makes of the state of each row."""
        return [value for _, value in self._look(rows, self._forward, self.critic)]

    @torch.no_grad()
    def _look(
        self, rows: Sequence[Sample], model: PolicyForward, critic: Critic | None = None
    ) -> list[tuple[Tensor, float]]:
        found: dict[int, tuple[Tensor, float]] = {}
        for sheet in self._lay(rows, self._cost):
            read = model(sheet, critic)
            logprobs = read.logprobs.split([len(rows[index].chosen) for index in sheet.rows])
            values = [0.0] * len(sheet.rows) if read.values is None else read.values.tolist()
            found.update(zip(sheet.rows, zip(logprobs, values, strict=True), strict=True))
        return [found[index] for index in range(len(rows))]

    def accumulate(self, rows: Sequence[Sample], before: OldLogprobs, objective: Objective) -> UpdateMetrics:
        """Add the gradient of an update's rows."""
        losses, critic_losses, all_seen = [], [], []
        computed = 0
        for sheet in self._lay(rows, self._cost):  # nothing here waits for the device, which has its next batch in time
            some = [rows[index] for index in sheet.rows]
            read = self._forward(sheet, self.critic, objective.entropy_weight > 0)
            loss, seen = total(objective, some, read, before.of(sheet.rows))
            losses.append(loss.detach())
            all_seen.append(seen)
            if read.values is not None:
                off = critic_loss(some, read.values, len(rows))
                critic_losses.append(off.detach())
                loss = loss + off
            loss.backward()
            computed += sheet.computed
        statistics = Statistics()
        for seen in all_seen:
            statistics.add(seen.tokens, seen.sampler, seen.turn, seen.figures, seen.entropies)
        return UpdateMetrics(
            loss=torch.stack(losses).sum().item(),
            grad_norm=torch.nn.utils.get_total_norm(
                [p.grad for p in self.trained.values() if p.grad is not None]
            ).item(),
            tokens=sum(len(row.chosen) for row in rows),
            computed=computed,
            statistics=statistics.finish(),
            critic_loss=torch.stack(critic_losses).sum().item() if critic_losses else None,
        )

    def apply(self, grad_norm: float) -> None:
        """Move the weights by the gradient that was accumulated, its norm bounded; never by one that is no number."""
        norms = {"policy": grad_norm}
        torch.nn.utils.clip_grads_with_norm_(self.trained.values(), self._config.clip_norm, torch.tensor(grad_norm))
        if self.critic is not None:
            found = torch.nn.utils.clip_grad_norm_(self.critic.parameters(), self._config.clip_norm)
            norms["critic"] = found.item()
        for whose, norm in norms.items():
            if not isfinite(norm):
                raise TrainingError(_no_number(self.step, whose, norm))
        share = factor(self._config, self.step)
        rates = (self._config.learning_rate, self._config.critic_learning_rate)
        for group, rate in zip(self.optimiser.param_groups, rates, strict=False):
            group["lr"] = share * rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.masters.write_back()
        if self.adapter is not None:
            self.adapter.publish()


def _no_number(step: int, whose: str, norm: float) -> str:
    return (
        f"step {step}: the gradient of the {whose} is not a number (its norm is {norm}), and the weights stay as they "
        'were: lower `training.learning_rate`, take `engine.dtype = "float32"`, or look for rewards that are huge'
    )


def _adapter(model: PreTrainedModel, config: AdapterConfig) -> "LoraAdapter":
    from leyden.trainer.policy.lora import LoraAdapter  # peft takes a while to import, and few need it

    return LoraAdapter(model, config)


def _checkpoint(model: PreTrainedModel) -> None:
    """Keep what goes into each layer, and compute the rest again: the layers do so in training, but without dropout."""
    model.gradient_checkpointing_enable()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
