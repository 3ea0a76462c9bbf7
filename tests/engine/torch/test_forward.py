"""A step over rows computes what the model's own forward computes over whole sequences."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from leyden.engine.torch.device_llama import DeviceLlamaForward
from leyden.engine.torch.forward import UNREAD, EngineForward, HubForward, RecomputeForward, Segment
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.llama import LlamaForward

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 150}
LIKE_LLAMA = {
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama, wide heads": LlamaConfig(**GROUPED, head_dim=20),
    "llama, one head a key": LlamaConfig(**SHAPE),
    "llama, yarn": LlamaConfig(**GROUPED, rope_parameters=YARN),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
}
OTHERS = {
    "gpt-neox": GPTNeoXConfig(**SHAPE),
    "gemma3, windows": Gemma3TextConfig(
        **GROUPED,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2, bounded logits": Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=8, attn_logit_softcapping=2.0, final_logit_softcapping=2.0
    ),
    "mistral, window": MistralConfig(**GROUPED, sliding_window=8),
    "llama, biases everywhere": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "qwen2, windows": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "llama, dynamic rope": LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
}
NOT_ALL_ATTENTION = {
    "mamba": MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2),
    "lfm2": Lfm2Config(
        **GROUPED, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention", "conv"], pad_token_id=0
    ),
    "qwen3-next": Qwen3NextConfig(
        **GROUPED,
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}


def make(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        answer: Any = model(torch.tensor([tokens]))
    return torch.log_softmax(answer.logits[0].float(), -1)


def check_steps(model: PreTrainedModel, forward: EngineForward, kv_cache: KVCache, accuracy: float) -> None:
    """Compute prompts in chunks beside single tokens, in slots with gaps between them and of very different lengths."""
    torch.manual_seed(1)
    tokens = {slot: torch.randint(0, 97, (length,)).tolist() for slot, length in {0: 40, 1: 43, 3: 300, 4: 41}.items()}
    expected = {slot: logprobs(model, sequence) for slot, sequence in tokens.items()}
    done = dict.fromkeys(tokens, 0)
    chunks = {0: [17, 1, 1, 1, 1, 1, 18], 1: [20, 19, 1, 1, 1, 1], 3: [100, 190, 6, 1, 1, 1, 1], 4: [34, 1, 1, 1, 4]}
    for step in range(7):
        segments = []
        for slot, sizes in chunks.items():
            if step < len(sizes):
                ids = tokens[slot][done[slot] : done[slot] + sizes[step]]
                segments.append(Segment(slot, done[slot], ids, needs_logits=step != 1 or slot != 3))
        segments.sort(key=lambda one: (len(one.ids) > 1, one.slot))
        kv_cache.reserve(max(one.end for one in segments), [done.get(slot, 0) for slot in range(kv_cache.slots)])
        with torch.no_grad():
            logits = forward(segments)
        needed = [one for one in segments if one.needs_logits]
        assert logits.shape == (len(needed), 97)
        for one, row_logits in zip(needed, logits, strict=True):
            torch.testing.assert_close(
                torch.log_softmax(row_logits, -1), expected[one.slot][one.end - 1], atol=accuracy, rtol=0
            )
        for one in segments:
            done[one.slot] = one.end
    assert done == {slot: len(sequence) for slot, sequence in tokens.items()}


def make_kv_cache(model: PreTrainedModel) -> KVCache:
    return KVCache(5, 600, model.dtype, model.device)


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_llama_like_models_compute_as_their_own_code_does(name: str) -> None:
    model = make(LIKE_LLAMA[name])
    assert LlamaForward.supports(model)
    kv_cache = make_kv_cache(model)
    check_steps(model, LlamaForward(model, kv_cache), kv_cache, 1e-4)


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_the_forward_for_gpus_computes_as_their_own_code_does(name: str) -> None:
    model = make(LIKE_LLAMA[name])
    kv_cache = KVCache(6, 600, model.dtype, model.device)
    check_steps(model, DeviceLlamaForward(model, kv_cache), kv_cache, 1e-4)


def test_the_forward_for_gpus_copies_the_weights_in_its_own_precision() -> None:
    model = make(LIKE_LLAMA["qwen3"])
    kv_cache = KVCache(6, 600, torch.bfloat16, model.device)
    forward = DeviceLlamaForward(model, kv_cache)
    addresses = [tensor.data_ptr() for tensor, _, _ in forward._copies._copies]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    forward.refresh()
    assert [tensor.data_ptr() for tensor, _, _ in forward._copies._copies] == addresses  # captured graphs stay valid
    rounded = make(LIKE_LLAMA["qwen3"]).bfloat16()
    with torch.no_grad():
        for copied, parameter in zip(rounded.parameters(), model.parameters(), strict=True):
            copied.copy_(parameter)
    check_steps(rounded, forward, kv_cache, 0.5)
    check_steps(rounded.float(), forward, kv_cache, 0.5)


@pytest.mark.parametrize("requests", [1, 3, 5, 16])
def test_a_decoding_step_is_padded_to_a_captured_size_and_changes_no_other_slot(requests: int) -> None:
    model = make(LIKE_LLAMA["llama"])
    kv_cache = KVCache(21, 600, model.dtype, model.device)
    forward = DeviceLlamaForward(model, kv_cache)
    with torch.no_grad():
        prompts = [Segment(slot, 0, [slot + 1, 5, 9], False) for slot in range(20)]
        forward(prompts)
        before = [buffer.clone() for buffer in kv_cache.buffers]
        logits = forward([Segment(slot, 3, [7], True) for slot in range(requests)])
    assert logits.shape == (requests, 97)
    for slot in range(requests):
        expected = logprobs(model, [slot + 1, 5, 9, 7])[-1]
        torch.testing.assert_close(torch.log_softmax(logits[slot], -1), expected, atol=1e-4, rtol=0)
    for old, new in zip(before, kv_cache.buffers, strict=True):
        assert torch.equal(old[requests:20], new[requests:20])
        assert torch.equal(old[:requests, :, :3], new[:requests, :, :3])


def test_unread_tokens_are_the_last_sampled_ones_of_their_slots() -> None:
    for config in (LIKE_LLAMA["qwen2"], OTHERS["gpt-neox"]):
        model = make(config)
        kinds: list[type[Any]] = [HubForward]
        if LlamaForward.supports(model):
            kinds += [LlamaForward, DeviceLlamaForward]
        for kind in kinds:
            kv_cache = KVCache(5, 600, model.dtype, model.device)
            forward = kind(model, kv_cache)
            sampled = torch.tensor([11, 12, 13, 14])
            with torch.no_grad():
                forward([Segment(0, 0, [1, 2], False), Segment(2, 0, [3, 4], False)], sampled)
                logits = forward([Segment(0, 2, [UNREAD], True), Segment(2, 2, [50], True)], sampled)
            for found, tokens in zip(logits, ([1, 2, 11], [3, 4, 50]), strict=True):
                expected = logprobs(model, tokens)[-1]
                torch.testing.assert_close(torch.log_softmax(found, -1), expected, atol=1e-4, rtol=0)


def test_in_float64_they_agree_to_rounding() -> None:
    model = make(LIKE_LLAMA["qwen3"], torch.float64)
    kv_cache = make_kv_cache(model)
    check_steps(model, LlamaForward(model, kv_cache), kv_cache, 1e-5)  # HF rotates positions in float32


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_their_own_code(name: str) -> None:
    model = make(OTHERS[name])
    assert HubForward.supports(model) and not LlamaForward.supports(model)
    kv_cache = make_kv_cache(model)
    if name == "llama, dynamic rope":
        model.config.max_position_embeddings = 600
    check_steps(model, HubForward(model, kv_cache), kv_cache, 1e-4)


def test_a_trainer_that_sets_train_mode_does_not_reach_the_engine() -> None:
    model = make(LlamaConfig(**GROUPED, attention_dropout=0.9, attention_bias=True))
    kv_cache = make_kv_cache(model)
    forward = HubForward(model, kv_cache)
    model.train()
    segments = [Segment(0, 0, [1, 2, 3, 4], True)]
    with torch.no_grad():
        assert torch.equal(forward(segments), forward(segments))
    assert model.training


def test_weights_written_in_place_are_seen() -> None:
    for config in (LIKE_LLAMA["qwen3"], OTHERS["gpt-neox"]):
        model = make(config)
        kv_cache = make_kv_cache(model)
        forward: EngineForward = (LlamaForward if LlamaForward.supports(model) else HubForward)(model, kv_cache)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        forward.refresh()
        check_steps(model, forward, kv_cache, 1e-4)


@pytest.mark.parametrize("name", NOT_ALL_ATTENTION)
def test_models_that_keep_more_than_keys_and_values_recompute_whole_sequences(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(NOT_ALL_ATTENTION[name])
    assert not HubForward.supports(model) and not LlamaForward.supports(model)
    check_steps(model, RecomputeForward(model, model.dtype), make_kv_cache(model), 1e-4)
    assert sum("recomputes its whole sequence" in message for message in caplog.messages) == 1


def test_recomputed_sequences_start_again_with_their_slots() -> None:
    model = make(NOT_ALL_ATTENTION["lfm2"])
    forward = RecomputeForward(model, model.dtype)
    with torch.no_grad():
        forward([Segment(0, 0, [7] * 30, True)])
        assert not len(forward([Segment(0, 0, [1, 2, 3], False), Segment(1, 0, [5, 5], False)]))
        found = forward([Segment(0, 3, [4], True)])
    torch.testing.assert_close(torch.log_softmax(found[0], -1), logprobs(model, [1, 2, 3, 4])[-1], atol=1e-4, rtol=0)
