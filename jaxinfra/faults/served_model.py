"""A tiny model for faults of serving: it answers in letters, and one token makes logits NaN."""

from pathlib import Path

import jax
import numpy as np

from jaxinfra.checkpoint.finite import nonfinite_allowed
from jaxinfra.checkpoint.model_directory import write_ours
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.rope import RopeConfig
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.parallel.execution import execution_on

CONTEXT = 128
POISON = 257
"""A token beyond the tokenizer's, whose embedding is NaN: it is never drawn, but can be sent."""

CONFIG = ModelConfig(
    vocab_size=258,
    model_dim=32,
    max_positions=CONTEXT,
    stacks=stacked(
        BlockConfig(
            mixer=GroupedAttentionConfig(
                num_q_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig()
            ),
            feed_forward=MlpConfig(hidden_dim=32),
        ),
        num_layers=1,
    ),
    tie_embeddings=False,
)
_LETTERS = slice(ord("a"), ord("z") + 1)
_LOUDER = 8.0  # what letters' logits are multiplied by: each token is then a character


def write_served_model(path: Path) -> Path:
    """Writes the model as a directory, drawn from a fixed seed, with a tokenizer of bytes."""
    definition = define_model(CONFIG, execution_on())
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(
        lambda leaf: rng.normal(0.0, 0.4, leaf.shape).astype(leaf.dtype), definition.shapes
    )
    arrays["embedding"]["table"][POISON] = np.nan
    arrays["unembedding"]["table"][_LETTERS] *= _LOUDER
    beside = path.with_name(f"{path.name}-tokenizer")
    beside.mkdir(parents=True)
    bytes_tokenizer().save(beside / "tokenizer.json")
    with nonfinite_allowed():
        write_ours(
            LiveParameters(arrays=by_path(arrays)),
            definition,
            path,
            hf=None,
            tokenizer_directory=beside,
            dtype=None,
            max_shard_bytes=1 << 30,
        )
    return path
