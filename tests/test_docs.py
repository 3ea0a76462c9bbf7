"""The commands, files and keys in the documentation are correct."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from serving import ServerProcess

from leyden.cli import parser
from leyden.cli.agent_source import recognise
from leyden.config import Config, read_config

DOCS = Path(__file__).parent.parent / "docs"
TUTORIAL = DOCS / "tutorial.md"


def test_the_commands_of_the_api_page_work(server: ServerProcess) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "api.md").read_text(), re.DOTALL)
    settings = (
        blocks[0].replace("http://127.0.0.1:8484", server.url).replace("runs/admin.key", f"{server.home}/admin.key")
    )
    output = subprocess.run(
        ["bash", "-e", "-c", "\n".join([settings, *blocks[1:]]).replace("wait=60", "wait=1")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert '"error"' not in output
    assert '"counted":true' in output
    assert '"ending":"succeeded"' in output
    assert len(re.findall("curl", "".join(blocks))) >= 8


def test_architecture_names_packages_that_exist() -> None:
    listed = re.search(r"```\nsrc/leyden/\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    assert listed is not None
    source = DOCS.parent / "src" / "leyden"
    for line in listed[1].splitlines():
        if "planned" in line or not line.startswith("  ") or line.startswith("   "):
            continue
        named = line.split()[0]
        assert (source / named).exists(), named


def test_every_key_of_a_configuration_is_documented() -> None:
    text = (DOCS / "configuration.md").read_text()
    for section in msgspec.structs.fields(Config):
        inner = section.type if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct) else None
        names = [f"{section.name}.{key.name}" for key in msgspec.structs.fields(inner)] if inner else [section.name]
        for name in names:
            assert f"`{name}`" in text, f"docs/configuration.md does not say what {name} is"


ROOT = DOCS.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("skills/*/SKILL.md")),
    *sorted(DOCS.glob("*.md")),
    *ROOT.glob("examples/*/README.md"),
]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


def test_the_map_leads_to_every_page() -> None:
    text = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name}" in text, page.name


def commands(*pages: Path) -> list[str]:
    """The `leyden` commands in the blocks of some pages, with names in place of placeholders."""
    found = []
    for page in pages:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            if language in ("", "sh"):
                found += re.findall(r"^leyden (.*?)(?:\s+#.*)?$", block, re.MULTILINE)
    given = {"RUN": "mine", "ROLLOUT": "train-0.0", "URL": "http://127.0.0.1:1", "FILE": "worker.key", "[": "", "]": ""}
    return list(dict.fromkeys(re.sub(r"\bRUN\b|\bROLLOUT\b|\bURL\b|\bFILE\b", lambda m: given[m[0]], c) for c in found))


@pytest.mark.parametrize("command", [c.replace("[train-0.0]", "") for c in commands(*PAGES)])
def test_commands_have_the_arguments_that_the_pages_say(command: str) -> None:
    words = shlex.split(command)
    options, rest = parser(words[0]).parse_known_args(words)
    assert options.command == words[0]
    assert all("=" in word for word in rest), rest


def test_the_configurations_of_the_readme_exist() -> None:
    named = {word for command in commands(ROOT / "README.md") for word in command.split() if word.endswith(".toml")}
    assert named and all((ROOT / name).is_file() for name in named), named


def test_the_files_of_a_run_are_listed() -> None:
    text = (DOCS / "training.md").read_text()
    for name in ("environment.json", "admin.key", "secret", "worker.key", "url", "lock"):
        assert f"| `{name}` |" in text, name


def blocks(*pages: Path) -> list[tuple[str, str, str]]:
    """The blocks of code of some pages: page, language and text."""
    fence = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.name, *block) for page in pages for block in fence.findall(page.read_text())]


def test_python_and_configurations_of_the_pages_can_be_read() -> None:
    """Python compiles, and the keys of every configuration exist."""
    read = 0
    for page, language, text in blocks(*PAGES):
        if language == "python":
            compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "toml":
            read_config({"agent": "a.py:a", "tasks": "tasks.jsonl", "run": "mine", **tomllib.loads(text)})
        read += language in ("python", "toml")
    assert read >= 20


def test_the_keys_that_pages_name_exist() -> None:
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    keys = {
        f"{name}.{key.name}"
        for name, section in sections.items()
        if isinstance(section, type) and issubclass(section, msgspec.Struct)
        for key in msgspec.structs.fields(section)
    }
    files = {"server.log", "workers.sbatch", "workers.yaml", "server.yaml"}
    others = {*files, "rollout.id", "rollout.queued", "rollout.started", "rollout.finished"}
    named = re.compile(rf"`({'|'.join({key.split('.')[0] for key in keys})})\.(\w+)(?=[` =])")
    for page in [*DOCS.glob("*.md"), *ROOT.glob("skills/*/SKILL.md")]:
        # in a row of two systems, the last column has our keys
        rows = [line.split(" | ")[-1] if page.name == "moving.md" else line for line in page.read_text().splitlines()]
        for section, key in named.findall("\n".join(rows)):
            assert f"{section}.{key}" in {*keys, *others}, f"{page.name}: {section}.{key}"


def functions(page: str) -> list[dict[str, Any]]:
    """What the Python blocks of a page define, block by block."""
    defined: list[dict[str, Any]] = []
    for _, language, text in blocks(DOCS / page):
        if language == "python":
            defined.append({})
            exec(text, defined[-1])
    return defined


def test_the_agents_of_the_framework_page_are_recognised(tmp_path: Path) -> None:
    found = {}
    for _, language, text in blocks(DOCS / "frameworks.md"):
        if language == "python" and text.startswith("# "):
            (tmp_path / text.split()[1]).write_text(text)
            source = recognise(tmp_path / text.split()[1])
            found[text.split()[1]] = (source.framework, source.name)
    assert found == {"shop_graph.py": ("langgraph", "graph"), "shop_agent.py": ("openai-agents", "agent")}


def test_the_rewards_of_the_how_tos_tell_good_from_bad() -> None:
    exact, partial, _ = (names["reward"] for names in functions("good_reward.md"))
    assert [exact({"answer": 1200}, said) for said in ("so #### 1,200", "12", None)] == [1, 0, 0]
    assert [partial({"rows": [1]}, said) for said in ({"sql": "", "rows": [1]}, {"sql": ""}, None)] == [1, 0.1, 0]
    (rag,) = (names["reward"] for names in functions("rag.md"))
    task = {"question": "Is Rome or Bern the capital?", "answer": "Bern"}
    said = [{"content": task["question"]}, {"content": "Bern has been the seat since 1848."}]
    episode = SimpleNamespace(calls=["call"], messages=lambda call: said)
    assert rag(task, "It is Bern.", episode) == 1
    del said[1]
    assert rag(task, "Rome", episode) == 0


def test_the_program_of_the_coding_page_rewards_what_passes_the_tests(tmp_path: Path) -> None:
    (tmp_path / "claude").write_text("#!/bin/sh\necho 'x = 4' > main.py\n")
    (tmp_path / "claude").chmod(0o755)
    (program,) = (text for _, language, text in blocks(DOCS / "coding_agents.md") if language == "python")
    tests = {"test_main.py": "from main import x\n\ndef test_x():\n    assert x == 4\n"}
    task = {"question": "Set x to 4.", "files": {"main.py": "x = 1\n"}, "tests": tests}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(task),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout.splitlines()[-1])["reward"] == 1


def test_skills_are_named_after_their_folders_and_say_when_they_help() -> None:
    skills = sorted(ROOT.glob("skills/*/SKILL.md"))
    for skill in skills:
        _, head, text = skill.read_text().split("---\n", 2)
        fields = yaml.safe_load(head)
        assert fields["name"] == skill.parent.name and " Use " in fields["description"]
        assert all((ROOT / name).is_file() for name in re.findall(r"`(docs/\w+\.md)", text)), skill
    assert len(skills) >= 4


@pytest.mark.slow
def test_the_tutorial_ends_with_an_agent_that_learned(tmp_path: Path) -> None:
    """Its files are written and its commands run, in order, in an empty folder."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for _, language, text in blocks(TUTORIAL):
        if language in ("python", "toml"):
            (tmp_path / text.split()[1]).write_text(text)
        else:
            subprocess.run(["bash", "-e", "-c", text], cwd=tmp_path, env=environment, check=True, timeout=900)
    lines = [json.loads(line) for line in (tmp_path / "runs/coins/metrics.jsonl").read_text().splitlines()]
    rewards = [line["held_out/reward"] for line in lines if "held_out/reward" in line]
    assert rewards[-1] > rewards[0] + 0.3
    assert (tmp_path / "coins-model" / "config.json").is_file()


