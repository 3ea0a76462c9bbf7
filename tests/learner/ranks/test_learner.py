"""Two and three ranks compute what one process does: losses, gradients, weights, checkpoints. Engines get the weights.

One set of processes serves all cases of a size, because each takes seconds to start.
"""

import asyncio
import errno
import json
import os
import resource
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from broadcasts import check_broadcasts
from forked_commands import start_command
from modelserving import eventually
from msgspec.structs import replace
from receiving_vllm import broadcasting_over_tcp
from smallpolicy import some_samples
from torch.distributed import TCPStore
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from leyden.config import AdapterConfig, AlgorithmConfig, Config, ConfigError, TrainingConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.errors import RankLost
from leyden.learner.loading import read_model
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.moments import beside_and_moments
from leyden.learner.objective import objective_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import Learner, OldLogprobs, TrainerState, Update, UpdateMetrics
from leyden.learner.ranks import processes
from leyden.learner.ranks.launch import LOOPBACK, LaunchedProcess
from leyden.learner.ranks.learner import RankedLearner
from leyden.learner.ranks.messages import RankSetup
from leyden.learner.ranks.processes import RankProcesses
from leyden.learner.sharded_files import read_shards
from leyden.models.source import ModelSource
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.disk_room import is_disk_full
from leyden.process.child import ChildProcess, module_command
from leyden.process.place import HERE, Place
from leyden.process.rotating_log import RotatingLog
from leyden.runs.checkpoint_files import find_damage, latest_checkpoint

LORA = AdapterConfig(rank=2, alpha=4, modules=("query_key_value", "dense"))


def config_of(algorithm: AlgorithmConfig | None = None, **training: object) -> Config:
    numbers = TrainingConfig(learning_rate=1e-2, steps=9, **training)
    return Config(run="r", agent="a", tasks="t", training=numbers, algorithm=algorithm or AlgorithmConfig())


