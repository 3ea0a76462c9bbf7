"""float32 master weights for parameters that are computed in a lower precision.

In bfloat16 an update as small as RL's is rounded away. The optimiser therefore updates float32 masters, gradients are
added up in float32 over all micro-batches, and after each step the masters are written back, rounded, into the
parameters that forward and backward passes use. Parameters in float32 or float64 are their own masters.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class MasterWeights:
    """The tensors that an optimiser updates, by name, and the parameters that they stand for."""

    def __init__(self, computed: Mapping[str, Parameter]) -> None:
        self._computed = computed
        self.by_name: dict[str, Parameter] = {}
        for name, parameter in computed.items():
            if parameter.dtype in (torch.float32, torch.float64):
                self.by_name[name] = parameter
            else:
                self.by_name[name] = master = Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that were accumulated."""
        return [master.grad for master in self.by_name.values() if master.grad is not None]

    def step(self, optimiser: Optimizer) -> None:
        """Update the masters, and all else that the optimiser has a gradient of; the gradients are used up."""
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters into the parameters that are computed with."""
        apart = [name for name, master in self.by_name.items() if master is not self._computed[name]]
        if apart:
            torch._foreach_copy_([self._computed[name] for name in apart], [self.by_name[name] for name in apart])

    def replace_in(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's state with every parameter replaced by its master, tied weights included."""
        masters = {self._computed[name].data_ptr(): master.detach() for name, master in self.by_name.items()}
        return {name: masters.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the masters from a state, and write them back."""
        for name, master in self.by_name.items():
            master.copy_(state[name])
        self.write_back()


def _move_gradient_to(master: Parameter) -> Callable[[Tensor], None]:
    """Return a hook that adds a parameter's gradient to its master's and frees it."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return move
