"""`leyden init`: writes a folder with agent, tasks, reward and configuration, or what an agent lacks of these."""

import argparse
import json
import re
import sys
from pathlib import Path

from leyden.cli.agent_source import AgentSource, recognise
from leyden.cli.demo import FOLDER as EXAMPLE
from leyden.cli.printing import print_commands, print_json, stdout_console
from leyden.config import ConfigError

_MODEL = "spark"
_ADAPTER = "leyden_agent.py"
_REWARD = '''"""Scores what the agent returns."""

import re


def reward(task, result):
    """1 if the last number of the result is the answer, 0 otherwise."""
    numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", str(result).replace(",", ""))
    return float(bool(numbers) and numbers[-1] == str(task["answer"]))
'''
_FRESH = 'runpy.run_path(str(Path(__file__).with_name("{file}")))["{name}"]'
"""A new object for each rollout: those of these frameworks keep their conversation."""
_CALLS = {
    "langgraph": (
        "from {module} import {name}",
        'state = await {name}.ainvoke({{"messages": [{{"role": "user", "content": task["question"]}}]}})',
        'state["messages"][-1].content',
    ),
    "openai-agents": (
        "from agents import Runner\nfrom {module} import {name}",
        'result = await Runner.run({name}, task["question"])',
        "result.final_output",
    ),
    "autogen": (
        "import runpy\nfrom pathlib import Path",
        f'result = await {_FRESH}.run(task=task["question"])',
        "result.messages[-1].content",
    ),
    "crewai": (
        "import runpy\nfrom pathlib import Path",
        f'result = await {_FRESH}.kickoff_async(inputs={{{{"question": task["question"]}}}})',
        "str(result)",
    ),
}
"""By framework: imports, the call of an object that is not a function, and its result."""


def add_init(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `leyden init`."""
    command.add_argument("folder", nargs="?", type=Path, help="the folder (default: my-agent, or that of --from)")
    command.add_argument("--from", dest="source", type=Path, metavar="FILE", help="your agent, which is not changed")
    command.add_argument("--model", help=f"the model to train (default: {_MODEL})")
    command.set_defaults(run=_init)


async def _init(options: argparse.Namespace) -> None:
    if options.folder is None and options.source is None and sys.stdin.isatty():
        options.source = Path(file) if (file := _ask("file of your agent", "none: write an example")) else None
        options.folder = None if options.source else Path(_ask("folder", "my-agent") or "my-agent")
        options.model = options.model or _ask("model", _MODEL)
    if options.source is not None and not options.source.is_file():
        raise ConfigError(f"--from: there is no file {options.source}")
    model = options.model or _MODEL
    folder = options.folder or (options.source.parent if options.source else Path("my-agent"))
    notes: list[str] = []
    if options.source is None:
        files = _example(model)
        config = folder / f"{_run_name(folder.absolute().name)}.toml"
    else:
        source = recognise(options.source)
        if folder.absolute() != options.source.parent.absolute():
            raise ConfigError(f"--from {options.source}: leave the folder out, the files are written beside the agent")
        files, notes = _for_agent(options.source, source, model)
        config = folder / f"{_run_name(options.source.stem)}.toml"
    files[config.name] = files.pop("")
    if existing := [name for name in files if (folder / name).exists()]:
        raise ConfigError(f"{folder / existing[0]} exists: move it away, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if options.json:
        print_json({"folder": folder, "files": sorted(files), "config": config, "notes": notes})
        return
    console = stdout_console()
    console.print(f"{folder} has {', '.join(sorted(files))}", highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"[yellow]{note}[/]", highlight=False, soft_wrap=True)
    commands = (
        (f"leyden dev {config}", "a few rollouts: what was recorded"),
        (f"leyden train {config}", "on this machine; continues a run that was stopped"),
    )
    print_commands(console, commands)


def _ask(what: str, default: str) -> str:
    return input(f"{what} [{default}]: ").strip()


def _run_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_") or "agent"


def _example(model: str) -> dict[str, str]:
    """Return the files of the example, by name; the configuration has the name ''."""
    names = ("agent.py", "tasks.jsonl", "held_out.jsonl")
    files = {name: (EXAMPLE / name).read_text(encoding="utf-8") for name in names}
    _, _, config = (EXAMPLE / "calc.toml").read_text(encoding="utf-8").partition("\n")
    return {**files, "": config.replace('model = "spark"', f"model = {json.dumps(model)}")}


def _for_agent(path: Path, source: AgentSource, model: str) -> tuple[dict[str, str], list[str]]:
    """Return the files that an agent lacks, by name, and what to know of them."""
    examples = {"tasks.jsonl": _tasks(source.question), "reward.py": _REWARD}
    files = {name: text for name, text in examples.items() if not (path.parent / name).exists()}
    notes = [f"recognised: {source.framework}, {source.name}"]
    if files:
        own = "put your own in place of the example (tasks may also be .csv, .json or .parquet)"
        notes.append(f"{' and '.join(files)}: {own}")
    if kept := [name for name in examples if name not in files]:
        notes.append(f"{' and '.join(kept)}: left as you have it")
    agent = source.name if source.framework == "command" else f"{path.name}:{source.name}"
    if source.framework != "command" and (source.takes_text or not source.is_function):
        files[_ADAPTER] = _adapter(path, source)
        agent = f"{_ADAPTER}:solve"
    if source.base_url:
        notes.append(f"{path.name} gives a client a base_url: leave it out, so that the client reads OPENAI_BASE_URL")
    settings = {"model": model, "agent": agent, "reward": "reward.py:reward", "tasks": "tasks.jsonl"}
    files[""] = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    return files, notes


def _tasks(question: str) -> str:
    """Return the tasks of the example, with the question under the key that an agent reads."""
    rows = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    renamed = [{question if key == "question" else key: value for key, value in row.items()} for row in rows]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in renamed)


def _adapter(path: Path, source: AgentSource) -> str:
    """Return the source of a function of a task that calls an agent of another form."""
    if not path.stem.isidentifier():
        raise ConfigError(
            f"{path.name} cannot be imported: rename it, such as {_run_name(path.stem).replace('-', '_')}.py"
        )
    about = {"module": path.stem, "file": path.name, "name": source.name}
    if source.is_function:
        imports, call, result = "from {module} import {name}", "", '{name}(task["question"])'
        result = f"await {result}" if source.is_async else result
    else:
        imports, call, result = _CALLS[source.framework]
    head = "async def" if source.is_async or not source.is_function else "def"
    body = [f"    {line}" for line in (call, f"return {result}") if line]
    text = "\n".join([imports, "\n", f"{head} solve(task):", *body])
    return f'"""Gives a task to {path.name}."""\n\n{text.format(**about)}\n'
