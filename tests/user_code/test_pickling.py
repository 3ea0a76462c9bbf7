"""Functions of a notebook reach other processes: clients are created anew there, and what cannot go is named."""

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import openai
import pytest

from leyden.user_code.loading import LoadError, reference_to
from leyden.user_code.pickling import NotPicklable, digest_callable, pickle_callable

client = openai.OpenAI(api_key="of the notebook", base_url="http://elsewhere/v1", max_retries=7)
rows = sqlite3.connect(":memory:")
lock = threading.Lock()


def asks(task: object) -> str:
    return f"{client.base_url} {client.api_key} {client.max_retries}"


def helper() -> object:
    return rows


def reads(task: object) -> object:
    return helper()


def closes_over() -> object:
    held = lock

    def inner(task: object) -> object:
        return held

    return inner


def as_in_a_notebook(function: object) -> object:
    """Pickle by value, as functions of `__main__` are."""
    function.__module__ = "__main__"
    return function


def test_a_client_is_created_anew_from_the_environment_of_the_other_process(tmp_path: Path) -> None:
    path = Path(reference_to(as_in_a_notebook(asks), str(tmp_path)))
    assert b"of the notebook" not in path.read_bytes()
    code = f"import cloudpickle; print(cloudpickle.load(open({str(path)!r}, 'rb'))(None))"
    environment = {"OPENAI_BASE_URL": "http://gateway/v1", "OPENAI_API_KEY": "pool-key"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "http://gateway/v1/ pool-key 7", done.stderr


@pytest.mark.parametrize(
    ("function", "named"),
    [(reads, "`rows` (sqlite3.Connection)"), (closes_over(), "`held` (_thread.lock)")],
)
def test_what_cannot_be_carried_is_named_by_its_variable(function: object, named: str, tmp_path: Path) -> None:
    as_in_a_notebook(helper)
    with pytest.raises(LoadError, match="create it inside the function") as refused:
        reference_to(as_in_a_notebook(function), str(tmp_path))
    assert named in str(refused.value)
    assert refused.value.__cause__ is None


def test_other_functions_are_pickled_as_before() -> None:
    double = cloudpickle.loads(pickle_callable(lambda n: 2 * n))
    assert double(21) == 42
    with pytest.raises(NotPicklable):
        pickle_callable(lock.acquire)


def test_a_cell_that_is_run_again_by_another_kernel_is_the_same_function() -> None:
    source = "LIMIT = 3\ndef solve(task):\n    return [n for n in task if n in {'a', 'b'}][:LIMIT]\n"

    def defined(code: str, file: str) -> str:
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(code, file, "exec"), names)
        return digest_callable(names["solve"])

    first = defined(source, "/tmp/ipykernel_1/1.py")
    assert defined("# a comment\n\n" + source, "/tmp/ipykernel_2/2.py") == first
    for old, new in (("LIMIT = 3", "LIMIT = 4"), ("[:LIMIT]", ""), ("'b'", "'c'")):
        assert defined(source.replace(old, new), "/tmp/ipykernel_1/1.py") != first
