"""`leyden serve` for benchmarks/chaos.py: SIGUSR1 sets the clock of this process five minutes ahead, SIGUSR2 back."""

import signal
import sys
import time

_STEP_S = 300.0
_offset = 0.0
_real = time.time


def _now() -> float:
    return _real() + _offset


def _step(number: int, _: object) -> None:
    global _offset
    _offset += _STEP_S if number == signal.SIGUSR1 else -_STEP_S


def main() -> int:
    """Run a command of Leyden with a clock that can be set."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _step)
    time.time = _now  # before Leyden is imported, which keeps the function as its clock
    from leyden.cli import main as leyden

    return leyden()


if __name__ == "__main__":
    sys.exit(main())
