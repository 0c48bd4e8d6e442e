"""Hugging Face configs into ours and back: strict, in both forms of rotary settings."""

import dataclasses
import json
import pathlib

import pytest

from jaxinfra.config.model import stacked
from jaxinfra.config.presets import MODELS
from jaxinfra.config.rope import (
    LongRopeScaling,
    NtkScaling,
    RopeConfig,
)
from jaxinfra.errors import ConfigError
from jaxinfra.hf import from_hf_config, to_hf_config

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
MIMO = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}


def values(name, **changes):
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


def without(name, *keys):
    return {key: value for key, value in values(name).items() if key not in keys}


def rope_of(config):
    return config.blocks[0].mixer.rope


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name):
    given = values(name)
    config = from_hf_config(given)
    written = to_hf_config(config, model_type=given["model_type"])
    assert from_hf_config(written) == config
    # Another architecture may say the same model; it must then say all of it.
    assert from_hf_config(to_hf_config(config)) == config


# The scaled settings as transformers 4 wrote them: beside rope_theta, under another name.
@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("llama_linear", {"type": "linear", "factor": 3.0}),
        (
            "llama3",
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        ("qwen2_yarn", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    ],
)
def test_older_and_newer_rope_keys_say_the_same(name, older):
    old = without(name, "rope_parameters") | {"rope_theta": 100.0, "rope_scaling": older}
    assert from_hf_config(old) == from_hf_config(values(name))


def test_older_longrope_keys():
    new = values("phi3_longrope")
    factors = {key: new["rope_parameters"][key] for key in ("short_factor", "long_factor")}
    old = without("phi3_longrope", "rope_parameters") | {
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", **factors},
    }
    config = from_hf_config(old)
    assert config == from_hf_config(new)
    scaling = rope_of(config).scaling
    assert isinstance(scaling, LongRopeScaling)
    # sqrt(1 + ln(64/30) / ln(30)): how much longer the context became decides.
    assert scaling.attention_factor == pytest.approx(1.1057894, abs=1e-7)


