"""A rank's connection to the others: collectives of torch.distributed, and FSDP2.

If they are small beside the device's memory, weights are gathered by the first micro-batch of an update and gradients
are reduced by the last: between them they are whole on every rank. Otherwise every micro-batch gathers and reduces.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from leyden.learner.forward import PolicyForward
from leyden.learner.memory import gathered_units, keeps_whole, whole_size
from leyden.learner.microbatch import MicroBatch
from leyden.learner.ranks.messages import FILES_TIMEOUT_S, World

T = TypeVar("T")
_FILES_TIMEOUT = timedelta(seconds=FILES_TIMEOUT_S)


class RankPeers:
    """The other ranks. Parameters are sharded; those of a layer are whole only while it is computed."""

    copies = False

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.compute_dtype: torch.dtype | None = None
        """The precision of forward passes if it is not that of the parameters."""
        self._units: list[FSDPModule] = []
        self._whole_size = 0
        """Bytes of all weights and gradients."""
        backend, timeout = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=world.timeout_s)
        store = _store(world.meeting, world.size)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_FILES_TIMEOUT)
        self._group = dist.new_group(timeout=timeout)
        self.mesh = DeviceMesh.from_group(self._group, device.type)
        self._objects = dist.new_group(backend="gloo", timeout=timeout)
        self.files = dist.new_group(backend="gloo", timeout=_FILES_TIMEOUT)
        """The group for reading and writing checkpoints."""

    def await_files(self) -> None:
        """Wait until every rank is here; one may have to read a large file first."""
        dist.barrier(group=self.files)

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in their order."""
        found: list[T] = [value] * self.world.size
        dist.all_gather_object(found, value, group=self._objects)
        return found

    def level(self, microbatches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield as many micro-batches as the rank with the most has; weights are sharded again after the last."""
        own = list(microbatches)
        counts, fits = zip(*self.gather((len(own), keeps_whole(self._whole_size))), strict=True)
        most, whole = max(counts), all(fits)  # devices may differ, but not what they exchange
        for number, microbatch in enumerate([*own, *(_empty_microbatch() for _ in range(most - len(own)))], 1):
            if whole and number in (1, most):
                self._keep_whole(number == most)
            yield microbatch

    def shard(self, module: nn.Module) -> None:
        """Give a module the parameters of rank 0, and shard its layers, then what is beside them."""
        compute = self.compute_dtype if isinstance(module, PolicyForward) else None
        self._whole_size += whole_size(module, compute)
        for unit in gathered_units(module, (compute or next(module.parameters()).dtype).itemsize):
            self._shard(unit, compute)
        self._shard([module], compute)
        if isinstance(module, PolicyForward):
            register_fsdp_forward_method(module, "find_head")

    def norm(self, tensors: Sequence[Tensor]) -> float:
        """Return the norm of sharded tensors."""
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        square = torch.nn.utils.get_total_norm(local).to(self.device) ** 2
        dist.all_reduce(square, group=self._group)
        return square.sqrt().item()

    def send(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Return a tensor of rank 0 on every rank: the others have one that is `like` it."""
        sent = torch.empty(like.shape, dtype=like.dtype, device=self.device) if tensor is None else tensor
        sent = sent.to(self.device, like.dtype).contiguous()
        dist.broadcast(sent, 0, group=self._group)
        return sent

    def _keep_whole(self, last: bool) -> None:
        """Keep weights and gradients whole after micro-batches; after the `last` one, shard and reduce them."""
        for unit in self._units:
            unit.set_reshard_after_forward(last and not torch.is_grad_enabled(), recurse=False)
            unit.set_reshard_after_backward(last, recurse=False)
            unit.set_requires_gradient_sync(last, recurse=False)

    def _shard(self, modules: list[nn.Module], compute: torch.dtype | None) -> None:
        """Shard what is not sharded yet of some modules, as one unit."""
        for module in modules:
            self._place(module, compute)
        # inputs are in the right precision already, and tree masks are not to be cast
        policy = MixedPrecisionPolicy(param_dtype=compute, cast_forward_inputs=False)
        if compute is not None:
            policy = MixedPrecisionPolicy(compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # parameters are looked up between updates, and must be the sharded ones then
        unit: FSDPModule = fully_shard(modules, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)[0]
        unit.set_gradient_divide_factor(1.0)  # the weights of samples are those of the whole update
        unit.set_force_sum_reduction_for_comms(True)
        self._units.append(unit)

    def _place(self, module: nn.Module, compute: torch.dtype | None) -> None:
        """Move what is not sharded yet to the device, with the values of rank 0; the others may have none."""
        placed: dict[Tensor, Parameter] = {}  # tied parameters stay tied
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                if parameter not in placed:
                    dtype = parameter.dtype if parameter.requires_grad or compute is None else compute
                    own = None if parameter.is_meta else parameter.detach()
                    sent = self.send(own, torch.empty(parameter.shape, dtype=dtype, device="meta"))
                    placed[parameter] = Parameter(sent, requires_grad=parameter.requires_grad)
                part._parameters[name] = placed[parameter]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = self.send(None if buffer.is_meta else buffer, buffer)


def _store(meeting: str, size: int) -> Store:
    if meeting.startswith("/"):
        return FileStore(meeting, size)
    host, _, port = meeting.rpartition(":")
    return TCPStore(host, int(port), timeout=_FILES_TIMEOUT, wait_for_workers=False)


def _empty_microbatch() -> MicroBatch:
    """Return a micro-batch of one token, of which nothing is wanted: all layers are computed."""
    none, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        samples=[],
        ids=one[None],
        nodes=None,
        predictors=one,
        targets=one,
        temperatures=torch.ones(1, dtype=torch.float64),
        gather=none,
        states=none,
        computed=0,
    )