CASES: dict[str, Config] = {
    "trees": config_of(AlgorithmConfig(correction_level="rollout", correction_ratio="geometric")),
    "rows with kl": config_of(AlgorithmConfig(kl=0.1), layout="rows", batch_tokens=64),
    "lora with kl": config_of(AlgorithmConfig(kl=0.1), lora=LORA, gradient_checkpointing=True),
    "critic": config_of(AlgorithmConfig(credit="gae", advantage="ppo")),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A model whose norms are computed in the precision of its weights, which Llama's are not."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    return ModelSource("neox", folder)


@pytest.fixture
def over_tcp() -> Iterator[None]:
    """Sockets in the place of NCCL."""
    with broadcasting_over_tcp():
        yield


def launched(size: int, store: TCPStore) -> LaunchedProcess:
    """The first of some processes that torchrun has started. The others, which join it, are forks: none imports."""
    processes = [LaunchedProcess(rank, size, "127.0.0.1", store.port) for rank in range(size)]
    for one in processes[1:]:
        start_command("-c", f"from leyden.learner.ranks.launch import *; join({one!r})")
    return processes[0]


class ForkedRank:
    """A rank as `ChildProcess` starts it, but in a fork: it imports nothing, which takes longer than what it does."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        log: RotatingLog,
        place: Place,
    ) -> None:
        assert command == module_command("leyden.learner.ranks.rank", *pass_fds) and place == HERE
        ours, theirs = socket.socketpair()
        output = log.open()
        with ours, theirs:
            process = start_command("-c", _BE_A_RANK, stdin=theirs.fileno(), stdout=output, stderr=output)
            variables = {name: environment[name] for name in LOOPBACK}
            socket.send_fds(ours, [json.dumps(variables).encode()], list(pass_fds))
        os.close(output)
        self.pid, self._ended = process.pid, Future[int]()
        self._ended.set_running_or_notify_cancel()  # so that no waiter can cancel it
        threading.Thread(target=lambda: self._ended.set_result(process.wait()), daemon=True).start()

    def kill(self) -> None:
        if not self._ended.done():
            os.kill(self.pid, signal.SIGKILL)

    @property
    def status(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.wrap_future(self._ended)


_BE_A_RANK = """
import json, os, socket
from leyden.learner.ranks.rank import serve

variables, descriptors, _, _ = socket.recv_fds(socket.socket(fileno=0), 1000, 2)
os.environ.update(json.loads(variables))
serve(*descriptors)
"""


def alone(config: Config, source: ModelSource, run: Path) -> LocalLearner:
    """The learner in this process."""
    torch.manual_seed(config.seed)
    algorithm = algorithm_of(config)
    model = read_model(source.folder, torch.float64).eval()
    policy = Policy(model, config.training, algorithm.critic, algorithm.reference)
    checkpoints = Checkpoints(run, config.policy, source, config.checkpoints)
    return LocalLearner({config.policy: TrainedPolicy(policy, objective_of(config), checkpoints)})


async def ranked(
    ranks: RankProcesses, config: Config, source: ModelSource, run: Path, dtype: str = "float64"
) -> RankedLearner:
    algorithm = algorithm_of(config)
    setup = RankSetup(config, source, dtype, algorithm.critic, algorithm.reference)
    learner = RankedLearner(ranks, setup, Checkpoints(run, config.policy, source, config.checkpoints))
    assert await learner.start() is None
    return learner


async def train(learner: Learner, config: Config, number: int = 7) -> list[UpdateMetrics]:
    """Make three updates, as the orchestrator does: one with fewer samples than there are ranks, and one in parts."""
    found, policy = [], config.policy
    for step in (1, 2, 3):
        await learner.start_step(policy, step)
        samples = some_samples(1 if step == 2 else number, seed=step)
        evaluation = await learner.evaluate(policy, samples)
        values = evaluation.values or [0.0] * len(samples)
        samples = [replace(one, old_value=value, target=0.5) for one, value in zip(samples, values, strict=True)]
        reference = await learner.logprobs(policy, samples, reference=True) if config.algorithm.kl else None
        proximal = await learner.logprobs(policy, samples)
        update = Update(samples, OldLogprobs(proximal, reference, evaluation.ratios))
        if step == 3:
            first, rest = range(3), range(3, len(samples))
            await learner.accumulate_part(policy, Update(samples[:3], update.old_logprobs.select(first)))
            update = Update(samples[3:], update.old_logprobs.select(rest), scale=0.5)
        found.append(await learner.accumulate(policy, update))
        await learner.apply(policy)
    return found


async def weights(learner: Learner, config: Config) -> dict[str, torch.Tensor]:
    return await asyncio.to_thread(lambda: {k: v.clone() for k, v in learner.weights(config.policy).tensors()})


def assert_same_metrics(ours: list[UpdateMetrics], theirs: list[UpdateMetrics]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.tokens, one.loss) == (other.tokens, pytest.approx(other.loss, rel=1e-9, abs=1e-9))
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-9)
        assert one.statistics == pytest.approx(other.statistics, rel=1e-9, abs=1e-9)
        assert one.critic_loss == pytest.approx(other.critic_loss, rel=1e-9) if other.critic_loss is not None else True


async def assert_same_weights(ours: Learner, theirs: Learner, config: Config) -> None:
    one, other = await weights(ours, config), await weights(theirs, config)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-9)


async def assert_same_gradients(ranks: RankProcesses, plain: LocalLearner, config: Config, folder: Path) -> None:
    """Compare the moments of each parameter: the first is a sum of the gradients of all updates."""
    expected = beside_and_moments(plain._policies[config.policy].policy)
    assert any(name.endswith("exp_avg") and bool(tensor.any()) for name, tensor in expected.items())
    await ranks.call("write", folder, patient=True)
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    read_shards(found, folder)
    for name, tensor in expected.items():
        scale = tensor.abs().max().item() if tensor.numel() else 0.0
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-9, atol=1e-9 * scale, msg=lambda text, of=name: f"{of}: {text}"
        )


async def test_ranks_learn_what_one_process_does_and_say_which_of_them_is_lost(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_tcp: None
) -> None:
    kinds = iter((ForkedRank, ChildProcess, ForkedRank))  # of the two, and the first of the three
    monkeypatch.setattr(processes, "ChildProcess", lambda *words, **how: next(kinds)(*words, **how))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = RankProcesses(3, tmp_path, timeout_s=15, launch=launched(3, store))
    async with RankProcesses(2, tmp_path, timeout_s=60) as two, others as three:
        config = config_of()
        serving = await ranked(three, config, source, tmp_path / "run", dtype="float32")
        served = read_model(source.folder, torch.float32)
        await check_broadcasts(three, serving.weights(config.policy), served, monkeypatch)
        # one that waits for weights must not keep ranks from sending them
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        for name, config in CASES.items():
            with alone(config, source, tmp_path / "alone") as plain:
                expected = await train(plain, config)
                for ranks in two, three:
                    learner = await ranked(ranks, config, source, tmp_path / name)
                    assert_same_metrics(await train(learner, config), expected)
                    await assert_same_weights(learner, plain, config)
                await assert_same_gradients(three, plain, config, tmp_path / f"{name} shards")
        config = CASES["critic"]
        of_two, of_three = [await ranked(ranks, config, source, tmp_path / "run") for ranks in (two, three)]
        await train(of_two, config)
        await check_checkpoints(two, three, of_two, of_three, config, source, tmp_path / "run")
        await of_two.save(config.policy, TrainerState(step=9, version=9))
        both = [asyncio.create_task(work) for work in (train(of_two, config), of_two.finish_save(config.policy))]
        os.kill(two.pids[1], signal.SIGKILL)
        for training_or_writing in both:
            with pytest.raises(RankLost, match=r"of 2 training processes, rank 1 ended \(.*SIGKILL"):
                await training_or_writing
        assert sorted(folder.name for folder in (tmp_path / "run").iterdir()) == ["step-3", "step-6"]
        with pytest.raises(RankLost, match="rank 1 ended"):
            await two.wait_failed()
        os.kill(three.pids[0], signal.SIGSTOP)
        with pytest.raises(RankLost, match="of 3 training processes, rank 0 hangs: it has not answered for 15 s"):
            await train(of_three, config)
    await eventually(lambda: not any(map(psutil.pid_exists, (*two.pids, *three.pids))))


async def check_checkpoints(
    two: RankProcesses,
    three: RankProcesses,
    of_two: RankedLearner,
    of_three: RankedLearner,
    config: Config,
    source: ModelSource,
    run: Path,
) -> None:
    """A checkpoint of two ranks is restored in one process, and one of that on three; a full disk is waited for."""
    policy = config.policy
    await of_two.save(policy, TrainerState(step=3, version=3))
    resource.prlimit(two.pids[1], resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    with pytest.raises(OSError) as full:
        await of_two.finish_save(policy)
    assert is_disk_full(full.value) and latest_checkpoint(run, policy) is None
    resource.prlimit(two.pids[1], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await of_two.finish_save(policy)
    assert find_damage(run / "step-3") is None and await of_two.version_of(policy, 3) == 3
    with alone(config, source, run) as plain:
        assert (await plain.restore(policy)).step == 3
        await assert_same_weights(of_two, plain, config)
        assert_same_metrics(await train(of_two, config), await train(plain, config))
        await plain.save(policy, TrainerState(step=6, version=6))
        await plain.finish_save(policy)
        os.kill(three.pids[0], signal.SIGSTOP)  # as one that takes longer to read a large model than ranks wait
        restoring = asyncio.create_task(of_three.restore(policy))
        await asyncio.sleep(three._timeout_s + 1)
        os.kill(three.pids[0], signal.SIGCONT)
        assert (await restoring).step == 6
        await assert_same_weights(of_three, plain, config)
        assert_same_metrics(await train(of_three, config), await train(plain, config))
        await of_three.load(policy, 3)
        await plain.load(policy, 3)
        await assert_same_weights(of_three, plain, config)
    name = "gpt_neox.final_layer_norm.weight"
    read = read_model(run / "step-3", torch.float64).get_parameter(name).detach()
    torch.testing.assert_close(read, (await weights(of_three, config))[name])


def names_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


async def test_ranks_that_were_started_end_if_another_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ChildProcess] = []

    def start(*arguments: Any, **named: Any) -> ChildProcess:
        if started:
            raise OSError(errno.EAGAIN, "no more processes")
        started.append(ChildProcess(*arguments, **named))
        return started[0]

    monkeypatch.setattr(processes, "ChildProcess", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="no more processes"):
        async with RankProcesses(2, tmp_path):
            pass
    assert started[0].status is not None
    assert names_in(tmp_path) == ["rank-0.log"]


async def test_ranks_that_have_no_place_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPlaces:
        address = "127.0.0.1"

        async def find(self) -> list[Place]:
            raise ConfigError("no node has room")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = RankProcesses(2, tmp_path, elsewhere=NoPlaces())
    with pytest.raises(ConfigError, match="no node has room"):
        async with ranks:
            pass
    assert names_in(tmp_path) == []


@pytest.mark.slow
async def test_a_rank_that_hangs_while_it_reads_the_model_is_found(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RankProcesses(2, tmp_path) as ranks:
        await ranks.call("free_memory")  # both have started
        monkeypatch.setattr(processes, "FILES_TIMEOUT_S", 1.0)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        with pytest.raises(RankLost, match="rank 1 hangs: it has not answered for 1 s"):
            await ranked(ranks, CASES["trees"], source, tmp_path)
