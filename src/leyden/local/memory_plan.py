"""Divides the memory of one GPU between the trainer and the engines, or plans the memory of GPUs that only train.

The plan is computed and printed before anything starts; a plan that cannot work raises a one-line `ConfigError`.
"""

from collections.abc import Sequence

import torch
from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config, ConfigError
from leyden.learner.memory import memory_for_training

_GIB = 2**30
_LOGITS_BYTES = 4 * _GIB
"""A chunk of logits, its gradient, and temporaries."""
_RESERVE_BYTES = 4 * _GIB
"""For CUDA contexts, fragmentation and whatever else is on the device."""
_CONTEXT_BYTES = _GIB
"""The CUDA context of this process is smaller; the reserve has room for it."""
_MAX_ENGINE_SHARE, _MIN_ENGINE_SHARE = 0.6, 0.1
"""More than the larger share of the device does not make sampling faster; less than the smaller makes it slow."""
_MIN_SLOT_TOKENS = 1024
"""The embedded engine has at least this many tokens of KV cache for each of its requests."""
_ASLEEP_BYTES = 3 * _GIB
"""What a sleeping vLLM keeps beyond the reserve, such as its CUDA graphs."""


class PlannedPolicy(Struct, frozen=True):
    """A policy that takes memory."""

    config: Config
    model: PreTrainedModel
    training: bool = False
    reference: bool = False
    """Whether it keeps the model that training started with."""
    shares_base: bool = False
    """Whether its adapters are over the weights of another policy, which counts these weights."""

    @property
    def weights(self) -> int:
        """The bytes of its model."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def held(self) -> tuple[int, int]:
        """The bytes that it always has on the device, and those on the host."""
        if not self.training:
            return self.weights * (not self.shares_base), 0
        dtype, training = str(self.model.dtype).removeprefix("torch."), self.config.training
        needed = memory_for_training(self.model, dtype, training, self.reference)
        host = needed.host if training.offload == "optimiser" else 0
        return needed.device - self.weights * self.shares_base, host


class EngineProcesses(Struct, frozen=True):
    """Embedded engines that share the device with training as processes."""

    count: int
    """Of each engine."""
    nbytes: tuple[int, ...]
    """What one of each engine takes beside its KV cache."""
    share_copy: bool
    """Whether they take weights from a copy that the trainer keeps on the device."""


class MemoryPlan(Struct, frozen=True):
    """Bytes of one GPU, by use."""

    device: int
    training: int
    """Weights, master weights, gradients, optimiser state."""
    activations: int
    engine: int
    """Weights and KV caches of all engines."""
    weights: tuple[int, ...]
    """Of each engine, with what its processes take beyond KV caches."""
    others: int = 0
    """In use by other processes."""
    engine_sleeps: bool = False
    """Whether the engine must free its memory while the policy is trained."""
    host: int = 0
    """Of the host, for what training does not keep on the GPU."""

    @property
    def kv_cache(self) -> int:
        """The bytes of an engine's KV cache; engines have equal ones."""
        return (self.engine - sum(self.weights)) // len(self.weights)

    def engine_share(self, number: int = 0) -> float:
        """Return the part of the device that an engine has."""
        return (self.weights[number] + self.kv_cache) / self.device

    @property
    def trainer_share(self) -> float:
        """The part of the device that the trainer may take beside engines in other processes."""
        beside = _ASLEEP_BYTES if self.engine_sleeps else self.engine
        return (self.device - beside - self.others - _RESERVE_BYTES) / self.device

    def __str__(self) -> str:
        engine = "engine" if len(self.weights) == 1 else f"{len(self.weights)} engines"
        engine += " (asleep during training)" if self.engine_sleeps else ""
        parts = {"training": self.training, "activations": self.activations}
        if self.engine:
            parts[engine] = self.engine
        parts["reserve"] = _RESERVE_BYTES
        if self.others:
            parts["other processes"] = self.others
        listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
        host = f"; {self.host / _GIB:.1f} in host memory" if self.host else ""
        return f"memory: {listed} of {self.device / _GIB:.0f} GiB{host}"


