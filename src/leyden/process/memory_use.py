"""Tells whether processes together hold more memory than they may: their own, shared memory, and files in memory.

Files in memory are memory files (memfd) that they have open, and file systems that only they have mounted, such as
`/tmp` and `/dev/shm` of a sandbox. What several processes share, or is both mapped and a file, counts once. Mapped
files of disks do not count. If a process hides its files (`PR_SET_DUMPABLE`, unless this process is root), all memory
files and shared memory of the machine count, because they may be its. Elsewhere than on Linux nothing is counted.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_File = tuple[int, int]
"""Device and inode of a memory file; inode 0: all files of a file system."""
_ALL = 0
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def exceed(pids: Collection[int], memory: int) -> bool:
    """Whether processes together hold more than so many bytes.

    Only if they would with everything counted for each process is what they share told apart, which takes the kernel
    longer.
    """
    files = dict(_memory_files(pids)) | dict(_file_systems(pids))
    hidden = _unseen_bytes() if any(map(_hides_files, pids)) else 0
    if sum(map(_resident_bytes, pids)) + sum(files.values()) + hidden <= memory:
        return False
    mapped = _mapped_bytes(pids, files) if files else {}
    unmapped = sum(max(0, size - mapped.get(file, 0)) for file, size in files.items())
    return sum(map(proportional_bytes, pids)) + unmapped + hidden > memory


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, also what it shares, without mapped files of disks."""
    return _kilobytes(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:")) or 0


def proportional_bytes(pid: int) -> int:
    """Return the same, each page divided by the number of processes that share it."""
    found = _kilobytes(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
    return _resident_bytes(pid) if found is None else found  # an older kernel, or one that does not show it


def _kilobytes(path: str, fields: tuple[str, ...]) -> int | None:
    """Return the sum of some lines of a file, in bytes; None if it has none of them."""
    with suppress(OSError):  # it has ended
        found = [int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(fields)]
        return sum(found) << 10 if found else None
    return None


def _memory_files(pids: Collection[int]) -> Iterator[tuple[_File, int]]:
    """Yield the memory files that processes have open, with their sizes in memory."""
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    if str(link.readlink()).startswith("/memfd:"):
                        found = link.stat()
                        yield (found.st_dev, found.st_ino), found.st_blocks * 512


def _hides_files(pid: int) -> bool:
    """Whether a process does not show which files it has open; one that has ended has no memory either."""
    return not os.access(f"/proc/{pid}/fd", os.R_OK) and _kilobytes(f"/proc/{pid}/status", ("RssAnon:",)) is not None


def _unseen_bytes() -> int:
    """Return the machine's shared memory that is in no file system that this process sees."""
    sizes: dict[int, int] = {}
    for device, folder in _mounts("self"):
        if (size := _file_system_size(device, folder)) is not None:
            sizes[device] = size
    return max(0, (_kilobytes("/proc/meminfo", ("Shmem:",)) or 0) - sum(sizes.values()))


def _file_systems(pids: Collection[int]) -> Iterator[tuple[_File, int]]:
    """Yield the file systems in memory that processes have mounted and this one has not, with their sizes."""
    namespaces: dict[str, str] = {}
    for pid in ("self", *map(str, pids)):
        with suppress(OSError):
            namespaces.setdefault(os.readlink(f"/proc/{pid}/ns/mnt"), pid)  # noqa: PTH115 - the target is no path
    others = [pid for pid in namespaces.values() if pid != "self"]
    ours = {device for device, _ in _mounts("self")} if others else set()
    for pid in others:
        for device, folder in _mounts(pid):
            if device not in ours and (size := _file_system_size(device, f"/proc/{pid}/root{folder}")) is not None:
                yield (device, _ALL), size


def _file_system_size(device: int, folder: str) -> int | None:
    """Return what a file system holds; None if another one is mounted over its folder."""
    with suppress(OSError):
        if os.stat(folder).st_dev == device:  # noqa: PTH116 - a string, of which there are many
            size = os.statvfs(folder)
            return (size.f_blocks - size.f_bfree) * size.f_frsize
    return None


def _mounts(pid: str) -> Iterator[tuple[int, str]]:
    """Yield device and folder of the file systems in memory that a process sees."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            if system.startswith("tmpfs "):
                device, folder = mount.split()[2], mount.split()[4]
                yield (
                    os.makedev(*map(int, device.split(":"))),
                    _ESCAPED.sub(lambda code: chr(int(code[1], 8)), folder),
                )


def _mapped_bytes(pids: Collection[int], files: Collection[_File]) -> Counter[_File]:
    """Return how much of these files is counted as memory of the processes."""
    found: Counter[_File] = Counter()
    for pid in pids:
        file = None
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                if (mapping := _MAPPING.match(line)) is not None:
                    device, inode = os.makedev(int(mapping[1], 16), int(mapping[2], 16)), int(mapping[3])
                    file = next((each for each in ((device, inode), (device, _ALL)) if each in files), None)
                elif file is not None and line.startswith("Pss:"):
                    found[file] += int(line.split()[1]) << 10
    return found
