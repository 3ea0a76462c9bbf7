"""benchmarks/chaos.py in a short form, and the proof that it finds a store that acknowledges before it commits."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VLLM_PYTHON = os.environ.get("LEYDEN_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
sys.path.insert(0, str(ROOT / "benchmarks"))

import chaos  # noqa: E402  # its folder is on the path only now


def test_each_fault_once_and_the_accounts_are_exact(tmp_path: Path) -> None:
    # an engine, which the slow test kills too, imports torch: longer than all else
    faults = [fault for fault in chaos.FAULTS if fault != "engine"]
    accounts = chaos.run(tmp_path, faults, training=0, seed=1)
    assert accounts == chaos.Accounts(kills=len(faults))


@pytest.mark.slow
def test_a_store_that_acknowledges_before_it_commits_shows_losses(tmp_path: Path) -> None:
    launcher = ROOT / "tests" / "early_acknowledging_server.py"
    accounts = chaos.run(tmp_path, ["server"] * 4, training=0, seed=1, launcher=launcher)
    assert accounts.lost > 0


@pytest.mark.slow
@pytest.mark.skipif(not Path(VLLM_PYTHON).exists(), reason="there is no vLLM: run `make vllm-env`")
def test_vllm_and_all_other_processes_of_a_training_are_killed_and_the_accounts_are_exact(tmp_path: Path) -> None:
    kills = len(chaos.KILLS_WITH_VLLM)
    accounts = chaos.run(tmp_path, (), training=kills, seed=1, vllm=VLLM_PYTHON)
    assert accounts == chaos.Accounts(kills=kills)


@pytest.mark.slow
def test_a_thousand_faults_and_the_accounts_are_exact(tmp_path: Path) -> None:
    accounts = chaos.run(tmp_path, chaos.FAULTS * 110, training=40, seed=2)
    assert (accounts.lost, accounts.twice, accounts.left_behind) == (0, 0, 0)
    assert accounts.kills >= 1000
