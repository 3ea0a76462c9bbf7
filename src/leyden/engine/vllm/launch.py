"""How vLLM's server is started: the installation that is found, the options, the command line, the environment."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from leyden.engine.vllm.extension import leyden_weights

Transfer = Literal["ipc", "files", "nccl"]
MAX_LOGPROBS = 32
_TIMEOUT_S = 60.0
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM reserves memory for."""
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


class VllmOptions(Struct, frozen=True):
    """How a vLLM server is started."""

    model: Path
    python: str = sys.executable
    """The interpreter that has vLLM; it need not have Leyden."""
    transfer: Transfer = "files"
    """How weights arrive: `ipc` is CUDA IPC on the same GPU, `nccl` is for other GPUs, `files` works everywhere."""
    dtype: str = "auto"
    tokenizer: Path | None = None
    """A folder with the tokenizer that grammars follow; None: the model's."""
    max_model_len: int | None = None
    arguments: tuple[str, ...] = ()
    """More arguments of vLLM's server, such as `--gpu-memory-utilization 0.4`."""
    environment: Mapping[str, str] = {}


def command(options: VllmOptions, installation: VllmInstallation, socket: Path) -> list[str]:
    """Return the command line of the server."""
    line = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--uds", str(socket)]
    line += ["--model", str(options.model), "--served-model-name", "policy", "--dtype", options.dtype]
    if options.tokenizer is not None:
        line += ["--tokenizer", str(options.tokenizer)]
    if options.max_model_len is not None:
        line += ["--max-model-len", str(options.max_model_len)]
    line += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)]
    line += ["--generation-config", "vllm", "--enable-prefix-caching"]
    line += ["--structured-outputs-config", '{"backend": "guidance"}']
    line += ["--worker-extension-cls", f"{leyden_weights.__name__.rpartition('.')[2]}.WorkerExtension"]
    if installation.scale_out_flag:
        line.append("--enable-scale-out")
    if options.transfer != "files":
        line += ["--weight-transfer-config", json.dumps({"backend": options.transfer})]
    if options.transfer == "ipc":
        line.append("--enable-sleep-mode")
    return [*line, *options.arguments]


def environment(options: VllmOptions, interface: str = "lo") -> dict[str, str]:
    """Return the environment of the server: this process's, and what the routes and the extension need.

    `interface` is the network interface by which weights come over NCCL.
    """
    extension = str(Path(leyden_weights.__file__).parent)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (extension, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",  # a file of the user does not shadow a module of vLLM
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        leyden_weights.TRANSFER_VARIABLE: options.transfer,
    }
    if "VLLM_PLUGINS" in variables:  # which to load: ours, too
        variables["VLLM_PLUGINS"] = ",".join(filter(None, (variables["VLLM_PLUGINS"], "leyden")))
    if options.transfer == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of CUDA memory are sent pickled
    if options.transfer == "nccl":
        variables.setdefault("NCCL_SOCKET_IFNAME", interface)
    return {**variables, **options.environment}


def adapter_arguments(rank: int, policies: int = 1) -> tuple[str, ...]:
    """Return the arguments with which vLLM's server takes an adapter for each policy, of this rank at the most.

    With several one can be loaded while the adapters of all policies compute: vLLM then has no need to move any.
    """
    reserved = next((one for one in _RANKS if one >= rank), rank)
    loaded = ("--max-loras", str(policies + (policies > 1)), "--max-cpu-loras", str(2 * policies))
    return ("--enable-lora", *loaded, "--max-lora-rank", str(reserved))


def write_tokenizer(tokenizer: str, model: Path, folder: Path) -> Path:
    """Write a tokenizer.json into a folder, with the end token of the model in `model`; return the folder.

    Every added token in it is special. Generations have token ids only, so vLLM uses it for grammars alone: text in a
    grammar then never matches an added token such as `<tool_call>`, as with the embedded engine.
    """
    settings = model / "tokenizer_config.json"
    end = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
