"""What a run needs of a cluster is known before it starts, and what cannot work is refused with what to change."""

import re
from typing import Any

import pytest

from leyden.config import Config, ConfigError, read_config
from leyden.local.cluster_plan import plan_cluster

BIG = {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}
CPUS = {"CPU": 4.0}


def config(**more: Any) -> Config:
    return read_config({"run": "r", "agent": "a.py:f", "tasks": "t.jsonl", **more})


def test_ranks_have_a_gpu_each_and_engines_as_many_as_they_divide_the_model_over() -> None:
    made = config(training={"devices": 8}, engine={"replicas": 4, "tensor_parallel": 2})
    plan = plan_cluster(made, {"a": BIG, "b": BIG}, cuda=True)
    assert plan.ranks == [{"CPU": 1.0, "GPU": 1.0}] * 8
    assert plan.engines == [{"CPU": 1.0, "GPU": 2.0}] * 4
    plan = plan_cluster(config(engine={"replicas": 2}), {"a": CPUS}, cuda=False)
    assert (plan.ranks, plan.engines) == ([{"CPU": 1.0}], [{"CPU": 1.0}] * 2)


@pytest.mark.parametrize(
    ("more", "nodes", "cuda", "says"),
    [
        (
            {"training": {"devices": 9}, "engine": {"replicas": 8}},
            {"a": BIG, "b": BIG},
            True,
            "`training.devices` is 9 (1 GPU and 1 CPU each) and `engine.replicas` 8 (1 GPU and 1 CPU each), which the "
            "nodes do not have (a: 8 GPU and 64 CPU, b: 8 GPU and 64 CPU): lower them, or add nodes",
        ),
        # sixteen GPUs are not enough if no node has five left for an engine
        (
            {"training": {"devices": 2}, "engine": {"replicas": 3, "tensor_parallel": 5}},
            {"a": BIG, "b": BIG},
            True,
            "which the nodes do not have",
        ),
        ({"engine": {"replicas": 3}}, {"a": CPUS}, False, "a worker needs one: add a node"),
        ({}, {"a": BIG}, False, "this machine must have GPUs, since nodes have some"),
        ({}, {"a": CPUS}, True, "nodes must have GPUs, since this machine has some"),
        ({"deterministic": True}, {"a": CPUS}, False, "`deterministic`"),
        ({"training": {"offload": "optimiser"}}, {"a": CPUS}, False, "`training.offload`"),
        ({"engine": {"url": "http://127.0.0.1:1"}}, {"a": CPUS}, False, "`engine.url`"),
        ({"engine": {"devices": [1]}}, {"a": BIG}, True, "`engine.devices`: Ray chooses the devices: leave it out"),
        ({"policies": {"one": {}}}, {"a": CPUS}, False, "`policies`: a run on a cluster has one policy"),
    ],
)
def test_what_cannot_work_is_refused(more: dict[str, Any], nodes: dict[str, Any], cuda: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^--ray: .*{re.escape(says)}"):
        plan_cluster(config(**more), nodes, cuda)


def test_a_run_without_workers_of_its_own_needs_no_cpu_for_them() -> None:
    plan_cluster(config(engine={"replicas": 3}, workers={"processes": 0}), {"a": CPUS}, cuda=False)
