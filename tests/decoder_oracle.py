"""Small decoders of all kinds, and what they compute: the formulas in float64,
with what rounding may do to them.

Dims: B batch, T position, S key position, D model width, N query heads, K kv heads, H head width,
F mlp width, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.config.kinds import MlpKind, NormKind, NormPlacement
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.rope import RopeConfig, RopePairs, YarnScaling
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model
from jaxinfra.model.rope import rope_frequencies
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on
from tests.rounding import UNIT, Rounded, stored
from tests.seeds import seeded

YARN = RopeConfig(
    theta=100.0,
    pairs=RopePairs.NEIGHBOURS,
    scaling=YarnScaling(factor=4.0, original_max_positions=8, attention_factor=1.2),
)
LAYER_NORM = NormConfig(kind=NormKind.LAYER, bias=True)


def attention(num_kv_heads: int = 2, **options) -> GroupedAttentionConfig:
    options = {"rope": RopeConfig(theta=100.0)} | options
    return GroupedAttentionConfig(num_q_heads=4, num_kv_heads=num_kv_heads, head_dim=8, **options)


def latent_attention(**options) -> LatentAttentionConfig:
    sizes = {"num_q_heads": 4, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    return LatentAttentionConfig(**({"query_rank": 12, "rope": YARN} | sizes | options))


def block(mixer: MixerConfig, **options) -> BlockConfig:
    return BlockConfig(**({"mixer": mixer, "feed_forward": MlpConfig(hidden_dim=24)} | options))


def model(*attentions: MixerConfig, blocks=None, **options) -> ModelConfig:
    pattern = [block(each, **(blocks or {})) for each in attentions]
    return ModelConfig(
        **{
            "vocab_size": 31,
            "model_dim": 16,
            "max_positions": 64,
            "stacks": stacked(*pattern, num_layers=2 * len(attentions)),
            "tie_embeddings": True,
        }
        | options,
    )


MODELS = {
    "mha": model(attention(num_kv_heads=4)),
    "gqa": model(attention(), tie_embeddings=False),
    "mqa": model(attention(num_kv_heads=1)),
    "window": model(attention(window=5)),
    "gemma": model(
        attention(window=6, logit_soft_cap=2.0, scale=0.2, qk_norm=NormConfig(scale_offset=1.0)),
        attention(num_kv_heads=1, logit_soft_cap=2.0),
        blocks={"norm_placement": NormPlacement.SANDWICH},
        logit_soft_cap=3.0,
        embedding_scale=4.0,
    ),
    "two_stacks": dataclasses.replace(
        model(attention(window=5)),
        stacks=(
            *stacked(block(attention()), num_layers=1),
            *stacked(block(attention(window=5)), block(attention(num_kv_heads=1)), num_layers=4),
        ),
    ),
    "latent": model(
        latent_attention(bias=True, scale=0.5),
        latent_attention(query_rank=None, rope=RopeConfig(theta=100.0), window=6),
        tie_embeddings=False,
    ),
    "learned_positions": model(
        attention(num_kv_heads=4, rope=None, qkv_bias=True, out_bias=True),
        blocks={
            "norm": LAYER_NORM,
            "feed_forward": MlpConfig(hidden_dim=24, kind=MlpKind.GELU_TANH, bias=True),
        },
        learned_positions=True,
        final_norm=LAYER_NORM,
    ),
}


def oracle(
    parameters,
    config: ModelConfig,
    ids_BT: np.ndarray,
    policy: PolicyName = PolicyName.FP32,
) -> Rounded:
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
    for i, repetition in config.layer_places:
        block = config.blocks[i]
        weights = jax.tree.map(lambda x, n=repetition: x[n], parameters["blocks"][i])
        branches = {"attention": (_attention, block.mixer), "mlp": (_mlp, block.feed_forward)}
        for name, (function, branch) in branches.items():
            y = keep(_norm(x_BTD, weights[f"{name}_norm"], block.norm))
            y = function(y, weights[name], branch, keep)
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


def _attention(x, weights, config: MixerConfig, keep):
    heads = _latent_heads if isinstance(config, LatentAttentionConfig) else _grouped_heads
    position = np.arange(x.shape[1])
    q, k, v = heads(x, weights, config, keep)
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    scores = _cap(scale * np.einsum("BTNH,BSNH->BNTS", q, k), config.logit_soft_cap)
    age = position[:, None] - position[None, :]
    visible = (age >= 0) & (age < (config.window or len(position)))
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores = keep(scores / scores.sum(-1, keepdims=True))
    out = keep(np.einsum("BNTS,BSNH->BTNH", scores, v))
    return _project("BTNH,NHD->BTD", out, weights["out"], keep)


def _grouped_heads(x, weights, config: GroupedAttentionConfig, keep):
    q = _project("BTD,DNH->BTNH", x, weights["query"], keep)
    k = _project("BTD,DKH->BTKH", x, weights["key"], keep)
    v = _project("BTD,DKH->BTKH", x, weights["value"], keep)
    if config.qk_norm is not None:
        q = keep(_norm(q, weights["query_norm"], config.qk_norm))
        k = keep(_norm(k, weights["key_norm"], config.qk_norm))
    if config.rope is not None:
        q, k = (keep(_rotated(part, config.rope)) for part in (q, k))
    k, v = (np.repeat(part, config.num_q_heads // config.num_kv_heads, axis=2) for part in (k, v))
    return q, k, v


def _latent_heads(x, weights, config: LatentAttentionConfig, keep):
    if config.query_rank is None:
        q = _project("BTD,DNH->BTNH", x, weights["query"], keep)
    else:
        down = _project("BTD,DR->BTR", x, weights["query_down"], keep)
        down = keep(_norm(down, weights["query_norm"], config.norm))
        q = _project("BTR,RNH->BTNH", down, weights["query_up"], keep)
    down = _project("BTD,DR->BTR", x, weights["kv_down"], keep)
    latent = keep(_norm(down[..., : config.kv_rank], weights["kv_norm"], config.norm))
    both = _project("BTR,RNH->BTNH", latent, weights["kv_up"], keep)
    shared = keep(_rotated(down[..., None, config.kv_rank :], config.rope))
    turned = keep(_rotated(q[..., config.nope_dim :], config.rope))
    q = np.concatenate([q[..., : config.nope_dim], turned], axis=-1)
    shared = np.repeat(shared, config.num_q_heads, axis=2)
    k = np.concatenate([both[..., : config.nope_dim], shared], axis=-1)
    return q, k, both[..., config.nope_dim :]


def _rotated(x, rope: RopeConfig):
    frequencies, factor = rope_frequencies(rope, head_dim=x.shape[-1])
    angle = np.arange(x.shape[1])[None, :, None, None] * np.asarray(frequencies, np.float64)
    # An angle in fp32 is known to u times itself.
    cos, sin = (Rounded(factor * f(angle), UNIT * (4 + angle)) for f in (np.cos, np.sin))
    if rope.pairs is RopePairs.HALVES:
        first, second = np.split(x, 2, axis=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    turned = [first * cos - second * sin, first * sin + second * cos]
    if rope.pairs is RopePairs.NEIGHBOURS:
        pairs = range(angle.shape[-1])
        turned = [part[..., i : i + 1] for i in pairs for part in turned]
    return np.concatenate(turned, axis=-1)


def make(name: str, policy: PolicyName = PolicyName.FP32):
    """Parameters of one of ``MODELS``, and the decoder with them."""
    definition = define_model(MODELS[name], execution_on(policy=POLICIES[policy]))
    parameters = drawn(definition)
    return parameters, definition.bind(parameters)


def drawn(definition: ModelDefinition) -> Parameters:
    """Weights so large that attention is far from uniform, and biases and scales are noticed."""
    rng = np.random.default_rng(seeded(1))

    def draw(path, leaf):
        mean = float(path[-1].key == "scale")
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, definition.shapes)
