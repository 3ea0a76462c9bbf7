"""What a run reserves on a Ray cluster is given back, also if it gets only a part of it."""

import asyncio
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from leyden.config import Config, ConfigError, TrainingConfig
from leyden.local import cluster as cluster_module
from leyden.local.cluster import RayCluster

pytest.importorskip("ray")


@pytest.fixture
def cluster() -> RayCluster:
    node = {"Alive": True, "NodeID": "0" * 8, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 64.0}}
    ray = SimpleNamespace(nodes=lambda: [node], util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    config = Config(run="r", agent="a", tasks="t", training=TrainingConfig(devices=2))
    return RayCluster(ray, replace(config, engine=replace(config.engine, replicas=2)))


def names_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


async def test_a_reservation_that_fails_halfway_is_given_back(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def reserve(bundles: list[object], strategy: str) -> str:
        if strategy == "SPREAD":
            raise ValueError("the cluster is gone")
        return strategy

    groups = import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "placement_group", reserve)
    monkeypatch.setattr(groups, "remove_placement_group", removed.append)
    with pytest.raises(ValueError, match="the cluster is gone"):
        async with cluster.reserved(tmp_path):
            pass
    assert (removed, names_in(tmp_path)) == (["PACK"], [])


async def test_ranks_are_not_looked_for_any_more_if_one_cannot_be_found(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Reserved:
        """The first rank waits for a node, and that of the second does not see the folder of the run."""

        def __init__(self, ray: object, group: str, index: int, name: str, paths: object) -> None:
            self.name = name

        async def find(self) -> None:
            if self.name == "rank 1":
                raise ConfigError("`home`: the node does not see it")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(self.name)

        async def close(self) -> None: ...

    groups = import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "placement_group", lambda bundles, strategy: strategy)
    monkeypatch.setattr(groups, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(cluster_module, "Reservation", Reserved)
    async with cluster.reserved(tmp_path):
        with pytest.raises(ConfigError, match="does not see it"):
            await cluster.find()
        assert ended == ["rank 0"]
