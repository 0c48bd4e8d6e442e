"""Small decoders of all kinds, and what they compute: the formulas in float64,
with what rounding may do to them.

Dims: B batch, T position, V vocabulary.
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
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on
from tests.decoder_formulas import DecoderFormulas
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

    formulas = DecoderFormulas(
        xp=np,
        keep=functools.partial(stored, dtype=compute),
        # An angle in fp32 is known to u times itself.
        turned=lambda value, angle: Rounded(value, UNIT * (4 + angle)),
    )
    positions = np.arange(ids_BT.shape[1])[None]
    return formulas.logits(config, jax.tree.map(held, parameters), ids_BT, positions)


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
