"""The policies of a run, each as the configuration that it would have as the only one, and which calls each answers."""

from msgspec.structs import replace

from leyden.config.schema import AdapterConfig, Config, PolicyConfig
from leyden.records import FixedAnswer


def policy_configs(config: Config) -> dict[str, Config]:
    """Return the configuration of each policy that is served here, by name; without `policies` the given one.

    `read_config` has refused those that are invalid.
    """
    if not config.policies:
        return {config.policy: config}
    return {name: _only(config, name, policy) for name, policy in config.policies.items() if not policy.upstream}


def trained_policies(config: Config) -> list[str]:
    """Return the names of the policies that are trained."""
    return [name for name in policy_configs(config) if not config.policies or config.policies[name].learns]


def _only(config: Config, name: str, policy: PolicyConfig) -> Config:
    training, lora = config.training, policy.lora
    if lora is not None:
        adapters = AdapterConfig() if lora is True else lora or None
        training = replace(training, lora=adapters, offload="none" if adapters is not None else training.offload)
    try:
        return replace(
            config,
            policies={},
            policy=name,
            routes={},
            model=_model(config, policy),
            algorithm=policy.algorithm or config.algorithm,
            training=replace(training, learning_rate=policy.learning_rate or training.learning_rate),
        )
    except ValueError as error:
        raise ValueError(f"`policies.{name}`: {error}") from error


def _model(config: Config, policy: PolicyConfig) -> str:
    if policy.of is not None:
        return _model(config, config.policies[policy.of])
    return policy.model or config.model


def policy_routes(config: Config) -> dict[str, str | FixedAnswer]:
    """Return what answers each model name: by its routes, else the policy that serves it, else that of this name."""
    models = {model: name for name, one in config.policies.items() for model in one.models}
    names = {name: name for name in config.policies}
    others = [("*", name) for name, one in config.policies.items() if not one.models and not one.roles]
    routes = {**config.routes, **models, **names, **dict(others)}
    return {model: _target(config, target) for model, target in routes.items()}


def role_routes(config: Config) -> dict[str, str]:
    """Return the policy that answers each role, or `upstream`."""
    return {role: str(_target(config, name)) for name, one in config.policies.items() for role in one.roles}


def foreign_rewards(config: Config, name: str) -> frozenset[str]:
    """Return the names of final rewards that count for other policies and not for this one."""
    every = {reward for policy in config.policies.values() for reward in policy.rewards}
    return frozenset(every - set(config.policies[name].rewards)) if name in config.policies else frozenset()


def _target(config: Config, target: str | FixedAnswer) -> str | FixedAnswer:
    policy = config.policies.get(target) if isinstance(target, str) else None
    return "upstream" if policy is not None and policy.upstream else target
