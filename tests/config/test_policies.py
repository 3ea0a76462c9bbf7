"""Several policies in one configuration: what each would be alone, whose calls it answers, and what is refused."""

import tomllib
from typing import Any

import pytest

from leyden.config import ConfigError, policy_configs, read_config, to_toml, trained_policies
from leyden.config.policies import foreign_rewards, policy_routes, role_routes

BASE: dict[str, Any] = {"run": "r", "agent": "a.py:a", "tasks": "t.jsonl"}


def read(**keys: Any) -> Any:
    return read_config({**BASE, **keys})


def test_without_policies_the_configuration_is_that_of_the_only_one() -> None:
    config = read(policy="writer", routes={"a": "writer"})
    assert policy_configs(config) == {"writer": config}
    assert trained_policies(config) == ["writer"]
    assert policy_routes(config) == {"a": "writer"}
    assert role_routes(config) == {}
    assert foreign_rewards(config, "writer") == frozenset()


def test_a_policy_has_what_it_sets_and_otherwise_what_the_run_sets() -> None:
    config = read(
        model="big",
        algorithm={"advantage": "rloo", "kl": 0.1},
        training={"learning_rate": 1e-5, "lora": {"rank": 4}},
        policies={
            "writer": {"roles": "writer", "learning_rate": 1e-3, "algorithm": {"kl": 0.5}, "lora": False},
            "checker": {"model": "small", "trained": False},
        },
    )
    writer, checker = policy_configs(config).values()
    assert (writer.policy, writer.model, writer.training.learning_rate) == ("writer", "big", 1e-3)
    assert (writer.algorithm.advantage, writer.algorithm.kl, writer.training.lora) == ("rloo", 0.5, None)
    assert (checker.policy, checker.model, checker.training.learning_rate) == ("checker", "small", 1e-5)
    assert checker.algorithm == config.algorithm
    assert checker.training.lora is not None and checker.training.lora.rank == 4
    assert trained_policies(config) == ["writer"]
    assert read_config(tomllib.loads(to_toml(config))) == config
    with_adapter = read(policies={"a": {"lora": True}})
    assert policy_configs(with_adapter)["a"].training.lora is not None


def test_the_optimiser_of_adapters_stays_on_the_device() -> None:
    offload = {"offload": "optimiser"}
    config = read(training=offload, policies={"writer": {"roles": "writer", "lora": True}, "checker": {}})
    assert [one.training.offload for one in policy_configs(config).values()] == ["none", "optimiser"]
    with pytest.raises(ConfigError, match=r"`training.offload`: .* all `policies` have `lora`: leave it out"):
        read(training=offload, policies={"checker": {"lora": True}, "opponent": {"of": "checker", "roles": "other"}})


def test_what_does_not_go_with_the_keys_of_one_policy_is_refused_and_the_policy_named() -> None:
    bounds = {"correction_low": 5.0, "correction_high": 1.0}
    with pytest.raises(ConfigError, match=r"`policies.writer`: `algorithm.correction_low` is 5.0, more than"):
        read(policies={"writer": {"roles": "writer", "algorithm": bounds}, "checker": {}})


def test_calls_are_routed_by_name_and_role_and_one_policy_answers_the_others() -> None:
    config = read(
        upstream={"url": "http://127.0.0.1:1/v1"},
        routes={"title-*": {"answer": "A title"}, "big": "checker"},
        policies={
            "writer": {"models": ["gpt-*"], "roles": ["writer", "rewriter"]},
            "checker": {},
            "judge": {"upstream": True, "roles": "judge"},
        },
    )
    routes = policy_routes(config)
    assert list(policy_configs(config)) == ["writer", "checker"]
    assert {name: routes[name] for name in ("big", "gpt-*", "writer", "judge", "*")} == {
        "big": "checker",
        "gpt-*": "writer",
        "writer": "writer",
        "judge": "upstream",
        "*": "checker",
    }
    assert list(routes)[-1] == "*"
    assert role_routes(config) == {"writer": "writer", "rewriter": "writer", "judge": "upstream"}


def test_a_reward_that_a_policy_lists_counts_for_no_other() -> None:
    config = read(policies={"a": {"roles": "a", "rewards": ["mine", "ours"]}, "b": {"rewards": "ours"}})
    assert foreign_rewards(config, "a") == frozenset()
    assert foreign_rewards(config, "b") == {"mine"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": "x", "policies": {"a": {}}}, "leave one of them out"),
        ({"policies": {"upstream": {}}}, "cannot be named 'upstream'"),
        ({"policies": {"a": {}, "b": {}}}, "answer the same calls (every other call)"),
        ({"policies": {"a": {"roles": "x"}, "b": {"roles": "x"}}}, "answer the same calls (`roles` with 'x')"),
        ({"policies": {"a": {"models": "b"}, "b": {"roles": "b"}}}, "answer the same calls (`models` with 'b')"),
        ({"policies": {"a": {"models": "x"}}, "routes": {"x": {"answer": ""}}}, "and so has `routes`"),
        ({"policies": {"a": {"trained": False}}}, "has none to train"),
        ({"policies": {"a": {}, "b": {"upstream": True, "roles": "b"}}}, "set `upstream.url` too"),
        ({"policies": {"a": {"model": "m", "upstream": True}}}, "leave one of them out"),
        ({"policies": {"a": {}, "b": {"roles": "b"}}, "checkpoints": {"keep": 1}}, "set it to 2 or more"),
        ({"policies": {"a": {}}, "routes": {"x": "c"}}, "write a, upstream or"),
        ({"policies": {"a": {"algorithm": {"kll": 1}}}}, "did you mean `policies.NAME.algorithm.kl`"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**keys)
    assert message in str(error.value)


def test_several_policies_are_trained_on_one_device_only() -> None:
    with pytest.raises(ConfigError, match=r"`training.devices` trains one policy, and there are `policies`: leave one"):
        read(training={"devices": 2}, policies={"a": {"roles": "a"}, "b": {"trained": False}})


def test_offloading_is_refused_where_it_saves_nothing_or_is_not_there() -> None:
    read(training={"offload": "optimiser"})
    for other, reason in (({"lora": {}}, "takes little memory"), ({"devices": 2}, "is for one device")):
        with pytest.raises(ConfigError, match=f"`training.offload`.*{reason}.*: leave one of them out"):
            read(training={"offload": "optimiser", **other})


@pytest.mark.parametrize(
    ("policies", "training", "message"),
    [
        ({"a": {}, "b": {"of": "c", "roles": "b"}}, {}, r"`policies.b.of` is 'c', which is not trained: name a"),
        ({"a": {}, "b": {"of": "b", "roles": "b"}}, {}, "which is not trained: name a"),
        ({"a": {}, "b": {"of": "a", "roles": "b", "lora": {}}}, {}, "plays earlier versions .* leave out `model`"),
        ({"a": {}, "b": {"of": "a", "roles": "b"}}, {"max_staleness": 1}, "could meet two: leave one of them out"),
    ],
)
def test_self_play_that_cannot_be_is_refused(policies: Any, training: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({"run": "r", "agent": "a", "tasks": "t", "policies": policies, "training": training})


def test_a_policy_that_plays_earlier_versions_has_their_model_and_is_not_trained() -> None:
    policies = {"a": {"model": "mine"}, "b": {"of": "a", "roles": "b"}}
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "policies": policies})
    assert policy_configs(config)["b"].model == "mine" and trained_policies(config) == ["a"]
