"""The policy under training: logprobs of rows, gradients, and optimiser updates.

However the rows are divided into batches, the gradient is the same: weights are those of the whole update.
"""

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from leyden.config import TrainingConfig
from leyden.rl.loss import Clip, Loss
from leyden.trainer.batch import Row
from leyden.trainer.layout import Sheet, lay_rows, lay_trees
from leyden.trainer.schedule import factor

_CPU_BATCH = 2048
"""Tokens at once on a CPU: more do not fit its caches, and take longer each."""
_CPU_ATTENTION = 3
"""How much longer a CPU takes for an operation of masked attention than for one of a matrix product."""


class Figures(Struct, frozen=True):
    """What an update looked like. Those of tokens are means over tokens."""

    loss: float
    grad_norm: float
    entropy: float
    clipped: float
    drift: float
    """KL of the policy as it was at the start of the step from the one that sampled, by the k3 estimate."""
    tokens: int
    """Whose loss was computed."""
    computed: int
    """That went through the model for it, prompts and all."""


class Policy:
    """A model and its optimiser. One thread uses it at a time."""

    def __init__(self, model: PreTrainedModel, config: TrainingConfig) -> None:
        self.model = model
        self._config = config
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimiser = AdamW(
            self._trained, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        self.updates = 0
        """How many the weights have had."""
        self.layout = config.layout if _sees_all(model) else "rows"
        """How rows are laid: not as trees where a token may not see all that came before it."""
        self._lay = lay_trees if self.layout == "tree" else lay_rows
        on_cpu = model.device.type == "cpu"
        self._most = min(config.batch_tokens, _CPU_BATCH) if on_cpu else config.batch_tokens
        self._square = _square(model) / (_CPU_ATTENTION if on_cpu else 1)
        self._head: Any = model.get_output_embeddings()
        self._plain_head = not any(
            getattr(model.config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        )

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self._config.learning_rate * factor(self._config, self.updates)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """Of each completion token of each row, temperature applied."""
        found: dict[int, Tensor] = {}
        for sheet in self._lay(rows, self._most, self._square):
            some = [rows[index] for index in sheet.rows]
            current, _ = self._forward(sheet, some)
            found.update(zip(sheet.rows, current.split([len(row.completion_ids) for row in some]), strict=True))
        return [found[index] for index in range(len(rows))]

    def accumulate(self, rows: Sequence[Row], proximal: Sequence[Tensor] | None, loss: Loss, clip: Clip) -> Figures:
        """Add the gradient of rows. Without `proximal` the policy has not moved since the step began."""
        totals = dict.fromkeys(("loss", "entropy", "clipped", "drift"), 0.0)
        tokens = computed = 0
        for sheet in self._lay(rows, self._most, self._square):
            some = [rows[index] for index in sheet.rows]
            current, entropy = self._forward(sheet, some)
            before = current.detach() if proximal is None else torch.cat([proximal[index] for index in sheet.rows])
            of_token, figures = loss(current, before, self._spread(some, "advantage"), clip)
            total = (of_token * self._spread(some, "weight")).sum()
            total.backward()
            sampler = torch.tensor([value for row in some for value in row.sampler], device=current.device)
            gap = sampler - before
            totals["loss"] += total.item()
            totals["entropy"] += entropy.item()
            totals["clipped"] += figures["clipped"].sum().item() if "clipped" in figures else 0.0
            totals["drift"] += (torch.exp(gap) - 1 - gap).sum().item()
            tokens += len(sampler)
            computed += sheet.computed
        means = {name: totals[name] / max(tokens, 1) for name in ("entropy", "clipped", "drift")}
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None]).item()
        return Figures(loss=totals["loss"], grad_norm=norm, tokens=tokens, computed=computed, **means)

    def apply(self, grad_norm: float) -> None:
        """Move the weights by the gradient that was accumulated, its norm bounded."""
        torch.nn.utils.clip_grads_with_norm_(self._trained, self._config.clip_norm, torch.tensor(grad_norm))
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate
        self.optimiser.step()
        self.updates += 1
        self.optimiser.zero_grad(set_to_none=True)

    def _forward(self, sheet: Sheet, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Logprobs of all completion tokens of rows in a row, and the sum of the entropies they were drawn with."""
        device = self.model.device
        given = {"input_ids": sheet.ids.to(device), "use_cache": False}
        if sheet.mask is not None and sheet.positions is not None:
            given |= {"attention_mask": sheet.mask.to(device), "position_ids": sheet.positions.to(device)}
        predictors = sheet.predictors.to(device)
        if self._plain_head:
            logits = self._head(self.model.base_model(**given).last_hidden_state.flatten(0, 1)[predictors])
        else:
            logits = self.model(**given).logits.flatten(0, 1)[predictors]
        logits = logits.float() / self._spread(rows, "temperature")[:, None]
        targets = torch.tensor([id for row in rows for id in row.completion_ids], device=device)
        normaliser = logits.logsumexp(-1)
        current = logits.gather(-1, targets[:, None])[:, 0] - normaliser
        with torch.no_grad():
            shifted = logits - normaliser[:, None]
            entropy = -(shifted.exp() * shifted).sum()
        return current, entropy

    def _spread(self, rows: Sequence[Row], name: str) -> Tensor:
        """A number of each row, for each of its completion tokens."""
        lengths = torch.tensor([len(row.completion_ids) for row in rows])
        values = torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32)
        return values.repeat_interleave(lengths).to(self.model.device)


def _sees_all(model: PreTrainedModel) -> bool:
    """Whether every layer attends to everything before: a tree's mask has no window, and its order is no time."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and window is None


def _square(model: PreTrainedModel) -> float:
    """How long a sequence is whose attention, every token to every other, takes as many operations as all the rest."""
    config = model.config.get_text_config()
    return 0.5 * model.num_parameters() / float(config.num_hidden_layers * config.hidden_size)
