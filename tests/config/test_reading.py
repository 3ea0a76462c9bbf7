"""A configuration that is wrong is one line that says what to change."""

import tomllib
from pathlib import Path

import pytest

from leyden.config import AdapterConfig, ConfigError, override, read_config, read_file, to_toml

WHOLE = {"run": "calc", "agent": "agent.py:solve", "tasks": "tasks.jsonl"}


def wrong(text: str, folder: Path) -> str:
    path = folder / "calc.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(read_file(path))
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "")


def test_a_file_names_the_run_and_is_where_its_files_are(tmp_path: Path) -> None:
    (tmp_path / "calc.toml").write_text('agent = "agent.py:solve"\ntasks = "tasks.jsonl"\n')
    config = read_config(read_file(tmp_path / "calc.toml"))
    assert config.run == "calc"
    assert config.base == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'tasks = "t"\n[training]\nstepz = 3\n',
            "/calc.toml:3: `training.stepz` is no key: did you mean `training.steps`?",
        ),
        ('tasks = "t"\nagent = 3\n', "/calc.toml:2: `agent`: expected text, got a whole number"),
        ("[training]\nsteps = -1\n", "/calc.toml:2: `training.steps`: expected a whole number >= 0"),
        ("[training]\nmin_group = 20\n", "/calc.toml:2: `training.min_group` is 20, more than"),
        ("[training]\ngroup_size = 1\n", "(1): set `training.min_group = 1` at the most, or raise"),
        ("[workers]\nprocesses = 4\nconcurrency = 2\n", "/calc.toml:3: `workers.concurrency` is 2, less than"),
        ("[sampling]\ntop_p = 0.9\n", "set `training.allow_biased_sampling = true`"),
        ("[algorithm]\ncorrection_low = 3.0\n", "/calc.toml:2: `algorithm.correction_low` is 3.0, more than"),
        ('run = "../evil"\n', "/calc.toml:1: `run`: expected letters, digits and . _ : @ ~ -, beginning with a letter"),
        ("held_out = 1.5\n", "`held_out`: expected a file of tasks, a whole number of tasks, or a fraction of them"),
        ("test = -1\n", "/calc.toml:1: `test`: expected a file of tasks"),
        ('tasks = "t"\n', "`agent` is missing: set it"),
        ("tasks = \n", "/calc.toml: Invalid value"),
        ("[training]\n[training]\n", "/calc.toml: [training] is there twice (at line 2, column 10)"),
        ("[training.lora]\n[training.lora]\n", "/calc.toml: [training.lora] is there twice (at line 2"),
        ("[train]\nsteps = 3\n", "/calc.toml:1: `train` is no key: did you mean `training`?"),
        ("agent = agent.py:solve\n", "/calc.toml: Invalid value (at line 1, column 9): text stands in quotes"),
        ("steps = 3\n", "/calc.toml:1: `steps` is no key: did you mean `training.steps`?"),
        ("lr = 1e-4\n", "`lr` is no key: did you mean `training.learning_rate`?"),
        ('[training]\nsteps = "x"\n', "/calc.toml:2: `training.steps`: expected a whole number, got text"),
        ("[elsewhere]\nx = 1\n", "`elsewhere` is no key: the keys there are run, agent"),
        (
            '[services.db]\nmake = "env.py:Database"\ncuont = 3\n',
            "/calc.toml:3: `services.NAME.cuont` is no key: did you mean `services.NAME.count`?",
        ),
        ("[services.db]\ncount = 3\n", "`services.NAME`: a service needs either `make` or `command`"),
        ('[services.task]\nmake = "e:f"\n', "`services.task` cannot be the name of a parameter"),
        ('[services.db]\ncommand = "serve"\n', "`command` has no {port}"),
        (
            'tasks = "t"\n[training]\nlora = 8\n',
            "/calc.toml:3: `training.lora`: expected a section, got a whole number: its keys are rank, alpha, modules, "
            "as in `training.lora.rank=8`",
        ),
        ('engine = "vllm"\n', ', as in `engine.kind="vllm"`'),
        ('upstream = "http://host"\n', "`upstream`: expected a section, got text: its keys are url, timeout_s"),
        ('[training]\nlora = "on"\n', "expected a section, got text: its keys are rank, alpha, modules"),
        (
            "[policies.a]\nlora = 8\n",
            "expected true or false or a section, got a whole number: its keys are rank, alph",
        ),
        (
            "policies = 3\n",
            "/calc.toml:1: `policies`: expected a section, got a whole number: write `policies.NAME.K",
        ),
        ('roles = "critic"\n', "`roles`: expected a section, got text: write `roles.NAME=VALUE`"),
        ("[rollout]\nmax_calls = []\n", "`rollout.max_calls`: expected a whole number or a section, got a list"),
        ("[training.lora]\nrnk = 8\n", "`training.lora.rnk` is no key: did you mean `training.lora.rank`?"),
        ("[training]\nrank = 8\n", "`training.rank` is no key: did you mean `training.lora.rank`?"),
        ("[training]\ntemperature = 1\n", "did you mean `sampling.temperature`?"),
        ("learning_rat = 1\n", "did you mean `training.learning_rate`?"),
        ("max_new_tokens = 3\n", "did you mean `rollout.max_tokens` or `sampling.max_tokens`?"),
        ('[engine]\nkind = "sglang"\n', "/calc.toml:2: `engine.kind`: expected auto, torch or vllm, got 'sglang'"),
        ('report = ["wand"]\n', "`report[0]`: expected tensorboard, wandb, mlflow or trackio, got 'wand'"),
        ('[routes]\ngpt = "elsewhere"\n', "'gpt' is served by 'elsewhere': write policy, upstream or"),
        ("[routes]\ngpt = {anwser = 'x'}\n", "did you mean `routes.NAME.answer`?"),
        ('[routes]\ngpt = "upstream"\n', "is served upstream: set `upstream.url`"),
        ('[upstream]\nurl = "http://me:secret@host"\n', "`upstream.url` has a user or a password"),
        ('[roles]\ncritic = "("\n', "/calc.toml:2: `roles.critic` cannot be used: it is not a regular expression"),
        ('[roles]\ncritic = "(?=a)"\n', "`roles.critic` cannot be used: write it in the syntax of ECMA 262"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    assert says in wrong(text, tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "nowhere.toml")
    (tmp_path / "calc.toml").touch()
    (tmp_path / "calc.py").touch()
    with pytest.raises(ConfigError, match=r"calc: No such file or directory \(did you mean calc.toml\?\)"):
        read_file(tmp_path / "calc")


def test_settings_are_put_on_top_and_are_toml_or_text() -> None:
    config = read_config(
        override(WHOLE, ["training.steps=20", "model=Qwen/Qwen3-0.6B", 'report=["wandb"]', "held_out=0.25"])
    )
    assert config.training.steps == 20
    assert config.model == "Qwen/Qwen3-0.6B"
    assert config.report == ("wandb",)
    assert config.held_out == 0.25
    assert "training" not in WHOLE


def test_a_run_that_says_nothing_of_it_corrects_for_what_sampler_and_trainer_compute_differently() -> None:
    assert read_config(WHOLE).algorithm.correction != "none"


@pytest.mark.parametrize("setting", ["steps", "=3", "model.x=3", "training..steps=3", "training.=3"])
def test_a_setting_that_sets_nothing(setting: str) -> None:
    with pytest.raises(ConfigError):
        read_config(override({**WHOLE, "model": "spark"}, [setting]))


def test_what_is_written_out_reads_back_the_same(tmp_path: Path) -> None:
    config = read_config(override(WHOLE, ["sampling.max_tokens=64", "training.roles=['writer']", "held_out=12"]))
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert read_config(read_file(path)) == config
    assert "learning_rate" in path.read_text()


@pytest.mark.parametrize(("where", "estimate"), [("loss", "k3"), ("reward", "k1")])
def test_an_estimate_that_is_not_named_is_written_out(where: str, estimate: str) -> None:
    config = read_config(override(WHOLE, [f"algorithm.kl_in={where}"]))
    assert f'kl_estimate = "{estimate}"' in to_toml(config)
    assert config == read_config(override(WHOLE, [f"algorithm.kl_in={where}", f"algorithm.kl_estimate={estimate}"]))


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"url": "localhost:8000"}, "write unix:/path/of/its.sock or http://host:port"),
        ({"url": "http://localhost:8000", "kind": "torch"}, "leave one of them out"),
        ({"url": "http://localhost:8000", "replicas": 2}, "one server that runs already: leave out `engine.replicas`"),
        ({"kind": "torch", "tensor_parallel": 2}, "is for vLLM, and `engine.kind` is"),
        ({"replicas": 2, "tensor_parallel": 2, "devices": [0, 1]}, "names 2 devices, and 2 replicas of 2 .* need 4"),
    ],
)
def test_settings_of_an_engine_that_contradict_each_other_are_refused(engine: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_config({"run": "r", "agent": "a", "tasks": "t", "engine": engine})


def test_replicas_are_refused_in_a_deterministic_run() -> None:
    with pytest.raises(ConfigError, match=r"`engine.replicas` is above 1, .* and `deterministic` is set"):
        read_config({"run": "r", "agent": "a", "tasks": "t", "deterministic": True, "engine": {"replicas": 2}})


@pytest.mark.parametrize(
    "setting", ["training.roles=librarian", "workers.readable=/data", "report=wandb", "workers.network='*'"]
)
def test_one_text_is_a_list_of_one(setting: str) -> None:
    section, _, name = setting.partition("=")[0].rpartition(".")
    config = read_config(override(WHOLE, [setting]))
    value = getattr(getattr(config, section) if section else config, name)
    assert value == (setting.partition("=")[2].strip("'"),)


def test_a_section_that_may_be_left_out_is_switched_on_with_its_defaults_and_off() -> None:
    document = {"run": "r", "agent": "a", "tasks": "t", "training": {"lora": {"rank": 4}}}
    for setting, lora in (("true", AdapterConfig()), ("false", None)):
        assert read_config(override(document, [f"training.lora={setting}"])).training.lora == lora


def test_settings_may_repair_keys_that_do_not_go_together(tmp_path: Path) -> None:
    file = tmp_path / "calc.toml"
    file.write_text('agent = "a"\ntasks = "t"\n[training]\ngroup_size = 1\n')
    assert read_config(read_file(file, ["training.group_size=4"])).training.group_size == 4
    for settings in ([], ["training.steps=3"]):
        with pytest.raises(ConfigError, match=r"calc\.toml.*: `training.min_group` is 2, more than"):
            read_file(file, settings)


def test_a_python_file_is_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("import openai\n")
    with pytest.raises(ConfigError, match=r"is Python and no configuration: .* agent = .agent\.py:FUNCTION"):
        read_file(file)


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "calc.toml").write_bytes('agent = "caf\u00e9.py:solve"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"calc\.toml is not text in UTF-8"):
        read_file(tmp_path / "calc.toml")


def test_a_limit_may_be_a_schedule_over_steps() -> None:
    document = override(WHOLE, ["rollout.max_calls={1 = 4, 20 = 8}", "sampling.max_tokens.10=64"])
    config = read_config(document)
    assert (config.rollout.max_calls, config.sampling.max_tokens) == ({1: 4, 20: 8}, {10: 64})
    assert read_config(tomllib.loads(to_toml(config))) == config
    assert read_config({**WHOLE, "rollout": {"max_calls": {1: 4}}}).rollout.max_calls == {1: 4}  # from Python
    with pytest.raises(ConfigError, match=r"`rollout\.max_calls`: one of its keys: expected a whole number >= 1"):
        read_config(override(document, ["rollout.max_calls={0 = 4}"]))
