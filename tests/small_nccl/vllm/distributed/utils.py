"""A store at which the members of a group meet, as vLLM has one."""

from datetime import timedelta

from torch.distributed import TCPStore


class StatelessProcessGroup:
    def __init__(self, store: TCPStore, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    @classmethod
    def create(cls, *, host: str, port: int, rank: int, world_size: int) -> "StatelessProcessGroup":
        store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
        return cls(store, rank, world_size)
