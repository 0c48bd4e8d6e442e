"""Keys that published configs have beside those of the reference implementation.

They say what the architecture does anyway, so a config with them is the one without; another value
would be another model, and is refused.
"""

import json
import pathlib

import pytest

from jaxinfra.errors import ConfigError
from jaxinfra.hf import from_hf_config

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"


def values(name, **changes):
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        pytest.param("llama", {"max_sequence_length": 2048}, id="llama-7b"),
        pytest.param(
            "llama",
            {
                "is_llama_config": True,
                "rope_interleaved": False,
                "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            },
            id="smollm2",
        ),
        pytest.param("qwen2", {"use_mrope": False}, id="deepseek-r1-distill-qwen"),
        pytest.param(
            "qwen3_moe",
            {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
            id="qwen3-coder-30b-a3b",
        ),
        pytest.param("gemma2", {"sliding_window_size": 7}, id="gemma-2-9b"),
        pytest.param(
            "phi3",
            {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
            id="phi-4-mini",
        ),
        pytest.param("gpt2", {"_num_labels": 1}, id="distilgpt2"),
        pytest.param("gpt2", {"n_special": 0, "predict_special_tokens": True}, id="gpt2-medium"),
        pytest.param("gpt2", {"output_past": True}, id="gpt2-xl"),
    ],
)
def test_keys_without_effect(name, keys):
    assert from_hf_config(values(name, **keys)) == from_hf_config(values(name))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("llama", {"rope_interleaved": True}, "halves of a head are rotated here"),
        ("qwen2", {"use_mrope": True}, "one position here"),
        ("qwen2", {"qkv_bias": False}, "have biases here"),
        ("qwen2", {"use_qk_norm": True}, "no norms of queries and keys"),
        ("qwen3", {"use_qk_norm": False}, "queries and keys are normalized here"),
        ("qwen3_moe", {"qkv_bias": True}, "no such bias"),
        ("qwen3_moe", {"use_qk_norm": False}, "queries and keys are normalized here"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "no shared experts"),
        ("gemma2", {"sliding_window_size": 8}, "sliding_window says otherwise"),
        ("phi3", {"full_attn_mod": 2}, "attend alike"),
        ("phi3", {"interpolate_factor": 2}, "rope_scaling alone"),
        ("phi3", {"lm_head_bias": True}, "logits have no bias"),
    ],
)
def test_another_value_is_another_model(name, keys, message):
    with pytest.raises(ConfigError, match=message):
        from_hf_config(values(name, **keys))


def test_a_factor_that_programs_take_differently_is_refused():
    """DeepSeek-R1-0528-Qwen3-8B has one, whose product with YaRN's own is 1."""
    scaling = values("qwen2_yarn")["rope_parameters"]
    with pytest.raises(ConfigError, match=r"attn_factor=0\.878: .*own 1\.13863 by it"):
        from_hf_config(values("qwen2_yarn", rope_parameters=scaling | {"attn_factor": 0.878}))
