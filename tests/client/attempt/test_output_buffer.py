"""What attempts print: kept with each, bounded, and still where it always went."""

from pathlib import Path

import pytest
from worker_harness import WorkerHarness

from leyden.client.attempt.output_buffer import HEAD_BYTES, TAIL_BYTES, OutputBuffer
from leyden.client.runners.command_process import AnswerTooLarge, LastJsonLine
from leyden.outcomes import Ending

AGENT = """
import asyncio, sys, threading, time, logging
logging.basicConfig(format="%(message)s")

def act(task):
    for turn in range(task["lines"]):
        print(f"{task['n']} says {turn}")
        time.sleep(0.001)
    thread = threading.Thread(target=lambda: print(f"{task['n']} in a thread"))
    thread.start()
    thread.join()
    logging.getLogger().warning("%d logs", task["n"])
    print("no\\ud800end", end="", file=sys.stderr)
    time.sleep(task.get("s", 0))
    return 1.0

async def act_async(task):
    for turn in range(task["lines"]):
        print(f"{task['n']} says {turn}")
        await asyncio.sleep(0)
    await asyncio.to_thread(print, f"{task['n']} in a thread")
    print(f"{task['n']} logs", end="", file=sys.stderr)
    return 1.0

def score(task, episode):
    return float(f"{task['n']} in a thread\\n" in episode.output)
"""


def printed(n: int, last: str) -> str:
    return "".join(f"{n} says {turn}\n" for turn in range(20)) + f"{n} in a thread\n{n} logs{last}"


@pytest.mark.parametrize(("name", "last"), [("act", "\nno\\ud800end"), ("act_async", "")])
async def test_what_each_of_many_attempts_prints_is_kept_with_it(
    harness: WorkerHarness, tmp_path: Path, name: str, last: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talking.py").write_text(AGENT)
    await harness.open()
    for n in range(16):
        await harness.queue(f"g{n}", {"n": n, "lines": 20})
    with harness.worker(f"talking.py:{name}", reward="talking.py:score", base=str(tmp_path), concurrency=16):
        for n in range(16):
            episode = await harness.episode(f"g{n}")
            assert (episode.output, episode.final_reward(0.0)) == (printed(n, last), 1.0)
    said = capfd.readouterr()
    assert said.out.count(" says ") == 16 * 20 and said.err.count(" logs") == 16


async def test_what_an_attempt_printed_before_its_time_was_up_is_kept(harness: WorkerHarness, tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text(AGENT)
    await harness.open()
    await harness.queue("g", {"n": 1, "lines": 2, "s": 600})
    with harness.worker("talking.py:act", base=str(tmp_path), time_limit_s=4.0):
        episode = await harness.episode("g")
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.TIMEOUT
    assert episode.output.startswith("1 says 0\n1 says 1\n1 in a thread\n")


def test_long_output_keeps_its_ends_and_says_how_much_is_missing() -> None:
    output = OutputBuffer()
    output.add(b"a" * HEAD_BYTES)
    output.add(b"b" * TAIL_BYTES)
    assert output.text() == "a" * HEAD_BYTES + "b" * TAIL_BYTES
    for _ in range(5 * TAIL_BYTES):
        output.add(b"c")
    assert output.text() == "a" * HEAD_BYTES + f"\n... ({5 * TAIL_BYTES} bytes dropped) ...\n" + "c" * TAIL_BYTES
    output.add(b"\xff\xfe" + b"d" * 10 * TAIL_BYTES)
    assert output.text().endswith("d" * TAIL_BYTES)


def test_the_result_of_a_command_is_its_last_line_that_is_json() -> None:
    for pieces, value in (
        ([b"1\n", b'{"a": [1', b", 2]}\n", b"bye\n"], {"a": [1, 2]}),
        ([b"1\n2"], 2),
        ([b"", b"\n\n"], None),
        ([b'"' + b"x" * (3 << 20), b'"\n'], "x" * (3 << 20)),
        ([b'"' + b"x" * (9 << 20), b'"\n"short"\r\n'], "short"),
        ([b"1\n", *[b"50%|#####\r" * 10_000] * 60, b"\n"], 1),
        ([b"[" * 100_000 + b"\n"], None),
        ([b"true story\nNaN\n- a list\n"], None),
    ):
        found = LastJsonLine()
        for piece in pieces:
            found.add(piece)
        assert found.value() == value


@pytest.mark.parametrize("end", [b"", b"\n", b" \r\n", b"\nbye\n"])
@pytest.mark.parametrize(("first", "last"), [(b'{"answer": "', b'"}'), (b"[", b"]"), (b'"', b'"')])
def test_an_earlier_line_is_not_the_result_where_the_last_one_is_too_large(
    first: bytes, last: bytes, end: bytes
) -> None:
    found = LastJsonLine()
    for piece in (b'{"progress": "half"}\n', first, *[b"1" * (1 << 20)] * 9, last + end):
        found.add(piece)
    with pytest.raises(AnswerTooLarge, match=r"too large: 9,437,\d+ bytes as JSON, and 4,194,304 are the most"):
        found.value()
