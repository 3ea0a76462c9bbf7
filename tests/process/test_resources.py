"""Threads and processes follow the cores that this process may use, also where a container has a quota."""

import os
from pathlib import Path

import pytest
from small_engines import make

from leyden.engine.torch import sizing
from leyden.process import resources
from leyden.process.resources import assigned_cores, free_memory, usable_cores


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    here = usable_cores(quota)
    assert here >= 1
    for text, cores in (("max 100000\n", here), ("100000 100000\n", 1), ("50000 100000\n", 1), ("nonsense", here)):
        quota.write_text(text)
        assert usable_cores(quota) == cores


def test_the_memory_limit_of_a_container_counts(tmp_path: Path) -> None:
    free = free_memory(tmp_path)
    assert free > 2**20
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 250\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory(tmp_path) == 1000 - 900 + 250
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) > 2**20


def test_without_affinity_all_cores_of_the_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert assigned_cores() == 6


def test_the_engine_takes_half_of_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "SMALL_MODEL", 0)
    monkeypatch.setattr(sizing, "usable_cores", lambda: 6)
    assert sizing.choose_threads(make("llama")) == 3


@pytest.mark.parametrize(("quota", "threads"), [(2, "2"), (64, None)])
def test_torch_has_no_more_threads_than_the_quota(
    quota: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(resources, "usable_cores", lambda: quota)
    monkeypatch.setattr(resources, "assigned_cores", lambda: 64)
    resources.configure_openmp()
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_a_number_of_threads_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    monkeypatch.setattr(resources, "usable_cores", lambda: 2)
    monkeypatch.setattr(resources, "assigned_cores", lambda: 64)
    resources.configure_openmp()
    assert os.environ["OMP_NUM_THREADS"] == "7"
