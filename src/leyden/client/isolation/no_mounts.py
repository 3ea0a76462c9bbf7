"""Forbids this process and its descendants to mount file systems. Imports only the standard library.

In namespaces of its own any program could mount file systems in memory and take them out of every list of mounts, where
nobody can count what they hold. The kernel checks each system call with a small program (seccomp).
"""

import ctypes
import errno
import os
import struct

_MOUNT = {
    0xC000003E: 165,  # x86-64, also with the numbers of x32
    0x40000003: 21,  # x86
    0xC00000B7: 40,  # ARM64
    0x40000028: 21,  # ARM
    0xC00000F3: 40,  # RISC-V
    0xC0000102: 40,  # LoongArch
    0xC0000015: 21,  # POWER
    0x80000016: 21,  # S/390
}
"""The number of the system call `mount` by kind of processor, as in linux/audit.h."""
_FSOPEN = 430  # the same for all
_X32 = 1 << 30
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _KIND = 0, 4
"""Where what is checked has the number of the call and the kind of processor."""
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def forbid_mounts() -> None:
    """Make every later mount fail with `EPERM`. Raises `OSError` if the kernel cannot."""
    steps: list[tuple[int, int, int, int]] = []
    for kind, mount in _MOUNT.items():
        steps += [
            (_LOAD, 0, 0, _KIND),
            (_IF_EQUAL, 0, 6, kind),
            (_LOAD, 0, 0, _NUMBER),
            (_AND, 0, 0, 0xFFFFFFFF ^ _X32),
            (_IF_EQUAL, 1, 0, mount),
            (_IF_EQUAL, 0, 1, _FSOPEN),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    kernel = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    for words in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), described, zero, zero),
    ):
        if kernel.prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
