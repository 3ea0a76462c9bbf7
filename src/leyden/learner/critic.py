"""The critic: estimates the value of the state before a call from the policy's hidden states."""

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """Two layers over the hidden states, in float32 at least. The last starts at zero, and so does every value."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        dtype = torch.promote_types(dtype, torch.float32)
        self.inner = nn.Linear(width, width, device=device, dtype=dtype)
        self.outer = nn.Linear(width, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Compute one value for each state."""
        values: Tensor = self.outer(nn.functional.silu(self.inner(states.to(self.inner.weight.dtype))))
        return values[:, 0]
