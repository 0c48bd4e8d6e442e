"""Cached decoding computes what the uncached decoder does, at every position.

Dims: B batch, T position, S key position, D model width, N query heads, K kv heads, H head width,
F mlp width, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra.config.model import (
    AttentionConfig,
    BlockConfig,
    MlpConfig,
    MlpKind,
    ModelConfig,
    NormConfig,
    NormKind,
    NormPlacement,
    RopeConfig,
)
from jaxinfra.config.precision import PolicyName
from jaxinfra.layers.execution import Execution
from jaxinfra.layers.rope import rope_frequencies
from jaxinfra.models.decoder import Decoder
from jaxinfra.models.definition import define_model
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.serving.sampling import GREEDY
from jaxinfra.serving.steps import DecodeState, StepConfig, decode, kv_cache_bytes
from tests.rounding import UNIT, Rounded, stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

LENGTH = 24
PROMPTS = (1, 7, 13)  # tokens of each row before decoding starts
LAYER_NORM = NormConfig(kind=NormKind.LAYER, bias=True)


def attention(num_kv_heads: int = 2, **options) -> AttentionConfig:
    options = {"rope": RopeConfig(theta=100.0)} | options
    return AttentionConfig(num_q_heads=4, num_kv_heads=num_kv_heads, head_dim=8, **options)


def model(*attentions: AttentionConfig, block=None, **options) -> ModelConfig:
    blocks = (
        BlockConfig(**({"attention": each, "mlp": MlpConfig(hidden_dim=24)} | (block or {})))
        for each in attentions
    )
    return ModelConfig(
        **{
            "vocab_size": 31,
            "model_dim": 16,
            "num_layers": 2 * len(attentions),
            "max_positions": 64,
            "blocks": tuple(blocks),
            "tie_embeddings": True,
        }
        | options
    )


MODELS = {
    "mha": model(attention(num_kv_heads=4)),
    "gqa": model(attention(), tie_embeddings=False),
    "mqa": model(attention(num_kv_heads=1)),
    "window": model(attention(window=5)),
    "gemma": model(
        attention(window=6, logit_soft_cap=2.0, scale=0.2, qk_norm=NormConfig(scale_offset=1.0)),
        attention(num_kv_heads=1, logit_soft_cap=2.0),
        block={"norm_placement": NormPlacement.SANDWICH},
        logit_soft_cap=3.0,
        embedding_scale=4.0,
    ),
    "learned_positions": model(
        attention(num_kv_heads=4, rope=None, qkv_bias=True, out_bias=True),
        block={
            "norm": LAYER_NORM,
            "mlp": MlpConfig(hidden_dim=24, kind=MlpKind.GELU_TANH, bias=True),
        },
        learned_positions=True,
        final_norm=LAYER_NORM,
    ),
}
CASES = [
    # Between grouped heads and one or all of them only numbers differ.
    *(
        pytest.param(
            name, PolicyName.FP32, marks=[pytest.mark.slow] * (name in ("mha", "mqa", "window"))
        )
        for name in MODELS
    ),
    ("gqa", PolicyName.BF16),
    pytest.param("gemma", PolicyName.BF16, marks=pytest.mark.slow),
]


def oracle(parameters, config: ModelConfig, ids_BT: np.ndarray, policy: PolicyName) -> Rounded:
    """The decoder in float64 NumPy, and what rounding to the policy's dtypes may do to it: logits
    [B, T, V].
    """
    compute = POLICIES[policy].compute

    def held(x):
        return Rounded(np.asarray(jnp.asarray(x).astype(compute), np.float64))

    parameters = jax.tree.map(held, parameters)
    table_VD = parameters["embedding"]["table"]
    keep = functools.partial(stored, dtype=compute)
    x_BTD = keep(table_VD[ids_BT] * config.embedding_scale)
    if config.learned_positions:
        x_BTD = keep(x_BTD + parameters["positions"]["table"][: ids_BT.shape[1]])
    for layer in range(config.num_layers):
        repetition, i = divmod(layer, len(config.blocks))
        block = config.blocks[i]
        weights = jax.tree.map(lambda x, n=repetition: x[n], parameters["blocks"][i])
        for name, function in (("attention", _attention), ("mlp", _mlp)):
            y = keep(_norm(x_BTD, weights[f"{name}_norm"], block.norm))
            y = function(y, weights[name], getattr(block, name), keep)
            if block.norm_placement is NormPlacement.SANDWICH:
                y = keep(_norm(y, weights[f"{name}_post_norm"], block.norm))
            x_BTD = keep(x_BTD + y)
    x_BTD = keep(_norm(x_BTD, parameters["final_norm"], config.final_norm))
    if not config.tie_embeddings:
        table_VD = parameters["unembedding"]["table"]
    return _cap(x_BTD @ table_VD.T, config.logit_soft_cap)


def _norm(x, weights, config: NormConfig):
    if config.kind is NormKind.LAYER:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.epsilon)
    return x * (weights["scale"] + config.scale_offset) + weights.get("bias", 0.0)


def _cap(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def _project(spec, x, weights, keep):
    product = keep(np.einsum(spec, x, weights["weight"]))
    return keep(product + weights["bias"]) if "bias" in weights else product


def _mlp(x, weights, config: MlpConfig, keep):
    up = _project("BTD,DF->BTF", x, weights["up"], keep)
    if config.kind is MlpKind.SWIGLU:
        gate = _project("BTD,DF->BTF", x, weights["gate"], keep)
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return _project("BTF,FD->BTD", keep(hidden), weights["down"], keep)


def _attention(x, weights, config: AttentionConfig, keep):
    q = _project("BTD,DNH->BTNH", x, weights["query"], keep)
    k = _project("BTD,DKH->BTKH", x, weights["key"], keep)
    v = _project("BTD,DKH->BTKH", x, weights["value"], keep)
    if config.qk_norm is not None:
        q = keep(_norm(q, weights["query_norm"], config.qk_norm))
        k = keep(_norm(k, weights["key_norm"], config.qk_norm))
    position = np.arange(x.shape[1])
    if config.rope is not None:
        frequencies, factor = rope_frequencies(config.rope, head_dim=config.head_dim)
        angle = position[None, :, None, None] * np.asarray(frequencies, np.float64)
        q, k = (keep(_rotated(part, angle, factor)) for part in (q, k))
    k, v = (np.repeat(part, config.num_q_heads // config.num_kv_heads, axis=2) for part in (k, v))
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    scores = _cap(scale * np.einsum("BTNH,BSNH->BNTS", q, k), config.logit_soft_cap)
    age = position[:, None] - position[None, :]
    visible = (age >= 0) & (age < (config.window or len(position)))
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores = keep(scores / scores.sum(-1, keepdims=True))
    out = keep(np.einsum("BNTS,BSNH->BTNH", scores, v))
    return _project("BTNH,NHD->BTD", out, weights["out"], keep)


def _rotated(x, angle, factor):
    first, second = np.split(x, 2, axis=-1)
    # An angle in fp32 is known to u times itself.
    cos, sin = (Rounded(factor * f(angle), UNIT * (4 + angle)) for f in (np.cos, np.sin))
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


@jax.jit
def uncached_logits(decoder: Decoder, ids_BT):
    return decoder(ids_BT)


@jax.jit
def prefill_logits(decoder: Decoder, ids_BT):
    batch, length = ids_BT.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    cache = decoder.empty_cache(batch=batch, num_slots=LENGTH)
    hidden, cache = decoder.cached(ids_BT, positions=positions, cache=cache, prefill=True)
    return decoder.logits(hidden), cache


@jax.jit
def decode_logits(decoder: Decoder, ids_B1, positions_B1, cache):
    hidden, cache = decoder.cached(ids_B1, positions=positions_B1, cache=cache, prefill=False)
    return decoder.logits(hidden)[:, 0], cache


def make(name: str, policy: PolicyName = PolicyName.FP32):
    definition = define_model(MODELS[name], Execution(policy=POLICIES[policy]))
    rng = np.random.default_rng(seeded(1))

    def draw(path, leaf):
        # Large, so that attention is far from uniform, and biases and scales are noticed.
        mean = float(path[-1].key == "scale")
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), leaf.dtype)

    parameters = jax.tree_util.tree_map_with_path(draw, definition.shapes)
    return parameters, definition.bind(parameters)


def continued(decoder, ids, logits, cache, starts):
    """Feeds row b its tokens from ``starts[b]`` on, one a step, filling in ``logits``."""
    rows = np.arange(len(ids))
    for step in range(LENGTH - min(starts)):
        # A row that is through repeats its last token, as in generation.
        positions = np.minimum(np.array(starts) + step, LENGTH - 1).astype(np.int32)
        new, cache = decode_logits(
            decoder, ids[rows, positions][:, None], positions[:, None], cache
        )
        logits[rows, positions] = np.asarray(new)
    return logits


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_cached_logits_agree_at_every_position(name, policy):
    parameters, decoder = make(name, policy)
    ids = np.random.default_rng(seeded(0)).integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    true = oracle(parameters, MODELS[name], ids, policy)
    assert_within_rounding(uncached_logits(decoder, ids), true, what="without a cache")

    padded = np.full((len(PROMPTS), max(PROMPTS)), 30, np.int32)
    for row, length in enumerate(PROMPTS):
        padded[row, :length] = ids[row, :length]
    at_prefill, cache = prefill_logits(decoder, padded)
    logits = np.full(true.shape, np.nan, np.float32)
    for row, length in enumerate(PROMPTS):
        logits[row, :length] = np.asarray(at_prefill)[row, :length]
    logits = continued(decoder, ids, logits, cache, starts=PROMPTS)
    assert_within_rounding(logits, true, what="prefill, then decoding")

    logits = np.full(true.shape, np.nan, np.float32)
    empty = decoder.empty_cache(batch=len(PROMPTS), num_slots=LENGTH)
    logits = continued(decoder, ids, logits, empty, starts=[0] * len(PROMPTS))
    assert_within_rounding(logits, true, what="decoding alone")


@pytest.mark.parametrize("name", ["window", "gemma"])
def test_the_tolerance_notices_a_window_off_by_one(name):
    parameters, decoder = make(name)
    wider = dataclasses.replace(
        MODELS[name],
        blocks=tuple(
            dataclasses.replace(
                block,
                attention=dataclasses.replace(
                    block.attention, window=block.attention.window and block.attention.window + 1
                ),
            )
            for block in MODELS[name].blocks
        ),
    )
    ids = np.random.default_rng(0).integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    true = oracle(parameters, wider, ids, PolicyName.FP32)
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(uncached_logits(decoder, ids), true)


@pytest.mark.parametrize(("name", "policy"), [("gqa", PolicyName.FP32), ("gemma", PolicyName.BF16)])
def test_cache_bytes(name, policy):
    _, decoder = make(name, policy)
    cache = decoder.empty_cache(batch=3, num_slots=40)
    itemsize = POLICIES[policy].compute.itemsize
    expected = kv_cache_bytes(MODELS[name], batch=3, num_slots=40, itemsize=itemsize)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == expected


def test_decoding_keeps_one_cache():
    _, decoder = make("gqa")
    batch, num_slots = 2, 8192
    state = DecodeState(
        cache=decoder.empty_cache(batch=batch, num_slots=num_slots),
        positions_B=jnp.zeros(batch, jnp.int32),
        keys_B=jax.random.split(jax.random.key(0), batch),
    )
    graphdef, weights = nnx.split(decoder)
    config = StepConfig(graphdef=graphdef, sampling=GREEDY, num_ids=31)
    compiled = decode.lower(weights, state, jnp.zeros(batch, jnp.int32), config=config).compile()
    cache_bytes = kv_cache_bytes(MODELS["gqa"], batch=batch, num_slots=num_slots, itemsize=4)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    # One layer's slice of two, and scores: a second cache would show.
    assert memory.temp_size_in_bytes < cache_bytes
