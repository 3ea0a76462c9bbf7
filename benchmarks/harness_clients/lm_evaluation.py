"""A multiple choice and the perplexity of a text by lm-eval, which reads the logprobs of prompts (echo, logprobs)."""

import os
from pathlib import Path

from conversation import finish
from datasets import Dataset
from lm_eval import simple_evaluate

SPARK = Path(__file__).parents[2] / "src" / "leyden" / "models" / "spark"
questions = [{"question": f"2 + {b} =", "choices": [str(2 + b), "apples"], "answer": 0} for b in (3, 4)]
texts = [{"text": "The sum of two and three is five, «fünf» 🎉."}]
choice = {
    "task": "sums",
    "custom_dataset": lambda **_: {"test": Dataset.from_list(questions)},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
}
rolling = {
    "task": "text",
    "custom_dataset": lambda **_: {"test": Dataset.from_list(texts)},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
options = {"model": "agent", "base_url": f"{os.environ['OPENAI_BASE_URL']}/completions", "tokenizer": str(SPARK)}
evaluated = simple_evaluate(model="local-completions", model_args=options, tasks=[choice, rolling], bootstrap_iters=0)
results = evaluated["results"]
finish([results["sums"]["acc,none"], results["text"]["word_perplexity,none"]])
