"""Recognises the framework and the entry point of an agent from its source, without running it."""

import ast
from pathlib import Path

from msgspec import Struct

from leyden.config import ConfigError
from leyden.documentation import page

_FRAMEWORKS = {
    "crewai": "crewai",
    "autogen_agentchat": "autogen",
    "agents": "openai-agents",
    "langgraph": "langgraph",
    "langchain": "langgraph",
    "langchain_openai": "langgraph",
    "langchain_anthropic": "langgraph",
    "anthropic": "anthropic",
    "openai": "openai",
}
"""Framework by the package that an agent imports; the first one of this list counts."""
_FACTORIES = {
    "crewai": ("Crew", "crew"),
    "autogen": ("RoundRobinGroupChat", "SelectorGroupChat", "Swarm", "MagenticOneGroupChat", "AssistantAgent"),
    "openai-agents": ("Agent",),
    "langgraph": ("compile", "create_agent", "create_react_agent"),
}
"""What makes the object that runs; of several in a file, the one that stands first here."""
_NAMES = ("solve", "agent", "rollout", "run", "answer", "main")
_TEXTS = ("question", "prompt", "query", "text", "message")
"""Names of a parameter that is a text."""


class AgentSource(Struct, frozen=True):
    """What the source of an agent says of how to run it."""

    framework: str
    """A framework, or `command` if the file is a program."""
    name: str
    """The function or the object that runs, or the command."""
    is_function: bool = False
    is_async: bool = False
    takes_text: bool = False
    """Whether the function takes a question, not a task."""
    question: str = "question"
    """The key of a task that the function reads first."""
    base_url: bool = False
    """Whether a client has an address of its own, so that its calls do not reach Leyden."""


def recognise(path: Path) -> AgentSource:
    """Find out how to run the agent in a file."""
    if path.suffix != ".py":
        return AgentSource("command", f"node {path.name}" if path.suffix in (".js", ".mjs") else f"./{path.name}")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Python: {error}") from error
    imported = _imported_packages(tree)
    framework = next((name for package, name in _FRAMEWORKS.items() if package in imported), "python")
    base_url = any(isinstance(node, ast.keyword) and node.arg == "base_url" for node in ast.walk(tree))
    if (function := _entry_function(tree)) is not None:
        return _of_function(function, framework, base_url)
    if (made := _runnable(tree, _FACTORIES.get(framework, ()))) is not None:
        return AgentSource(framework, made, base_url=base_url)
    if {"sys", "argparse", "fileinput"} & imported or any(
        isinstance(node, ast.Name) and node.id == "input" for node in ast.walk(tree)
    ):
        return AgentSource("command", f"python {path.name}", base_url=base_url)
    if "agentlightning" in imported:
        hint = f"write a function of the task without `llm` or resources ({page('moving')} shows one)"
        raise ConfigError(f"{path} is an agent of Agent Lightning: {hint}")
    functions = _functions_of_one(tree)
    if len(functions) == 1:
        return _of_function(functions[0], framework, base_url)
    if functions:
        names = ", ".join(function.name for function in functions)
        raise ConfigError(f"{path} has several functions that may take a task ({names}): call the agent `solve`")
    if (found := _callable_class(tree)) is not None:
        name, call = found
        keys = _keys_read(call, call.args.args[1].arg)
        return AgentSource(framework, name, True, question=keys[0] if keys else "question", base_url=base_url)
    raise ConfigError(f"{path} has no function that takes a task: write one, such as `def solve(task): ...`")


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef, framework: str, base_url: bool) -> AgentSource:
    first = function.args.args[0]
    keys = _keys_read(function, first.arg)
    return AgentSource(
        framework,
        function.name,
        is_function=True,
        is_async=isinstance(function, ast.AsyncFunctionDef),
        takes_text=_is_text(first, keys),
        question=keys[0] if keys else "question",
        base_url=base_url,
    )


def _imported_packages(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _entry_function(tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the public function of one argument with a usual name, or whose argument is called `task`."""
    functions = _functions_of_one(tree)
    named = [function for name in _NAMES for function in functions if function.name == name]
    named += [function for function in functions if function.args.args[0].arg == "task"]
    return named[0] if named else None


def _functions_of_one(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the public functions that can be called with one argument."""
    return [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")
        if len(node.args.args) - len(node.args.defaults) <= 1 <= len(node.args.args)
        if not node.decorator_list
    ]


def _callable_class(tree: ast.Module) -> tuple[str, ast.FunctionDef | ast.AsyncFunctionDef] | None:
    """Return the name of the first public class whose instances are called with a task, and that method."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
            for one in methods:
                needed = len(one.args.args) - len(one.args.defaults)
                if one.name == "__call__" and needed <= 2 <= len(one.args.args):
                    return node.name, one
    return None


def _is_text(parameter: ast.arg, keys: list[str]) -> bool:
    """Whether a parameter is a text, by its annotation, or by its name if it has none and no key of it is read."""
    if parameter.annotation is None:
        return parameter.arg in _TEXTS and not keys
    return isinstance(parameter.annotation, ast.Name) and parameter.annotation.id == "str"


def _keys_read(function: ast.AST, parameter: str) -> list[str]:
    """Return the constant keys that a function reads from a parameter, in the order of the source."""
    found = [
        (node.lineno, node.col_offset, node.slice.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == parameter
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    ]
    return [key for _, _, key in sorted(found)]


def _runnable(tree: ast.Module, factories: tuple[str, ...]) -> str | None:
    """Return the name of the object of the module that a factory made."""
    made = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            called = node.value.func
            factory = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            made[factory] = node.targets[0].id
    return next((made[factory] for factory in factories if factory in made), None)
