"""Master weights and moments in host memory: the device has the weights that are computed with, and their gradients.

Gradients are added up on the device, as without. A step takes them to the host in buckets: while the optimiser updates
one there, the gradients of the next and the weights of the one before are on their way. Besides master weights and
moments, the host needs memory for two buckets only.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from leyden.learner.master_weights import MasterWeights

_BUCKET = 1 << 26
"""Elements from which on a bucket is full."""


class OffloadedWeights(MasterWeights):
    """Masters in host memory of all parameters, whatever their precision."""

    def __init__(self, computed: Mapping[str, Parameter]) -> None:
        self._computed = computed
        self.by_name, self._sums = {}, dict[str, Tensor]()
        for name, parameter in computed.items():
            precision = torch.promote_types(parameter.dtype, torch.float32)
            self.by_name[name] = Parameter(parameter.detach().to("cpu", precision, copy=True))
            if parameter.dtype != precision:
                parameter.register_post_accumulate_grad_hook(lambda one, name=name: self._add(name, one))

    def _add(self, name: str, parameter: Tensor) -> None:
        """Add a parameter's gradient to the sum of those before in the precision of masters, and free it."""
        assert parameter.grad is not None
        if name in self._sums:
            self._sums[name] += parameter.grad
        else:
            self._sums[name] = parameter.grad.to(self.by_name[name].dtype)
        parameter.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that were accumulated, on the device."""
        return [gradient for name in self._computed if (gradient := self._gradient(name)) is not None]

    def _gradient(self, name: str) -> Tensor | None:
        return self._sums.get(name, self._computed[name].grad)

    @torch.no_grad()
    def step(self, optimiser: Optimizer) -> None:
        """Update the masters bucket by bucket, and first what the optimiser has on the device."""
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        for gradients in self._arriving():
            for name, gradient in gradients.items():
                self.by_name[name].grad = gradient
            optimiser.step()
            for name in gradients:
                self.by_name[name].grad = None
                _send(self.by_name[name], self._computed[name])
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # whoever reads the weights may do so on another stream

    def _arriving(self) -> Iterator[dict[str, Tensor]]:
        """Yield the gradients of each bucket when they are on the host, and those of the next are on their way."""
        before: _Fetched | None = None
        for names in self._buckets():
            fetched = _Fetched({name: self._take(name) for name in names})
            if before is not None:
                yield before.wait()
            before = fetched
        if before is not None:
            yield before.wait()

    def _buckets(self) -> Iterator[list[str]]:
        names, size = list[str](), 0
        for name in [name for name in self._computed if self._gradient(name) is not None]:
            names.append(name)
            size += self._computed[name].numel()
            if size >= _BUCKET:
                yield names
                names, size = [], 0
        if names:
            yield names

    def _take(self, name: str) -> Tensor:
        gradient = self._gradient(name)
        assert gradient is not None
        self._sums.pop(name, None)
        self._computed[name].grad = None
        return gradient


class _Fetched:
    """Gradients on their way to the host, into pinned memory; those on the device are freed when they were read."""

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        self._gradients = {name: each.to("cpu", non_blocking=True) for name, each in gradients.items()}
        self._arrival = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None

    def wait(self) -> dict[str, Tensor]:
        """Return them when they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._gradients


def _send(master: Tensor, parameter: Tensor) -> None:
    """Round a master on the host, and start to copy it to the device; torch keeps the rounded one until it is there."""
    pinned = parameter.device.type == "cuda"
    rounded = torch.empty_like(parameter, device="cpu", pin_memory=pinned).copy_(master)
    parameter.copy_(rounded, non_blocking=pinned)
