"""What processes use is measured, with what their descendants use."""

import subprocess
import sys
from pathlib import Path

import pytest

from leyden.process.usage import ResourceMeter

BUSY = "import time; end = time.process_time() + 0.3; x = bytearray(200 << 20)\nwhile time.process_time() < end: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is measured")
def test_processor_time_and_memory_of_descendants_count() -> None:
    meter = ResourceMeter()
    before = meter.measure()
    child = subprocess.Popen([sys.executable, "-c", f"{BUSY}\nprint(flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    during = meter.measure()
    child.communicate(b"\n")
    assert before is not None and during is not None and during.cores > 0
    assert 0.19 < during.memory_gb - before.memory_gb < 0.4
    subprocess.run([sys.executable, "-c", BUSY], check=True)  # ended, and waited for
    after = meter.measure()
    assert after is not None and after.cores > 0 and after.gpu is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is measured")
def test_gpus_are_asked_for_with_the_vendors_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '50, 1024'; echo '100, 3072'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    use = ResourceMeter().measure()
    assert use is not None and (use.gpu, use.gpu_memory_gb) == (0.75, 4.0)
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    use = ResourceMeter().measure()
    assert use is not None and use.gpu is None
