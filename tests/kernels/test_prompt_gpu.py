"""A prompt that is appended and read back by kernels, beside the model without a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.rope import RopeConfig
from jaxinfra.model.cache import after_pass
from jaxinfra.model.definition import define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.parallel.execution import execution_on
from tests.decoder_oracle import model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
ATTENTION = GroupedAttentionConfig(
    num_q_heads=16, num_kv_heads=4, head_dim=64, rope=RopeConfig(theta=100.0)
)
LENGTHS = (300, 512, 17)


@pytest.mark.parametrize("window", [None, 100])
def test_logits_are_those_without_a_cache(window):
    attention = dataclasses.replace(ATTENTION, window=window)
    config = model(attention, attention, vocab_size=64, model_dim=256, max_positions=1024)
    ids = jax.random.randint(jax.random.key(1), (len(LENGTHS), 512), 0, 64)
    first = jnp.array([[min(n, 256)] for n in LENGTHS])
    policy = stored_as_computed(POLICIES[PolicyName.BF16])
    plain = define_model(config, execution_on(policy=policy))
    drawn = plain.initialize(jax.random.key(0))
    served = serving_form(plain, execution_on(policy=policy, decode_form=DecodeForm(packed=True)))
    packed = serving_parameters(served, drawn)

    @jax.jit
    def whole(parameters, ids):
        return plain.bind(parameters)(ids)

    def run(decoder, ids, cache, lengths, begin: int):
        positions = begin + jnp.arange(ids.shape[1])[None, :]
        positions = jnp.where(positions < lengths, positions, -1)
        done = decoder.run(ids, positions=positions, cache=cache)
        return decoder.logits(done.x), tuple(after_pass(c, c.arrays) for c in done.cache)

    @jax.jit
    def in_two(parameters, ids):
        decoder = served.bind(parameters)
        cache = decoder.empty_cache(batch=len(LENGTHS), num_slots=1024)
        begun, cache = run(decoder, ids[:, :256], cache, first, 0)
        rest, _ = run(decoder, ids[:, 256:], cache, jnp.array(LENGTHS)[:, None], 256)
        return jnp.concatenate([begun, rest], axis=1)

    text = in_two.lower(packed, ids).as_text()
    for kernel in ("append_heads", "paged_attention_chunk"):
        assert kernel in text
    exact = define_model(config, execution_on(policy=POLICIES[PolicyName.FP32]))
    want = jax.jit(lambda p, ids: exact.bind(p)(ids))(
        jax.tree.map(lambda x: x.astype(jnp.float32), drawn), ids
    )
    errors = []
    for got in (whole(drawn, ids), in_two(packed, ids)):
        parts = [
            (np.asarray(got, np.float64)[b, :n], np.asarray(want, np.float64)[b, :n])
            for b, n in enumerate(LENGTHS)
        ]
        errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in parts])
    # Other orders of the same roundings: alike, row by row.
    assert np.all(np.array(errors[1]) < 1.5 * np.array(errors[0])), errors
