"""Checksums of the pages of a SQLite file that was closed, by which changed bytes are found when it is opened again.

SQLite checks the structure of a file and not its content. The checksums are stored beside the file from
when a server closes it until one opens it for writing; after a crash there are none.
"""

import struct
import zlib
from array import array
from pathlib import Path

_MAGIC = b"LEYDSUM1"
_PAGE = 4096
_HEADER = struct.Struct("<8sQ")
_CHECK_UP_TO = 2 * 2**30
"""Larger files have no checksums: computing them would take minutes."""


def checksums_file(path: Path) -> Path:
    """Return the file with the checksums of a database."""
    return path.with_name(path.name + ".checksums")


def write_page_checksums(path: Path) -> None:
    """Write the checksums of a database that no process has open for writing."""
    size = path.stat().st_size
    if not 0 < size <= _CHECK_UP_TO:
        return
    target = checksums_file(path)
    temporary = target.with_name(target.name + ".draft")
    temporary.write_bytes(_HEADER.pack(_MAGIC, size) + _checksums(path).tobytes())
    temporary.replace(target)


def changed_pages(path: Path) -> list[int] | None:
    """Return the numbers of the pages, from 1, that differ from the checksums; None where there are none to compare."""
    try:
        data = checksums_file(path).read_bytes()
        magic, size = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return None
    if magic != _MAGIC:
        return None
    written, found = array("I"), _checksums(path)
    written.frombytes(data[_HEADER.size : _HEADER.size + 4 * -(-size // _PAGE)])
    length = max(len(written), len(found))
    return [number + 1 for number in range(length) if written[number : number + 1] != found[number : number + 1]]


def _checksums(path: Path) -> "array[int]":
    found = array("I")
    with path.open("rb") as file:
        while block := file.read(256 * _PAGE):
            found.extend(zlib.crc32(block[start : start + _PAGE]) for start in range(0, len(block), _PAGE))
    return found
