"""The coding agents that `harnesses.py` runs, in the situations in which their traffic differs.

Each has a conversation of two tasks, in two processes. In other cells it has sub-agents, compacts its conversation, is
killed in the middle of an answer and continues, gets an answer that fails in the middle and retries, stops waiting for
an answer and retries, has instructions of 80 KB, or has titles written by another model, as the run's routes say.
"""

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness_list import HOME, LARGE_PROMPT, MODULES, TIMEOUT_S, Harness, Say, node, steps
from modelserving import END, call

from leyden.records import FixedAnswer

TASK, FURTHER_TASK = "Run `cat note.txt` and tell me what the note says.", "Read it once more, please."
NOTE = "It says: leyden jar."
SUMMARY, FROM_SUMMARY = "The user had the note read.", "By the summary, it says: leyden jar."
TITLE = FixedAnswer("A fixed title")
INSTRUCTIONS = "".join(f"Rule {number}: read notes with care, and say only what they say.\n" for number in range(1400))
COMPACTS = ("create a detailed summary", "CONTEXT CHECKPOINT COMPACTION", "Here is the conversation so far")
"""What Claude Code, Codex and opencode write when they ask for a summary of their conversation."""


def coding_agents() -> list[Harness]:
    """Return the coding agents that `make harnesses` installs, in all their situations."""
    claude, gemini, mini = claude_code(), gemini_cli(), mini_swe_agent()
    looks_up = steps(call("ToolSearch", '{"query": "select:CronList", "max_results": 1}'), call("CronList", "{}"), NOTE)
    return [
        *situations(claude, claude_code_delegates, claude_code_compacts()),
        replace(claude, name=f"{claude.name}, deferred tool", say=looks_up, expected=NOTE, further=()),
        claude_code_times_out(),
        claude_code_with_fixed_sub_agents(),
        *situations(codex(), codex_delegates, codex_compacts()),
        codex_times_out(),
        *situations(opencode(), opencode_delegates, opencode_compacts(), faulty_call=3),  # after that for the title
        *(opencode_with_title(*route) for route in (("policy", "spark"), ("upstream", "upstream"), ("fixed", TITLE))),
        gemini,
        replace(gemini, name=f"{gemini.name}, aborted", expected=NOTE, fault="abort"),
        replace(
            gemini,
            name=f"{gemini.name}, large prompt",
            files={**gemini.files, "GEMINI.md": INSTRUCTIONS},
            min_request_bytes=LARGE_PROMPT,
        ),
        mini,
        replace(mini, name=f"{mini.name}, retry", fault="failure"),
        mini_swe_agent_with_large_task(),
    ]


def situations(agent: Harness, delegates: Say, compacting: Harness, faulty_call: int = 2) -> list[Harness]:
    """Return a coding agent as it is, with two sub-agents, with compaction, aborted, and with a failure."""
    return [
        agent,
        replace(agent, name=f"{agent.name}, sub-agents", say=delegates, expected=NOTE, further=()),
        replace(compacting, name=f"{agent.name}, compaction", say=compacted(agent.say), expected=FROM_SUMMARY),
        replace(agent, name=f"{agent.name}, aborted", expected=NOTE, fault="abort", faulty_call=faulty_call),
        replace(agent, name=f"{agent.name}, retry", fault="failure", faulty_call=faulty_call),
        replace(
            agent,
            name=f"{agent.name}, large prompt",
            files={**agent.files, "AGENTS.md": INSTRUCTIONS, "CLAUDE.md": INSTRUCTIONS},
            min_request_bytes=LARGE_PROMPT,
        ),
    ]


def shell(tool: str, arguments: str) -> Say:
    """Run the command of the task twice and answer; then once more, for the further task."""
    reading = call(tool, arguments)
    return steps("I shall look. " + reading, reading, NOTE, "Once more. " + reading, f"{NOTE} Still.")


