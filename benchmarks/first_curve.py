"""How long a new user waits: from a wheel and nothing installed to the first curve of `leyden demo`.

    python benchmarks/first_curve.py

A wheel is built, which is not counted. Counted are a new environment, the installation of the wheel with its extras
`train` and `demo` in the versions of constraints.txt, and the demo until its curve is on the disk. pip has no cache,
and does not compile modules, most of which are never imported.

The last line is one JSON object: `ratio` is these seconds over the 240 that they may be on two quiet cores, `parts` has
them one by one, `demo_s` is until the demo has ended, and `processor_s` is the processor time of all of it: where it
is much less than two cores had, the machine was busy with other things or waited for its network.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from reporting import add_out, report_result

ROOT = Path(__file__).parents[1]
ALLOWED_S = 240.0


def main(out: Path | None) -> None:
    """Build, install, train, and report."""
    with TemporaryDirectory() as folder:
        dist, environment, work = (Path(folder) / name for name in ("dist", "venv", "work"))
        work.mkdir()
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(dist), str(ROOT)]
        subprocess.run(build, check=True, stdout=sys.stderr)
        (wheel,) = dist.glob("*.whl")
        used, times = processor_s(), [time.monotonic()]
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        times.append(time.monotonic())
        pip = [environment / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        wanted = ["--constraint", ROOT / "constraints.txt", f"leyden[train,demo] @ {wheel.as_uri()}"]
        subprocess.run([*pip, *wanted], check=True)
        times.append(time.monotonic())
        wait_for_curve(environment / "bin/leyden", work, times)
        used = processor_s() - used
    parts = {
        part: round(end - begin, 1)
        for part, begin, end in zip(("environment", "installation", "training"), times, times[1:], strict=False)
    }
    seconds, demo_s = times[3] - times[0], times[4] - times[0]
    result = {"ratio": round(seconds / ALLOWED_S, 3), "seconds": round(seconds, 1), "parts": parts}
    report_result({**result, "demo_s": round(demo_s, 1), "processor_s": round(used, 1)}, out)


def wait_for_curve(leyden: Path, work: Path, times: list[float]) -> None:
    """Run the demo; append the times when its curve is there and when it has ended."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen([leyden, "demo"], cwd=work, env=environment, stdout=sys.stderr) as demo:
        while not (work / "runs/demo/curve.png").is_file():
            if demo.poll() is not None:
                sys.exit(f"the demo ended with status {demo.returncode} and without a curve")
            time.sleep(0.1)
        times.append(time.monotonic())
        if demo.wait() != 0:
            sys.exit(f"the demo ended with status {demo.returncode}")
        times.append(time.monotonic())


def processor_s() -> float:
    """Return the processor time of the programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    main(parser.parse_args().out)
