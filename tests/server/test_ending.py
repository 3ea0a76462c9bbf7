"""A server whose event loop is blocked ends, by a signal or by the CPU time that it used."""

import signal
import subprocess
import sys

import pytest

BLOCKED = """
import asyncio, re, signal, sys, time
import uvloop
from leyden.server import serve

serve._GRACE_S, serve._BLOCKED_CPU_S, serve._TICK_S = {grace_s}, {cpu_s}, 0.1

async def main():
    stop = asyncio.Event()
    with serve.ending_process(stop.set):
        await asyncio.sleep(0.2)
        print("ready", flush=True)
        {code}
        await stop.wait()
    print("stopped", flush=True)

uvloop.run(main())
"""
SPIN = "while True: pass"
SLEEP = "time.sleep(600)"
MATCH = 're.match("(a|a)" * 60 + "$", "a" * 60 + "b")'


def started(code: str, cpu_s: float, grace_s: float = 0.5) -> "subprocess.Popen[bytes]":
    script = BLOCKED.format(code=code, cpu_s=cpu_s, grace_s=grace_s)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_gracefully_where_the_loop_runs(number: signal.Signals) -> None:
    with started("pass", 600, grace_s=60) as process:
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == b"stopped\n" and process.returncode == 0


@pytest.mark.parametrize("code", [SPIN, SLEEP], ids=["computing", "sleeping"])
def test_a_signal_ends_a_blocked_server_after_its_time_and_shows_where_it_was(code: str) -> None:
    with started(code, 600) as process:
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=60)
        assert process.returncode == 1 and output == b"" and b"in main" in log


def test_a_loop_that_is_blocked_for_good_ends_the_server_also_where_nobody_else_can_run() -> None:
    with started(MATCH, 0.5) as process:
        assert b"in main" in process.communicate(timeout=60)[1]
        assert process.returncode == -signal.SIGPROF


def test_a_server_that_is_stopped_or_sleeps_uses_no_time() -> None:
    with started("await asyncio.sleep(1.5)", 0.5, grace_s=60) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == b"stopped\n"