def compacted(say: Say) -> Say:
    """Answer as before, write the summary when it is asked for, and answer from the summary after that."""

    def answer(prompt: str) -> str:
        if SUMMARY in prompt:
            return FROM_SUMMARY + END
        request = prompt.rpartition("<|im_start|>user")[2]
        return f"<summary>{SUMMARY}</summary>{END}" if any(words in request for words in COMPACTS) else say(prompt)

    return answer


def delegated(prompt: str, agents: Sequence[str], reading: str) -> str:
    """Answer the task by two sub-agents at the same time; each of them runs the command."""
    turn = prompt.count("<|im_start|>assistant\n") - 1
    if "<tools>" not in prompt:
        return "A title" + END
    if TASK not in prompt:  # the prompt of a sub-agent
        return (reading if turn == 0 else "The note has two words.") + END
    return ("I shall delegate. " + "".join(agents) if turn == 0 else NOTE) + END


READS = '{"command": "cat note.txt", "description": "Read the note"}'


def claude_code_delegates(prompt: str) -> str:
    """Answer as Claude Code's `Agent` tool expects it."""
    options = '"run_in_background": false, "subagent_type": "general-purpose"'
    agents = [f'{{"description": "Reader {name}", "prompt": "Read the note, {name}.", {options}}}' for name in "AB"]
    return delegated(prompt, [call("Agent", agent) for agent in agents], call("Bash", READS))


def codex_delegates(prompt: str) -> str:
    """Answer as Codex's tools expect it: the agents are started, then waited for."""
    started = re.findall(r'"agent_id": ?\\?"([0-9a-f-]{36})', prompt)
    if TASK in prompt and prompt.count("<|im_start|>assistant\n") == 2:
        waits = [json.dumps({"targets": [agent], "timeout_ms": 60000}) for agent in started]
        return "".join(call("multi_agent_v1__wait_agent", wait) for wait in waits) + END
    agents = [call("multi_agent_v1__spawn_agent", f'{{"message": "Read the note, {name}."}}') for name in "AB"]
    return delegated(prompt, agents, call("exec_command", '{"cmd": "cat note.txt"}'))


def opencode_delegates(prompt: str) -> str:
    """Answer as opencode's `task` tool expects it."""
    options = '"subagent_type": "general"'
    agents = [f'{{"description": "Reader {name}", "prompt": "Read the note, {name}.", {options}}}' for name in "AB"]
    return delegated(prompt, [call("task", agent) for agent in agents], call("bash", READS))


def _native(package: str) -> Path:
    """Return the package with a CLI's program for this machine."""
    return MODULES / f"{package}-linux-{ {'x86_64': 'x64', 'aarch64': 'arm64'}[platform.machine()] }"


