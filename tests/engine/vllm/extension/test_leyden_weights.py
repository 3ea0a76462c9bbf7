"""The checksums that two workers of vLLM report of their parts of layers add up to those of the trainer's tensors."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from leyden.engine.vllm.extension import leyden_weights
from leyden.engine.vllm.extension.leyden_weights import TRANSFER_VARIABLE, WorkerExtension, checksum
from leyden.engine.vllm.publisher import merge_parts


class VllmLinear(nn.Module):
    """A worker's part of a linear layer, with the attributes that vLLM's have."""

    def __init__(self, weight: Tensor, bias: Tensor, rank: int, **attributes: object) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.tp_rank, self.tp_size, self.input_size = rank, 2, 8
        for name, value in attributes.items():
            setattr(self, name, value)


def workers_model(weight: Tensor, bias: Tensor, rank: int) -> nn.Module:
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(4 * rank, 4 * rank + 4)
    over_rows = {"input_size_per_partition": 8, "output_partition_sizes": [3]}
    over_columns = {"input_size_per_partition": 4, "output_partition_sizes": [6]}
    return nn.ModuleDict(
        {
            "o_proj": VllmLinear(weight[:, columns].clone(), bias, rank, **over_columns),
            "up_proj": VllmLinear(weight[rows].clone(), bias[rows].clone(), rank, **over_rows),
            "gate": VllmLinear(weight.clone(), bias.clone(), rank, output_partition_sizes=[6]),  # not divided
        }
    )


def test_layers_divided_over_rows_or_columns_and_whole_ones_are_reported_as_such() -> None:
    weight, bias = torch.randn(6, 8, generator=torch.manual_seed(0)), torch.arange(6.0)
    found = []
    for rank in range(2):
        model, worker = workers_model(weight, bias, rank), WorkerExtension()
        worker.model_runner = SimpleNamespace(get_model=lambda model=model: model)
        found.append(worker.leyden_checksums())
    assert merge_parts(found) == {
        f"{layer}.{name}": ("float32", checksum(tensor))
        for layer in ("o_proj", "up_proj", "gate")
        for name, tensor in (("weight", weight), ("bias", bias))
    }


def test_a_checksum_depends_on_every_element_and_its_place_and_not_on_where_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.arange(1000.0).reshape(20, 50)
    whole = checksum(tensor)
    monkeypatch.setattr(leyden_weights, "_CPU_CHUNK", 7)  # a GPU sums more at once than a CPU
    assert checksum(tensor) == whole
    for row, column in ((0, 0), (19, 49)):
        other = tensor.clone()
        other[row, column] += 1
        assert checksum(other) != whole
    assert checksum(tensor.flip(0)) != whole


def test_the_ipc_engine_of_a_vllm_without_ray_can_be_imported(tmp_path: Path) -> None:
    """vLLM 0.25 and 0.26 import Ray in it, and do not install it."""
    engine = tmp_path / "vllm" / "distributed" / "weight_transfer" / "ipc_engine.py"
    engine.parent.mkdir(parents=True)
    engine.write_text("import ray\n")
    extension = Path(leyden_weights.__file__).parent
    code = (
        "import sys; sys.modules['ray'] = None\n"  # as if it were not installed
        "import leyden_weights, vllm.distributed.weight_transfer.ipc_engine\n"
        "assert 'ray' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": f"{extension}{os.pathsep}{tmp_path}", TRANSFER_VARIABLE: "ipc"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
