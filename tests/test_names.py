"""One name for one thing in TOML, in JSON (wire, store, metrics) and in Python."""

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import msgspec

import leyden
from leyden.config import Config, read_config
from leyden.config.reading import to_toml
from leyden.learner.protocol import UpdateMetrics
from leyden.local.stack import run_settings
from leyden.orchestrator.report.call_positions import CallPositions
from leyden.orchestrator.report.metrics_log import evaluation_metrics, step_metrics
from leyden.orchestrator.rollouts.branch_usage import BranchUsage
from leyden.orchestrator.rollouts.call_usage import CallUsage

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "src/leyden/server/dashboard/static"
MODULES = ("records", "outcomes", "api.wire", "api.views", "config.schema")
DERIVED = {"reward_function", "completion_tokens", "role_routes"}
"""Settings of a run that no key sets: whether there is a `reward`."""


def structs() -> Iterator[type[msgspec.Struct]]:
    for name in MODULES:
        module = import_module(f"leyden.{name}")
        yield from (one for one in vars(module).values() if isinstance(one, type) and issubclass(one, msgspec.Struct))


def keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Every key of a configuration, with its sections."""
    for entry in msgspec.structs.fields(section):
        inner = [one for one in (entry.type, *get_args(entry.type)) if isinstance(one, type)]
        inner = [one for one in inner if issubclass(one, msgspec.Struct)]
        yield from keys(inner[0], f"{prefix}{entry.name}.") if inner else [prefix + entry.name]


def test_records_have_the_same_names_in_python_and_in_json() -> None:
    found = list(structs())
    assert len(found) > 60
    for struct in found:
        assert struct.__struct_encode_fields__ == struct.__struct_fields__, struct


def test_a_configuration_has_the_same_keys_in_toml_in_json_and_as_arguments() -> None:
    config = read_config({"run": "r", "agent": "a.py:a", "tasks": "t.jsonl"})
    in_json = msgspec.to_builtins(config)  # what the wire and the store have
    assert read_config(in_json) == config

    def flat(value: dict[str, Any], prefix: str = "") -> set[str]:
        parts = [
            flat(one, f"{prefix}{key}.") if isinstance(one, dict) else {prefix + key} for key, one in value.items()
        ]
        return set().union(*parts)

    unset = {key for key in flat(in_json) if key not in flat(tomllib.loads(to_toml(config)))}
    assert flat(tomllib.loads(to_toml(config))) <= flat(in_json) <= set(keys(Config)) | {"training.lora"}
    assert all(_at(in_json, key) is None for key in unset)
    for function in (leyden.train, leyden.evaluate, leyden.dev):
        parameters = inspect.signature(function).parameters
        assert {"agent", "tasks", "reward"} <= set(parameters) & set(Config.__struct_fields__)
        assert parameters["settings"].kind is inspect.Parameter.VAR_KEYWORD


def test_the_settings_of_a_run_have_the_names_of_the_keys_that_set_them() -> None:
    changed: dict[str, Any] = {
        "rollout": {
            "lease_s": 7.0,
            "max_attempts": 5,
            "failure_reward": -1.0,
            "history": "exact",
            "reasoning": False,
            "tool_calls": "any",
            "max_calls": 9,
            "max_tokens": 77,
            "replay": False,
            "agent_rewards": True,
        },
        "training": {"allow_biased_sampling": True},
        "sampling": {"temperature": 0.5, "max_tokens": 33, "top_p": 0.9, "top_k": 4, "min_p": 0.1},
        "routes": {"*": "policy"},
        "roles": {"planner": "plan"},
    }
    settings = run_settings(read_config({"run": "r", "agent": "a", "tasks": "t", "seed": 3, **changed}))
    values = {name: value for section in ("rollout", "training") for name, value in changed[section].items()}
    values |= {"routes": changed["routes"], "roles": changed["roles"]}
    in_json = msgspec.to_builtins(settings)
    assert {name: in_json[name] for name in values} == values
    assert set(in_json) == set(values) | {"sampling"} | DERIVED
    assert {name: in_json["sampling"][name] for name in changed["sampling"]} == changed["sampling"]
    assert in_json["sampling"]["seed"] == 3
    changed |= {"rollout": {"max_calls": {1: 4, 20: 8}}, "sampling": {"max_tokens": {10: 64}}}
    settings = run_settings(read_config({"run": "r", "agent": "a", "tasks": "t", **changed}))
    assert [settings.at(step).max_calls for step in (1, 19, 20, None)] == [4, 4, 8, 8]
    assert settings.at(1).sampling.max_tokens == 64  # before the first step that is named


def test_pages_reports_docs_and_tests_name_metrics_that_are_written() -> None:
    """A name in a chart, in `leyden top`, in the report, the docs or a test stands in the code that writes metrics."""
    source = "".join(inspect.getsource(one) for one in (step_metrics, evaluation_metrics, UpdateMetrics, BranchUsage))
    usage, positions = inspect.getsource(CallUsage), inspect.getsource(CallPositions)
    algorithms = "".join(path.read_text() for path in _files("rl", "learner"))
    endings = {str(ending) for ending in import_module("leyden.outcomes").Ending}
    name = re.compile(r"\b((?:reward|rollouts|groups|calls|tokens|length|staleness|time|training|held_out)/[a-z_0-9]+)")
    shown: dict[str, str] = {}
    for path in (*STATIC.glob("*.js"), ROOT / "src/leyden/cli/top.py", ROOT / "src/leyden/cli/report/page.py"):
        shown |= dict.fromkeys(name.findall(path.read_text()), path.name)
    page = ROOT / "docs/when_it_does_not_learn.md"
    shown |= dict.fromkeys(name.findall(page.read_text()), page.name)
    assert len(shown) > 30
    read = re.compile(rf'"{name.pattern}[^"]*"')
    for path in (ROOT / "tests").rglob("*.py"):
        shown |= dict.fromkeys(read.findall(path.read_text()), path.name)
    for metric, where in shown.items():
        group, last = metric.rstrip("0123456789").split("/") if "pass_at" in metric else metric.split("/")
        known = f'"{metric}"' in source or f'f"{metric}' in source or f'f"{{split}}/{last}' in source
        known |= group in ("rollouts", "held_out") and last in endings
        known |= group == "calls" and f'"{last}"' in usage
        known |= f'"{group}"' in positions and f'"{last}"' in positions
        known |= group == "training" and (f'"{last}"' in source + algorithms or f'f"{last}{{' in algorithms)
        assert known, f"{where} names {metric}, which is not written"


def _files(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in (ROOT / "src/leyden" / folder).rglob("*.py"))


def _at(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value[part]
    return value