def claude_code() -> Harness:
    """Anthropic's coding agent."""
    options = ("--allowedTools", "Bash,Agent,CronList", "--model", "agent")
    program = str(_native("@anthropic-ai/claude-code") / "claude")
    return Harness(
        "Claude Code",
        "@anthropic-ai/claude-code",
        (program, "-p", TASK, *options),
        ("messages",),
        (True,),
        shell("Bash", READS),
        f"{NOTE} Still.",
        is_script=False,
        further=((program, "--continue", "-p", FURTHER_TASK, *options),),
        environment={"DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    )


def claude_code_compacts() -> Harness:
    """Claude Code, whose conversation is compacted between its two tasks."""
    agent = claude_code()
    compact = tuple("/compact" if part == FURTHER_TASK else part for part in agent.further[0])
    return replace(agent, further=(compact, *agent.further))


def claude_code_times_out() -> Harness:
    """Claude Code, which waits only for some seconds for the head of a response; for events it waits for minutes."""
    agent = claude_code()
    environment = {**agent.environment, "API_TIMEOUT_MS": str(1000 * TIMEOUT_S)}
    return replace(agent, name=f"{agent.name}, time-out", fault="stall", environment=environment)


def claude_code_with_fixed_sub_agents() -> Harness:
    """Claude Code with another model for its sub-agents, which the run gives a fixed answer."""
    agent = claude_code()
    return replace(
        agent,
        name=f"{agent.name}, sub-agents: fixed",
        say=claude_code_delegates,
        expected=NOTE,
        further=(),
        environment={**agent.environment, "CLAUDE_CODE_SUBAGENT_MODEL": "small"},
        routes={"agent": "spark", "small": TITLE},
    )


def codex() -> Harness:
    """OpenAI's coding agent, which speaks Responses only."""
    settings = 'model = "agent"\nmodel_provider = "here"\nproject_doc_max_bytes = 200000\n'
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
        further=((*program, "resume", "--last", *options, FURTHER_TASK),),
        files={".codex/config.toml": f'{settings}{provider}wire_api = "responses"\n'},
    )


def codex_times_out() -> Harness:
    """Codex, which waits only for some seconds for the next event of a stream."""
    agent = codex()
    name, text = next(iter(agent.files.items()))
    files = {name: f"{text}stream_idle_timeout_ms = {1000 * TIMEOUT_S}\n"}
    return replace(agent, name=f"{agent.name}, time-out", fault="timeout", files=files)


def codex_compacts() -> Harness:
    """Codex, which compacts when the tokens of its second call are counted."""
    agent = codex()
    name, text = next(iter(agent.files.items()))
    return replace(agent, files={name: f"model_auto_compact_token_limit = 17500\n{text}"})


def gemini_cli() -> Harness:
    """Google's coding agent."""
    auth = {"selectedType": "gemini-api-key"}  # with a base URL in the environment it takes another, and refuses it
    settings = {"security": {"auth": auth}, "privacy": {"usageStatisticsEnabled": False}}
    options = ("--model", "agent", "--yolo", "--skip-trust")
    program = (node(), str(MODULES / "@google" / "gemini-cli" / "bundle" / "gemini.js"))
    return Harness(
        "gemini-cli",
        "@google/gemini-cli",
        (*program, *options, "-p", TASK),
        ("google",),
        (True,),
        shell("run_shell_command", '{"command": "cat note.txt", "description": "Read the note"}'),
        f"{NOTE} Still.",
        is_script=False,
        further=((*program, *options, "--resume", "latest", "-p", FURTHER_TASK),),
        files={".gemini/settings.json": json.dumps(settings), ".geminiignore": ".gemini/\n"},  # it lists the folder
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
        shell("bash", READS),
        f"{NOTE} Still.",
        is_script=False,
        further=((program, "run", "--continue", FURTHER_TASK),),
        files={"opencode.json": json.dumps({"model": "here/agent", "provider": {"here": provider}})},
    )


def opencode_with_title(how: str, target: str | FixedAnswer) -> Harness:
    """Opencode with another model for titles, which the run routes to a target."""
    agent = opencode()
    name, text = next(iter(agent.files.items()))
    settings = json.loads(text)
    settings["small_model"] = "here/small"
    settings["provider"]["here"]["models"]["small"] = {"name": "small"}
    routes: dict[str, str | FixedAnswer] = {"agent": "spark", "small": target}
    return replace(agent, name=f"{agent.name}, title: {how}", files={name: json.dumps(settings)}, routes=routes)


def opencode_compacts() -> Harness:
    """Opencode with a model whose context its second task exceeds."""
    agent = opencode()
    name, text = next(iter(agent.files.items()))
    settings = json.loads(text)
    settings["provider"]["here"]["models"]["agent"]["limit"] = {"context": 16_000, "output": 1500}
    return replace(agent, files={name: json.dumps(settings)})


def mini_swe_agent_with_large_task() -> Harness:
    """mini-SWE-agent with a task of 80 KB."""
    agent = mini_swe_agent()
    command = tuple(f"{TASK}\n\n{INSTRUCTIONS}" if part == TASK else part for part in agent.command)
    return replace(agent, name=f"{agent.name}, large prompt", command=command, min_request_bytes=LARGE_PROMPT)


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