RUN_ELSEWHERE = {
    "examples/": "tests/examples train the examples",
    "serve": "tests/local/test_serve.py and tests/server start servers",
    "worker": "tests/local/test_train.py starts workers",
    "init": "tests/cli/test_init.py",
    "replay mine": "tests/local/test_replay.py",
    "shop_graph.toml": "tests/cli/test_init.py",
    "--push": "tests/local/test_model_card.py",
    "--ray": "tests/local/test_cluster_run.py",
    "engine.url": "tests/local/test_vllm_run.py, where vLLM is installed",
    "workers.processes=0": "tests/local/test_train.py",
}
SMALLER = {"step-100": "step-2", "step-50": "step-2", "0 100": "0 2", "steps=20": "steps=3"} | {
    f"{key}={number}": f"{key}=2" for key in ("replicas", "devices") for number in (3, 4, 8)
}
"""Numbers of the pages, and those of the small run."""


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path: Path) -> None:
    """Every command of the pages that needs neither a GPU nor another machine, in order, in one folder."""
    agent = (
        "from openai import OpenAI\n\nclient = OpenAI()\n\n\ndef solve(task):\n"
        "    said = client.chat.completions.create(\n"
        '        model="m", messages=[{"role": "user", "content": task["question"]}], max_tokens=8\n    )\n'
        "    return said.choices[0].message.content\n"
    )
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "graders.py").write_text("def strict(task, result):\n    return float(len(result or '') % 2)\n")
    rows = "".join(json.dumps({"question": f"What is {n} plus 1?"}) + "\n" for n in range(8))
    (tmp_path / "tasks.jsonl").write_text(rows)
    (tmp_path / "others.jsonl").write_text('{"question": "What is 3 plus 9?"}\n')
    for name in ("calc", "mine", "before", "after"):
        (tmp_path / f"{name}.toml").write_text(
            'agent = "agent.py:solve"\nreward = "graders.py:strict"\ntasks = "tasks.jsonl"\nheld_out = 2\n'
            "[training]\nsteps = 2\ntasks_per_step = 2\ngroup_size = 2\nlearning_rate = 1e-3\n"
            "[evaluation]\nevery = 2\nrollouts = 1\n"
        )
    wanted = [
        c.replace("[train-0.0]", "") for c in commands(ROOT / "README.md", *sorted(set(DOCS.glob("*.md")) - {TUTORIAL}))
    ]
    runnable = [c for c in wanted if not any(part in c for part in RUN_ELSEWHERE)]
    trainings = [
        *(f"train {name}.toml" for name in ("before", "after", "calc")),
        *(c for c in runnable if c.startswith("train")),
    ]
    others = sorted((c for c in runnable if not c.startswith("train")), key=lambda c: c.startswith("delete"))
    for number, command in enumerate([*trainings, *others]):
        for shown, here in (*SMALLER.items(), ("my-model", f"my-{number}")):
            command = command.replace(shown, here)
        if command.startswith("export") and "--step" not in command:
            command += " --step last"  # which checkpoint is the best is chance here
        if command == "top":
            command += " --once"
        done = subprocess.run(
            [sys.executable, "-m", "leyden", *shlex.split(command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1800,  # of a command that hangs
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
