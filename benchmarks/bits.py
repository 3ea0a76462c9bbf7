"""Whether another checkout trains to the same weights: five deterministic steps of the demo's agent, bit for bit.

    python benchmarks/bits.py --against CHECKOUT --out results/bits

For a change that must not change what is learned. Both checkouts train with the packages of this environment, each with
its own source and agent. `ratio` is the share of the checkpoint's files (model, optimiser's moments) that are equal,
byte for byte; `weights` is the model's digest, which differs between kinds of processors.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from checkouts import THIS, commits
from reporting import add_out, report_result

STEPS = 5
SETTINGS = (
    "run=bits",
    "deterministic=true",
    f"training.steps={STEPS}",
    "training.tasks_per_step=4",
    "training.group_size=4",
    "training.learning_rate=1e-3",  # whatever the defaults of the checkouts are, here and below
    "training.schedule=constant",
    "training.warmup_steps=0",
    "training.updates_per_step=1",
    "held_out=0",
    "evaluation.every=0",
    f"checkpoints.every={STEPS}",
)


def train(checkout: Path, home: Path) -> dict[str, str]:
    """Train in a checkout; return the digests of its checkpoint's files."""
    command = [sys.executable, "-m", "leyden", "train", "examples/calc_plain/calc.toml", *SETTINGS, f"home={home}"]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=sys.stderr)
    files = sorted((home / "bits" / f"step-{STEPS}").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    """Train in both checkouts and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", required=True, help="compare with this checkout")
    parser.set_defaults(checkout=THIS)
    add_out(parser)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        this, other = train(THIS, Path(folder) / "this"), train(options.against.absolute(), Path(folder) / "other")
    equal = [name for name in this if this[name] == other.get(name)]
    for name in this:
        print(f"{name}: {'equal' if name in equal else 'different'}")
    result = {
        "ratio": len(equal) / len(this),
        "steps": STEPS,
        "files": list(this),
        "weights": this["model.safetensors"],
    }
    report_result(result, options.out, checkouts=commits(options))


if __name__ == "__main__":
    main()
