"""Finds vLLM in a Python environment without importing it."""

import os
import subprocess
import sys

import msgspec
from msgspec import Struct

_TIMEOUT_S = 60.0
_PROBE = """
import importlib.util, json, pathlib
spec = importlib.util.find_spec("vllm")
if spec is None or not spec.origin:
    print("null")
else:
    root = pathlib.Path(spec.origin).parent
    named = {}
    exec((root / "_version.py").read_text(), named)
    files = list((root / "entrypoints").glob("*/cli_args.py"))
    print(json.dumps({
        "version": named["__version__"],
        "scale_out_flag": any("enable_scale_out" in file.read_text() for file in files),
    }))
"""


class VllmInstallation(Struct, frozen=True):
    """The vLLM that is installed in a Python environment."""

    version: str
    scale_out_flag: bool
    """Whether the token endpoint has to be enabled: newer versions refuse it without `--enable-scale-out`."""


def find_vllm(python: str = sys.executable) -> VllmInstallation | None:
    """Find the vLLM that an interpreter would import; None if it has none or does not run."""
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE],
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # ignores a folder `vllm` in the current directory
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return msgspec.json.decode(probe.stdout, type=VllmInstallation | None)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None