def test_contradicting_rope_keys_are_refused():
    both = values("llama", rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=100.0)
    with pytest.raises(ConfigError, match=r"rope_scaling=.* and rope_parameters="):
        from_hf_config(both)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
            "original_max_position_embeddings=8: the reference begins beyond",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings=0 must be at least 1",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 5.0, "high_freq_factor": 4.0},
            "at most the second",
        ),
        ({"rope_type": "warped"}, "rope type 'warped' is not supported; known: default"),
        ({"rope_type": "linear"}, "required key 'factor'"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2' is no int or float"),
        ({"rope_type": "linear", "factor": 2.0, "warp": 1}, "unknown keys.*warp=1"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "rotates whole heads"),
    ],
)
def test_rope_settings_that_cannot_be_followed_are_refused(scaling, message):
    with pytest.raises(ConfigError, match=message):
        from_hf_config(values("llama", rope_parameters=scaling))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "llame"}, "'llame' is not supported; did you mean 'llama'"),
        ("llama", {"model_type": None}, "model_type=None: the config does not name"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ("llama", {"head_gain": 2.0}, "unknown keys.*head_gain=2.0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized checkpoints"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ("llama", {"hidden_size": 36.5}, "hidden_size=36.5 is no int"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True is no int"),
        ("llama", {"num_key_value_heads": 4}, "not a multiple of num_kv_heads"),
        ("llama", {"sliding_window": 7}, "sliding_window=7: this architecture has no windows"),
        ("mistral", {"attention_bias": True}, "no such bias"),
        ("gemma2", {"use_bidirectional_attention": True}, "attention here is causal"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_activation says otherwise"),
        ("qwen2", {"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        ("qwen2", {"use_sliding_window": False}, "no sliding_window is set"),
        ("qwen2", MIMO | {"num_nextn_predict_layers": 1}, "attends like the first layer"),
        ("gpt2", {"n_ctx": 12}, "must equal n_positions"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob is null"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave is null"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention is not supported"),
    ],
)
def test_keys_that_cannot_be_followed_are_refused(name, changes, message):
    from_hf_config(values(name))
    with pytest.raises(ConfigError, match=message):
        from_hf_config(values(name, **changes))


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "max_position_embeddings"])
def test_required_keys(key):
    with pytest.raises(ConfigError, match=f"required key '{key}'"):
        from_hf_config(without("llama", key))


@pytest.mark.parametrize(
    ("name", "key", "null_is_none"),
    [
        ("mistral", "sliding_window", True),
        ("mistral", "num_key_value_heads", False),
        ("qwen2", "num_key_value_heads", False),
        ("qwen2", "sliding_window", False),
        ("qwen3", "head_dim", False),
        ("gemma2", "attn_logit_softcapping", True),
        ("gemma2", "final_logit_softcapping", True),
    ],
)
def test_what_releases_default_differently_must_be_named(name, key, null_is_none):
    with pytest.raises(ConfigError, match=f"required key '{key}' is missing"):
        from_hf_config(without(name, key))
    if null_is_none:
        assert from_hf_config(values(name, **{key: None})) != from_hf_config(values(name))


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": None}, {"rope_parameters": {}}])
def test_gpt_oss_says_how_positions_are_scaled(scaling):
    """Null is YaRN to some releases and no scaling to others, and so never written."""
    bare = without("gpt_oss", "rope_parameters")
    with pytest.raises(ConfigError, match="rope_scaling is missing or null"):
        from_hf_config(bare | scaling)
    config = from_hf_config(bare | {"rope_scaling": {"rope_type": "default"}})
    assert rope_of(config).scaling is None
    assert to_hf_config(config, model_type="gpt_oss")["rope_scaling"] == {"rope_type": "default"}


def test_named_windows_need_no_first_layer_with_one():
    named = without("qwen2", "max_window_layers")
    assert from_hf_config(named) == from_hf_config(values("qwen2"))
    with pytest.raises(ConfigError, match="'max_window_layers' is missing"):
        from_hf_config(without("qwen2", "max_window_layers", "layer_types"))


def test_windows_by_layer():
    assert [block.mixer.window for block in from_hf_config(values("gemma2")).blocks] == [
        7,
        None,
    ]
    older = without("qwen2", "layer_types")
    assert from_hf_config(older) == from_hf_config(values("qwen2"))
    windows = [block.mixer.window for block in from_hf_config(older).blocks]
    assert windows == [None, None, 7, 7]
    off = from_hf_config(older | {"use_sliding_window": False})
    assert [block.mixer.window for block in off.blocks] == [None]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_models_without_windows_are_written_with_a_width(name):
    """Null fails there: the reference makes the mask of windows before it asks who has one."""
    layers = from_hf_config(values(name)).num_layers
    config = from_hf_config(values(name, layer_types=["full_attention"] * layers))
    assert [block.mixer.window for block in config.blocks] == [None]
    written = to_hf_config(config, model_type=name)
    assert written["sliding_window"] == config.max_positions
    assert from_hf_config(written) == config


def test_models_without_a_counterpart_are_refused():
    with pytest.raises(ConfigError, match="NtkScaling has no counterpart"):
        to_hf_config(with_rope(RopeConfig(scaling=NtkScaling(factor=2.0))))
    tiny = MODELS["tiny"]()
    with pytest.raises(ConfigError, match="no Hugging Face architecture"):
        to_hf_config(dataclasses.replace(tiny, learned_positions=True))


def with_rope(rope):
    tiny = MODELS["tiny"]()
    (block,) = tiny.blocks
    block = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, rope=rope))
    return dataclasses.replace(tiny, stacks=stacked(block, num_layers=tiny.num_layers))


# Keys that published configs have beside those of the reference implementation. They say what the
# architecture does anyway; another value would be another model.
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


def test_chunks_of_qwen_bound_its_context():
    chunks = {"chunk_size": 48, "local_size": 8, "original_max_position_embeddings": 48}
    config = from_hf_config(values("qwen2", dual_chunk_attention_config=chunks))
    assert config.max_positions == 40


def test_yarn_that_was_trained_with_is_yarn():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    wanted = from_hf_config(values("llama", rope_parameters=yarn))
    assert from_hf_config(values("llama", rope_parameters=yarn | {"finetuned": True})) == wanted
