"""What an agent's code starts ends with its host, even in a session of its own."""

import json
from pathlib import Path

import psutil
import pytest
from modelserving import eventually
from worksite import Worksite, gone, hosts_of, kill

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
async def test_nothing_that_an_agent_started_is_left(site: Worksite, tmp_path: Path, victim: str) -> None:
    (tmp_path / "starting_sleeps.py").write_text(AGENT)
    file = tmp_path / "children"
    await site.open(max_attempts=1)
    await site.queue("g", {"file": str(file)})
    with site.worker("starting_sleeps.py:act", base=str(tmp_path)) as worker:
        await eventually(file.exists)
        children = [psutil.Process(pid) for pid in json.loads(file.read_text())]
        (host,) = [process for process in hosts_of(worker) if process not in children]
        kill(psutil.Process(worker.process.pid) if victim == "worker" else host)
        await gone([host, *children])
