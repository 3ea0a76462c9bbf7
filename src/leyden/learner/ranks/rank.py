"""One rank: computes what the orchestrator's process asks for, with the other ranks.

Calls that compute come over one socket and are carried out one after another; checkpoints are written for calls of
another. All ranks get the same calls. The process ends with its standard input.
"""

import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from leyden.config import ConfigError
from leyden.engine.broadcast import JOIN_LIMIT_S, Dtypes, NcclGroups, Sent
from leyden.engine.protocol import EngineError, LoraWeights
from leyden.learner.errors import TrainingError
from leyden.learner.evaluation import evaluate, to_arrays
from leyden.learner.loading import empty_model, read_model, read_model_config
from leyden.learner.moments import beside_and_moments, make_moments, read_beside, read_moments
from leyden.learner.objective import Objective, objective_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import Logprobs, SampleEvaluation, Update, UpdateMetrics
from leyden.learner.ranks.messages import MAX_FRAME, RankReply, RankSetup, World
from leyden.learner.ranks.peers import RankPeers
from leyden.learner.sample import Sample
from leyden.learner.sharded_files import WEIGHTS, is_sharded, read_shards, write_shards
from leyden.learner.snapshot import COPY_SHARE
from leyden.process.framing import read_frame_blocking, to_frame
from leyden.process.resources import free_memory, usable_cores


