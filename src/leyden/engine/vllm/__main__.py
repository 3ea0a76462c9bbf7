"""`python -m leyden.engine.vllm MODEL`: starts a vLLM server that a run can use by `engine.url`."""

import argparse
import os
import sys
from pathlib import Path

from leyden.engine.vllm.launch import VllmOptions, adapter_arguments, command, environment, find_vllm


def main() -> None:
    """Parse the arguments and replace this process by vLLM's server."""
    parser = argparse.ArgumentParser(
        prog="python -m leyden.engine.vllm",
        description="Start a vLLM server whose weights a run can change. Its routes take no key: keep the socket's "
        "folder private. Further arguments are vLLM's.",
    )
    parser.add_argument("model", type=Path, help="the folder of the model that the run trains")
    parser.add_argument("--uds", type=Path, required=True, metavar="PATH", help="the Unix socket to listen on")
    parser.add_argument("--lora-rank", type=int, metavar="N", help="the run's `training.lora.rank`, if it has one")
    parser.add_argument("--lora-policies", type=int, metavar="N", default=1, help="how many policies have an adapter")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    options, arguments = parser.parse_known_args()
    lora = adapter_arguments(options.lora_rank, options.lora_policies) if options.lora_rank is not None else ()
    vllm = VllmOptions(model=options.model.absolute(), python=options.python, arguments=(*lora, *arguments))
    installation = find_vllm(vllm.python)
    if installation is None:
        parser.exit(1, f"{vllm.python} has no vLLM: name an interpreter that has it with --python\n")
    os.execve(vllm.python, command(vllm, installation, options.uds.absolute()), environment(vllm))


if __name__ == "__main__":
    main()
