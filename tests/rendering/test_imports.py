"""The server starts without the OpenAI SDK, whose import takes as long as the rest of it."""

import subprocess
import sys

PROGRAM = """
import sys
import leyden.server.serve
print("openai" in sys.modules)
import openai
print(openai.AsyncOpenAI.__module__)
"""


def test_the_server_does_not_import_the_openai_sdk_and_code_beside_it_may() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "openai"]