def plan_memory(
    engines: Sequence[Sequence[PlannedPolicy]],
    device: int,
    others: int = 0,
    slots: int | None = None,
    processes: EngineProcesses | None = None,
) -> MemoryPlan:
    """Divide a device of so many bytes, of which other processes use some, for the policies of each engine.

    Policies are trained one after the other, so they have the same room for activations. vLLM sleeps during training if
    it would have too little memory beside it, or less than `engine.memory`; not beside agents that go on
    (`training.max_staleness`), nor if there are several policies, whose turns would put it to sleep again and again.
    With `slots`, each engine is an embedded one with so many requests, which cannot sleep; it is a part of the training
    process, or `processes` of its own.
    Raises `ConfigError` if it does not fit.
    """
    others = _of_others(others)
    policies = [policy for engine in engines for policy in engine]
    config, trained = policies[0].config, [policy for policy in policies if policy.training]
    needed, activations, host = _needs(policies)
    weights = tuple(engine[0].weights for engine in engines)
    if slots is not None and processes is not None:
        needed += sum(weights) * processes.share_copy
        weights, slots = tuple(processes.count * size for size in processes.nbytes), processes.count * slots
    free = device - others - needed - _RESERVE_BYTES
    beside, alone = free - activations, free if activations + _ASLEEP_BYTES <= free else 0
    used = f"other processes use {others / _GIB:.1f}, " if others else ""
    used = f"of {device / _GIB:.0f} GiB {used}training takes {(needed + activations) / _GIB:.1f}"
    least = sum(_least_bytes(engine[0].model, size, slots) for engine, size in zip(engines, weights, strict=True))
    share, several = config.engine.memory, len(policies) > 1
    may_sleep = slots is None and not several and alone > beside
    sleeps = may_sleep and beside < max(least, int((share or _MIN_ENGINE_SHARE) * device))
    left = alone if sleeps else beside
    engine_bytes = min(left, int((share or _MAX_ENGINE_SHARE) * device))
    its_engine = "the engine" if len(engines) == 1 else f"{len(engines)} engines"
    if share is not None and engine_bytes < int(share * device):
        raise ConfigError(
            f"`engine.memory`: {used}, which leaves a share of {max(left, 0) / device:.2f} for {its_engine}: "
            "set it to that at most, or leave it out"
        )
    if left < least:
        ways = [_savings(config)]
        if len(engines) > 1:
            ways.append("name one `model` for all `policies`, with `lora`, so that one vLLM serves them")
        ways.append('take `engine.kind = "torch"`' if slots is None else "lower `engine.slots`")
        raise ConfigError(
            f"`model`: {used} and {its_engine} at least {least / _GIB:.1f}: {', '.join(ways)}, or a smaller model"
        )
    beside_agents = {"early_gradient": config.training.early_gradient, "max_staleness": config.training.max_staleness}
    for key in (key for key, is_set in beside_agents.items() if is_set and sleeps and trained):
        raise ConfigError(
            f"`training.{key}`: {used}, so the engine must sleep while weights are trained, and agents "
            "cannot go on: leave it out, or lower `engine.memory` or `training.batch_tokens`"
        )
    return MemoryPlan(device, needed, activations, engine_bytes, weights, others, sleeps, host)


def plan_training(policies: Sequence[PlannedPolicy], device: int, others: int = 0) -> MemoryPlan:
    """Plan each of the devices that train while engines have others. Raises `ConfigError` if it does not fit.

    A device has so many bytes, of which other processes use some.
    """
    others, config = _of_others(others), policies[0].config
    needed, activations, host = _needs(policies)
    if needed + activations + others + _RESERVE_BYTES > device:
        used = f"other processes use {others / _GIB:.1f}, " if others else ""
        raise ConfigError(
            f"`model`: of {device / _GIB:.0f} GiB {used}training takes {(needed + activations) / _GIB:.1f} on each of "
            f"{config.training.devices} devices: {_savings(config)}, raise `training.devices`, or take a smaller model"
        )
    return MemoryPlan(device, needed, activations, 0, (), others, host=host)


def _of_others(measured: int) -> int:
    """Return what other processes use: what this process has outside of torch's allocator is measured too."""
    return 0 if measured < _CONTEXT_BYTES else measured


def _needs(policies: Sequence[PlannedPolicy]) -> tuple[int, int, int]:
    """Return the bytes of weights and optimisers on a device, of activations, and of optimisers on the host."""
    held = [policy.held for policy in policies]
    activations = [_activation_bytes(one.model, one.config) + _LOGITS_BYTES for one in policies if one.training]
    return sum(on_device for on_device, _ in held), max(activations, default=0), sum(on_host for _, on_host in held)


def _savings(config: Config) -> str:
    """Return which keys make training take less memory."""
    offload = '`training.offload = "optimiser"` or ' if config.training.devices == 1 else ""
    return f"lower `training.batch_tokens`, set `training.gradient_checkpointing = true`, {offload}`training.lora`"


def _least_bytes(model: PreTrainedModel, weights: int, slots: int | None) -> int:
    """Return the bytes that an engine needs at least: its weights, and the keys and values of some tokens."""
    context = int(model.config.get_text_config().max_position_embeddings)
    return weights + _kv_bytes(model) * (context if slots is None else slots * _MIN_SLOT_TOKENS)


def _activation_bytes(model: PreTrainedModel, config: Config) -> int:
    """Return the bytes that the layers keep of a micro-batch for the backward pass.

    For each token that is five tensors of the MLP's width and ten of the model's in the precision of the model, and
    five of the norms in float32. With gradient checkpointing it is the input of each layer. On an H200 the trainer of a
    Qwen2.5 with 1.8 billion parameters peaked at 64 GiB with 8,192 tokens, where this gives 66.
    """
    text, size = model.config.get_text_config(), torch.finfo(model.dtype).bits // 8
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    per_token = size * hidden
    if not config.training.gradient_checkpointing:
        per_token = size * (5 * inner + 10 * hidden) + 4 * 5 * hidden
    return int(text.num_hidden_layers * config.training.batch_tokens * per_token)


def _kv_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values of one token."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * torch.finfo(model.dtype).bits // 8)