class Rank:
    """The methods are what can be called."""

    def __init__(self, world: World) -> None:
        self._world = world
        torch.set_num_threads(max(1, usable_cores() // world.size))
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", world.device)
            torch.cuda.set_device(device)
        self._peers = RankPeers(world, device)
        self._policy: Policy
        self._objective: Objective
        self._setup: RankSetup
        self._weights: Mapping[str, Callable[[], Tensor]]
        """The sharded weights of the served model, each computed when it is called."""
        self._base: Mapping[str, Callable[[], Tensor]]
        """Those without the LoRA adapter."""
        self._model: PreTrainedModel | None = None
        self._grad_norm = 0.0
        self._copy: dict[str, Tensor] | None = None
        # within the time in which the other ranks wait for rank 0
        self._groups = NcclGroups(min(JOIN_LIMIT_S, world.timeout_s))

    def load(self, setup: RankSetup) -> None:
        """Read the model on rank 0; on the others make one without values. Needs no other rank."""
        self._setup = setup
        config, compute = read_model_config(setup.source.folder), getattr(torch, setup.dtype)
        lora = setup.config.training.lora is not None
        stored = compute if lora else torch.promote_types(compute, torch.float32)
        self._peers.compute_dtype = None if stored == compute else compute
        torch.manual_seed(setup.config.seed)  # LoRA matrices and a critic begin at random
        if self._world.rank == 0:
            model = read_model(setup.source.folder, stored, config)
        else:
            model = empty_model(config, stored)
        self._model = model.eval()
        self._objective = objective_of(setup.config)

    def build(self) -> str | None:
        """Shard the model that was read. Returns why samples cannot be laid out as trees."""
        assert self._model is not None
        setup, model, self._model = self._setup, self._model, None
        self._policy = Policy(model, setup.config.training, setup.critic, setup.reference, self._peers)
        self._weights, self._base = self._find_weights()
        return self._policy.no_trees_reason

    def start_step(self, step: int) -> float:
        """Begin a step; return its learning rate."""
        self._policy.step = step
        return self._policy.learning_rate

    def evaluate(self, samples: Sequence[Sample]) -> SampleEvaluation:
        """Compute what the credit of samples needs; ratios are only those of the samples on this rank."""
        return evaluate(self._policy, self._objective, samples)

    def logprobs(self, reference: bool, samples: Sequence[Sample]) -> list[Logprobs]:
        """Compute the logprobs of samples."""
        return to_arrays((self._policy.reference_logprobs if reference else self._policy.logprobs)(samples))

    def accumulate_part(self, part: Update) -> None:
        """Accumulate the gradient of this rank's share of some samples of the next update."""
        self._policy.accumulate_part(part.samples, part.old_logprobs, self._objective)

    def accumulate(self, update: Update) -> UpdateMetrics:
        """Accumulate the gradient of this rank's share of an update."""
        metrics = self._policy.accumulate(update.samples, update.old_logprobs, self._objective, update.scale)
        self._grad_norm = metrics.grad_norm
        return metrics

    def apply(self) -> None:
        """Make an optimiser step."""
        self._policy.apply(self._grad_norm)

    def free_memory(self) -> None:
        """Give memory that is not in use back to the device."""
        torch.cuda.empty_cache()

    def weight_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the weights that are served, by their names."""
        return {name: list(weight().shape) for name, weight in self._base.items()}

    def weight(self, name: str, merged: bool) -> Tensor | None:
        """Gather one weight in the precision of forward passes, with LoRA or without, and return it on rank 0."""
        weights = self._weights if merged else self._base
        return self._to_rank_0(weights[name](), getattr(torch, self._setup.dtype))

    def listen(self, engine: str) -> tuple[str, int] | None:
        """Return the address of rank 0 at which the workers of an engine can join it."""
        return self._groups.listen(engine, self._world.address) if self._world.rank == 0 else None

    def join(self, engine: str, size: int) -> EngineError | None:
        """Have rank 0 make a group with the workers of an engine. Returns why it could not: the ranks go on."""
        try:
            if self._world.rank == 0:
                self._groups.join(engine, size, self._peers.device)
        except EngineError as error:
            return error
        return None

    def broadcast(self, engines: Mapping[str, Dtypes], merged: bool) -> dict[str, Sent | EngineError] | None:
        """Gather one weight after the other; rank 0 broadcasts each to all engines, and returns how that ended."""
        gathered = self._gathered(merged)
        if self._world.rank == 0:
            return self._groups.broadcast(engines, gathered)
        for _ in gathered:
            if self._peers.device.type == "cuda":  # not ahead of rank 0: limits of time count from the call
                torch.cuda.current_stream().synchronize()
        return None

    def adapter(self) -> LoraWeights | None:
        """Gather the LoRA adapter, and return it on rank 0."""
        if (found := self._policy.adapter_weights()) is None:
            return None
        whole = {name: self._to_rank_0(tensor, tensor.dtype) for name, tensor in found.tensors.items()}
        return LoraWeights(found.rank, {name: tensor for name, tensor in whole.items() if tensor is not None})

    def copy(self) -> bool:
        """Copy what a checkpoint holds to memory of its own; False if there is too little."""
        shards = self._shards()
        size = sum(_local(tensor).nbytes for tensor in shards.values())
        enough = self._world.size * size <= COPY_SHARE * free_memory()
        if all(self._peers.gather(enough)):
            self._copy = {name: tensor.to("cpu", copy=True) for name, tensor in shards.items()}
            return True
        return False

    def write(self, folder: Path) -> None:
        """Write the copy; without one, what there is now."""
        write_shards(self._shards() if self._copy is None else self._copy, folder, self._peers.files)
        self._copy = None

    def restore(self, folder: Path) -> None:
        """Restore policy and optimiser from a checkpoint of any number of devices."""
        if is_sharded(folder):
            make_moments(self._policy, folder)
            self._read(folder, moments=True)
            return
        self._send_weights(folder)
        self._policy.optimiser.state.clear()
        moments = self._read_on_rank_0(read_moments, folder)
        names = set(self._peers.gather(set(moments))[0])
        for name, parameter in self._policy.parameters.items():
            if f"{name}.step" in names:
                sent = [self._divided(moments.get(f"{name}.{key}"), parameter) for key in ("exp_avg", "exp_avg_sq")]
                step = self._peers.send(moments.get(f"{name}.step"), torch.zeros(()))
                step = step if parameter.device.type == "cuda" else step.cpu()
                self._policy.optimiser.state[parameter] = {"step": step, "exp_avg": sent[0], "exp_avg_sq": sent[1]}

    def read(self, folder: Path, initial: bool) -> None:
        """Replace the weights by those of a checkpoint, or of the model that training started with."""
        if is_sharded(folder) and not initial:
            self._read(folder, moments=False)
        else:
            self._send_weights(folder, initial)

    def _find_weights(self) -> tuple[Mapping[str, Callable[[], Tensor]], Mapping[str, Callable[[], Tensor]]]:
        """Find the weights of the served model and those without the adapter, once: a model has many modules."""
        if (adapter := self._policy.adapter) is None:
            weights = {name: parameter.detach for name, parameter in self._policy.model.named_parameters()}
            return weights, weights
        from leyden.learner.ranks.merging import merged_shards  # peft takes a while to import, and few need it

        base = {name: parameter.detach for name, parameter in adapter.base_parameters()}
        return {**base, **merged_shards(adapter)}, base

    def _shards(self) -> dict[str, Tensor]:
        moments = beside_and_moments(self._policy, self._setup.config.checkpoints.optimiser)
        return {f"{WEIGHTS}{name}": shard() for name, shard in self._weights.items()} | moments

    def _read(self, folder: Path, moments: bool) -> None:
        wanted = beside_and_moments(self._policy, moments)
        if self._policy.adapter is None:
            wanted |= {f"{WEIGHTS}{name}": shard() for name, shard in self._weights.items()}
        with torch.no_grad():
            read_shards(wanted, folder, self._peers.files)

    def _send_weights(self, folder: Path, initial: bool = False) -> None:
        """Send the weights of a Hugging Face folder, and what a checkpoint has beside them, from rank 0."""
        policy, found = self._policy, dict[str, Tensor]()
        wanted = {} if initial else dict(policy.extra_parameters)
        if wanted:
            found |= self._read_on_rank_0(read_beside, folder)
        if policy.adapter is None:
            wanted |= policy.trained
            found |= self._read_on_rank_0(lambda one: read_model(one, policy.model.dtype).state_dict(), folder)
        elif initial:
            policy.adapter.clear()
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(self._divided(found.pop(name, None), parameter))

    def _read_on_rank_0(self, read: Callable[[Path], dict[str, Tensor]], folder: Path) -> dict[str, Tensor]:
        """Return what rank 0 reads, and on the others nothing, when it has read it, however long that takes."""
        found = read(folder) if self._world.rank == 0 else {}
        self._peers.await_files()
        return found

    def _divided(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """Return the shards of a tensor of rank 0, divided like another."""
        assert isinstance(like, DTensor)
        sent = self._peers.send(whole, like)
        return DTensor.from_local(sent, like.device_mesh, run_check=False).redistribute(placements=like.placements)

    def _gathered(self, merged: bool) -> Iterator[tuple[str, Tensor]]:
        compute = getattr(torch, self._setup.dtype)
        for name, weight in (self._weights if merged else self._base).items():
            yield name, _whole(weight(), compute)

    def _to_rank_0(self, shard: Tensor, dtype: torch.dtype) -> Tensor | None:
        whole = _whole(shard, dtype)
        return whole.cpu() if self._world.rank == 0 else None


def _whole(shard: Tensor, dtype: torch.dtype) -> Tensor:
    cast = shard.detach().to(dtype)
    assert isinstance(cast, DTensor)
    return cast.full_tensor()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _serve(rank: Rank, connection: socket.socket, requests: BinaryIO) -> None:
    while (frame := read_frame_blocking(requests, MAX_FRAME)) is not None:
        method, arguments = pickle.loads(frame)
        try:
            reply = RankReply(value=getattr(rank, method)(*arguments))
        except Exception as error:
            traceback.print_exc()  # to the log of this rank
            reply = RankReply(error=_sendable(error), waited=_waited(error))
        connection.sendall(to_frame(pickle.dumps(reply), MAX_FRAME))


def _sendable(error: Exception) -> Exception:
    if isinstance(error, TrainingError | ConfigError | OSError):
        return error
    return RuntimeError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _waited(error: Exception) -> bool:
    """Whether an error of torch says that another rank is gone or late."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def serve(*descriptors: int) -> None:
    """Serve two sockets, that for computing and that for checkpoints, until the first is closed."""
    compute, files = (socket.socket(fileno=number) for number in descriptors)
    for each in (compute, files):
        each.set_inheritable(False)
    requests = compute.makefile("rb")
    frame = read_frame_blocking(requests)
    assert frame is not None
    rank = Rank(pickle.loads(frame))
    threading.Thread(target=_serve, args=(rank, files, files.makefile("rb")), daemon=True).start()
    _serve(rank, compute, requests)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(*map(int, sys.argv[1:]))
