"""A small model for tests of the engine, with a token that poisons what it touches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed
from tests.small_models import dense

OPTIONS = EngineOptions(
    max_running=3,
    page_size=4,
    num_pages=17,
    max_step_tokens=24,
    chunk_sizes=(8,),
    max_piece_rows=1,
)

CONFIG = dense(vocab_size=300, hidden_dim=32, tie_embeddings=False)
POISON = 299
# Of two lengths: what they give alone is a program for each.
PROMPTS = [
    (5,),
    (7, 250, 3, 99, 4, 8, 1, 2, 3, 40),
    (1, 2, 3, 4, 6, 9, 11, 30, 2, 8),
    (7, 250, 3, 99, 4, 8, 1, 9, 6, 5),
]


@functools.cache
def definition():
    return define_model(CONFIG, execution_on())


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    values = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), leaf.dtype), definition().shapes
    )
    values["embedding"]["table"] = values["embedding"]["table"].at[POISON].set(jnp.nan)
    return values


@functools.cache
def model():
    return definition().bind(parameters())


def alone(prompt, *, new=10, sampling=GREEDY, seed=0):
    tokens = recomputed(
        model(), [prompt], max_new_tokens=new, sampling=sampling, seed=seed, num_ids=257
    )
    return [each.token for each in tokens]
