"""A store at which the members of a group meet, as vLLM has one."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


class StatelessProcessGroup:
    def __init__(self, store: TCPStore, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    @classmethod
    def create(
        cls,
        *,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        store_timeout: int = 60,
        listen_socket: socket.socket | None = None,
    ) -> "StatelessProcessGroup":
        listening = None if listen_socket is None else listen_socket.detach()
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=store_timeout),
            use_libuv=False,
            master_listen_fd=listening,
        )
        return cls(store, rank, world_size)
