"""Train the SQL agent as `leyden train` does, then write down what the device was used for.

    python benchmarks/gpu_step_train.py DEVICE.json key=value ...

DEVICE.json gets the most memory that the trainer's process had on the GPU, and how fast the GPU multiplies matrices.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from leyden.config import override, read_config, read_file
from leyden.process.resources import configure_openmp

CONFIG = Path(__file__).parents[1] / "examples" / "sql" / "sql.toml"
SIZE, PRODUCTS = 8192, 50


def matmul_tflops() -> float:
    """Measure a large bfloat16 product."""
    import torch

    left, right = torch.randn(2, SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        left @ right
    torch.cuda.synchronize()
    return 2 * SIZE**3 * PRODUCTS / (time.perf_counter() - began) / 1e12


def main() -> None:
    """Train, then look at the device."""
    device, *settings = sys.argv[1:]
    configure_openmp()  # before torch is imported, as `leyden train` does
    import torch

    from leyden.local.train import train

    try:
        asyncio.run(train(read_config(override(read_file(CONFIG), settings)), restart=True))
    finally:
        found = {}
        if torch.cuda.is_available():
            found["trainer_peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
            found["matmul_tflops"] = matmul_tflops()
        Path(device).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
