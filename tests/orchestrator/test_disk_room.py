"""A disk that is full while a run works on it."""

import subprocess
import sys

import pytest

FILLED = """
import asyncio
from pathlib import Path

from leyden.orchestrator.disk_room import watch_room


async def main():
    said = asyncio.Queue()
    watching = asyncio.create_task(watch_room(Path("/mnt"), said.put_nowait, 0.01))
    with open("/mnt/filler", "wb", buffering=0) as file:
        file.write(bytes(4 << 20))
    print(await said.get())
    Path("/mnt/filler").unlink()
    print(await said.get())
    watching.cancel()
    print(said.qsize())


asyncio.run(main())
"""
MOUNTED = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m small /mnt && exec "$@"', "sh")


def can_mount() -> bool:
    try:
        return subprocess.run([*MOUNTED, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="file systems cannot be mounted here")
def test_a_full_disk_is_reported_once_and_so_is_its_room() -> None:
    done = subprocess.run([*MOUNTED, sys.executable, "-c", FILLED], capture_output=True, check=True, text=True)
    full, room, more = done.stdout.splitlines()
    assert full == "the disk of /mnt is full, 0 KiB are left: what cannot be written waits until there is room"
    assert (room, more) == ("the disk of /mnt has room again", "0")
