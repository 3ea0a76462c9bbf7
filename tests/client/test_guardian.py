"""Processes that an agent starts end with its host, whatever session and environment they have."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from modelserving import eventually
from worker_harness import WorkerHarness, alive, existing, gone, guardians_of, hosts_of, kill

from leyden.outcomes import Ending
from leyden.process.child import guarded
from leyden.process.guardian import KILL, Guard

AGENT = """
import json, os, subprocess, time
from pathlib import Path

def act(task):
    daemon = "import os, sys; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); os.close(1); "
    daemon += "os.execve('/bin/sleep', ['sleep', '600'], {})"
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own).pid for own in (True, False)]
    children.append(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={}).pid)
    children.append(int(subprocess.run(["python3", "-c", daemon], stdout=-1).stdout))
    Path(task["file"] + ".new").write_text(json.dumps(children))
    Path(task["file"] + ".new").rename(task["file"])
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["worker", "host", "guardian", "guardian of the guardian"])
async def test_nothing_that_an_agent_started_is_left(harness: WorkerHarness, tmp_path: Path, victim: str) -> None:
    (tmp_path / "starting_sleeps.py").write_text(AGENT)
    file = tmp_path / "children"
    await harness.open(max_attempts=1)
    await harness.queue("g", {"file": str(file)})
    with harness.worker("starting_sleeps.py:act", base=str(tmp_path)) as worker:
        await eventually(file.exists)
        children = [psutil.Process(pid) for pid in json.loads(file.read_text())]
        (host,) = [process for process in hosts_of(worker) if process not in children]
        victims = {
            "worker": psutil.Process(worker.process.pid),
            "host": host,
            "guardian": host.parents()[0],
            "guardian of the guardian": host.parents()[1],
        }
        kill(victims[victim])
        await gone([host, *children])


LARGE = """
import subprocess, time
memory = bytearray(b"x") * (512 << 20)
print(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={}).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["killed", "told", "closed"])
def test_a_guardian_ends_when_nothing_of_its_program_is_left(end: str) -> None:
    # while the kernel frees the memory of a large program, its children are not orphans yet
    child_end, control = os.pipe()
    words = guarded((sys.executable, "-c", LARGE), Guard())
    with subprocess.Popen(words, stdin=child_end, stdout=-1) as guardian:
        os.close(child_end)
        assert guardian.stdout
        left = psutil.Process(int(guardian.stdout.readline()))
        try:
            if end == "killed":
                psutil.Process(guardian.pid).children(recursive=True)[1].kill()
            elif end == "told":
                os.write(control, KILL)
            if end != "killed":
                os.close(control)
            assert guardian.wait(30) == -signal.SIGKILL
            assert not alive(left)
        finally:
            with suppress(psutil.NoSuchProcess):
                left.kill()


STOPPING = """
import os, signal, sys, time
above = [os.getppid()]
if {both}:
    above.append(int(open(f"/proc/{{above[0]}}/stat").read().rpartition(")")[2].split()[1]))
again = {again} and os.fork() == 0 and not os.setsid()
for pid in above:
    os.kill(pid, signal.SIGSTOP)
print(os.getpid(), flush=True)
while again:
    for pid in above:
        os.kill(pid, signal.SIGSTOP)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["told", "closed", "its parent killed"])
def test_a_program_that_stops_its_guardian_ends_when_the_guardian_must(end: str) -> None:
    child_end, control = os.pipe()
    words = guarded((sys.executable, "-c", STOPPING.format(both=False, again=False)), Guard())
    with subprocess.Popen(words, stdin=child_end, stdout=-1) as guardian:
        os.close(child_end)
        assert guardian.stdout
        program = psutil.Process(int(guardian.stdout.readline()))
        above = program.parents()[0]
        if end == "told":
            os.write(control, KILL)
        elif end == "its parent killed":
            guardian.kill()
        os.close(control)
        try:
            assert guardian.wait(30) == -signal.SIGKILL
            psutil.wait_procs([program, above], 30)
            assert not alive(program) and not alive(above)
        finally:
            for each in (program, above):
                with suppress(psutil.NoSuchProcess):
                    each.kill()


async def test_a_worker_ends_although_a_command_stops_its_guardian_again_and_again(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    (tmp_path / "stopping.py").write_text(STOPPING.format(both=False, again=True))
    await harness.open(max_attempts=1)
    await harness.queue("g", {})
    with harness.worker(f"{sys.executable} stopping.py", base=str(tmp_path), time_limit_s=1.0) as worker:
        episode = await harness.episode("g")
        assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.TIMEOUT
        program = int(episode.output.split()[0])
        await gone(existing([program]))
        worker.stop()
        assert await asyncio.to_thread(worker.process.wait, 60) == 0


HOSTED = "from pathlib import Path\n\ndef act(task):\n    exec(Path(__file__).with_name('stopping.txt').read_text())\n"


async def test_a_worker_ends_although_an_agent_stops_both_guardians_of_its_host_again_and_again(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    (tmp_path / "stopping.txt").write_text(STOPPING.format(both=True, again=True))
    (tmp_path / "hosted.py").write_text(HOSTED)
    await harness.open(max_attempts=1)
    await harness.queue("g", {})
    with harness.worker("hosted.py:act", base=str(tmp_path)) as worker:
        await eventually(lambda: any(each.status() == psutil.STATUS_STOPPED for each in guardians_of(worker)))
        left = psutil.Process(worker.process.pid).children(recursive=True)
        worker.stop()
        assert await asyncio.to_thread(worker.process.wait, 60) == 0
        await gone(left)


def test_a_guardian_ends_as_its_program_does_and_says_why_it_cannot_be_started(
    capfd: pytest.CaptureFixture[str],
) -> None:
    child_end, control = os.pipe()

    def run(*command: str) -> int:
        return subprocess.run(guarded(command, Guard()), stdin=child_end).returncode

    assert run("sh", "-c", "exit 7") == 7
    assert run("sh", "-c", "kill -SEGV $$") == -signal.SIGSEGV
    assert run("sh", "-c", "kill -TERM $$") == -signal.SIGTERM
    assert run("/no/such/program") == 127
    assert "No such file" in capfd.readouterr().err
    os.close(child_end)
    os.close(control)
