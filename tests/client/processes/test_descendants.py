"""Processes that an agent starts end with its host, even in a session of their own."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from modelserving import eventually
from worker_harness import WorkerHarness, alive, gone, hosts_of, kill

AGENT = """
import json, subprocess, time
from pathlib import Path

def act(task):
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own).pid for own in (True, False)]
    Path(task["file"] + ".new").write_text(json.dumps(children))
    Path(task["file"] + ".new").rename(task["file"])
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["worker", "host"])
async def test_nothing_that_an_agent_started_is_left(harness: WorkerHarness, tmp_path: Path, victim: str) -> None:
    (tmp_path / "starting_sleeps.py").write_text(AGENT)
    file = tmp_path / "children"
    await harness.open(max_attempts=1)
    await harness.queue("g", {"file": str(file)})
    with harness.worker("starting_sleeps.py:act", base=str(tmp_path)) as worker:
        await eventually(file.exists)
        children = [psutil.Process(pid) for pid in json.loads(file.read_text())]
        (host,) = [process for process in hosts_of(worker) if process not in children]
        kill(psutil.Process(worker.process.pid) if victim == "worker" else host)
        await gone([host, *children])


LARGE = """
import subprocess, sys
memory = bytearray(b"x") * (512 << 20)
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
sys.stdin.read()
"""

ADOPTING = """
import asyncio, os, subprocess, sys
from contextlib import suppress
from leyden.client.processes.descendants import adopt_orphans, kill_marked
adopt_orphans()
large = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1, env={**os.environ, "MARK": "it"})
print(int(large.stdout.readline()), flush=True)
large.kill()
with suppress(OSError):
    while open(f"/proc/{large.pid}/environ", "rb").read():
        pass
asyncio.run(kill_marked(b"MARK=it\\0"))
print("ended", flush=True)
sys.stdin.read()
"""


def test_what_a_process_leaves_is_found_although_the_process_is_still_dying() -> None:
    # while the kernel frees its memory, it has no environment any more and its children are not orphans yet
    words = [sys.executable, "-c", ADOPTING, LARGE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as adopting:
        assert adopting.stdout
        left = psutil.Process(int(adopting.stdout.readline()))
        try:
            assert adopting.stdout.readline() == "ended\n"
            assert not alive(left)
        finally:
            with suppress(psutil.NoSuchProcess):
                left.kill()
            adopting.kill()
