"""What a run needs of a Ray cluster: the resources of each of its processes, and whether the nodes have them."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from leyden.config import Config, ConfigError

Bundle = dict[str, float]
"""Resources of one process, by Ray's names."""


class ClusterPlan(Struct, frozen=True):
    """The resources of each rank and of each engine."""

    ranks: Sequence[Bundle]
    engines: Sequence[Bundle]


def plan_cluster(config: Config, nodes: Mapping[str, Mapping[str, float]], cuda: bool) -> ClusterPlan:
    """Plan a run on nodes with these resources, by their addresses; `cuda`: whether this machine has a GPU.

    Raises `ConfigError` with what to change if it cannot work.
    """
    _check_settings(config)
    gpus = any(node.get("GPU") for node in nodes.values())
    if gpus != cuda:
        having, lacking = ("nodes have", "this machine") if gpus else ("this machine has", "nodes")
        raise ConfigError(
            f"--ray: {lacking} must have GPUs, since {having} some: start `leyden train` on a node like those that "
            "train, and Ray there with `--num-gpus`"
        )
    rank, engine = (_bundle(number if gpus else 0) for number in (1, config.engine.tensor_parallel))
    plan = ClusterPlan([rank] * config.training.devices, [engine] * config.engine.replicas)
    free = [dict(node) for node in nodes.values()]
    if not _fits([*plan.ranks, *plan.engines], free):
        there = ", ".join(f"{address}: {describe(node)}" for address, node in nodes.items())
        raise ConfigError(
            f"--ray: `training.devices` is {len(plan.ranks)} ({describe(rank)} each) and `engine.replicas` "
            f"{len(plan.engines)} ({describe(engine)} each), which the nodes do not have ({there}): lower them, or add "
            "nodes"
        )
    if config.workers.processes != 0 and not any(node.get("CPU", 0) >= 1 for node in free):
        raise ConfigError(
            "--ray: training and engines take every CPU of the cluster, and a worker needs one: add a node, or start "
            "Ray with a higher `--num-cpus`"
        )
    return plan


def _check_settings(config: Config) -> None:
    """Refuse what works on one machine only."""
    engine, offloads = config.engine, config.training.offload != "none"
    refused = {
        "`policies`: a run on a cluster has one policy: leave them out": bool(config.policies),
        "`deterministic`: which node is first depends on time: leave it out": config.deterministic,
        "`training.offload` is for a device of this machine: leave it out": offloads,
        "`engine.url` is a server that runs already, and the run starts its own: leave it out": engine.url is not None,
        "`engine.devices`: Ray chooses the devices: leave it out": bool(engine.devices),
    }
    for why, applies in refused.items():
        if applies:
            raise ConfigError(f"--ray: {why}, or leave out --ray")


def _bundle(gpus: int) -> Bundle:
    return {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}


def _fits(bundles: Sequence[Bundle], free: Sequence[Bundle]) -> bool:
    """Whether nodes have room for all; what is left of them is then in `free`."""
    for bundle in sorted(bundles, key=lambda one: -one.get("GPU", 0)):
        room = (node for node in free if all(node.get(name, 0) >= amount for name, amount in bundle.items()))
        if (node := next(room, None)) is None:
            return False
        for name, amount in bundle.items():
            node[name] -= amount
    return True


def describe(resources: Mapping[str, float]) -> str:
    """Return resources for people."""
    return " and ".join(f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if resources.get(name)) or "nothing"
