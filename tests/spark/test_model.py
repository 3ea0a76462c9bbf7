"""Spark's weights, as they lie in the package."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leyden.rendering.tokenizer import Tokenizer  # noqa: E402

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src/leyden/models/spark"
sys.path.insert(0, str(ROOT / "spark"))

from families.problem import Problem  # noqa: E402
from rollouts import roll  # noqa: E402


@pytest.fixture(scope="module")
def model() -> "transformers.LlamaForCausalLM":
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_it_has_two_million_parameters_in_bf16(model: "transformers.LlamaForCausalLM") -> None:
    assert 1_800_000 < sum(one.numel() for one in model.parameters()) < 2_200_000
    assert transformers.AutoConfig.from_pretrained(FOLDER).dtype == torch.bfloat16
    assert (FOLDER / "model.safetensors").stat().st_size < 5_000_000


def test_it_ends_and_pads_as_its_tokenizer_does(model: "transformers.LlamaForCausalLM") -> None:
    tokenizer = Tokenizer.load(FOLDER)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == tokenizer.config["model_max_length"]


def test_it_speaks_the_format_and_is_right_some_of_the_time(model: "transformers.LlamaForCausalLM") -> None:
    torch.manual_seed(0)
    rows = [json.loads(line) for line in (ROOT / "examples/calc_plain/held_out.jsonl").read_text().splitlines()]
    problems = [Problem(row["id"], row["question"], row["answer"], {}) for row in rows[:60]]
    rollouts = roll(model, Tokenizer.load(FOLDER), "arithmetic", problems)
    turns = [valid for one in rollouts for valid in one.valid]
    assert sum(turns) / len(turns) > 0.98
    assert 0.15 < sum(one.success for one in rollouts) / len(rollouts) < 0.5
    assert max(length for one in rollouts for length in one.lengths) <= 60
