"""Caches in 8 and 4 bits: what they keep, and that paged and contiguous ones give one text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_models import CONFIG, OPTIONS, PROMPTS, parameters

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import LatentAttentionConfig
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.cache import ContiguousCache, StateCache, recurrent_bytes
from jaxinfra.model.definition import define_model
from jaxinfra.model.empty_cache import check_states, empty_cache
from jaxinfra.ops.cached_attention import as_cached, read_tokens, stored_tokens
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.memory import element_bits, kv_bytes
from jaxinfra.planning.model import plan_model
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import GREEDY
from tests.generation import served
from tests.unit.test_recurrent_mixers import config as hybrid

FORMATS = [form for form in CacheFormat if form.bits]
FP32 = np.dtype(np.float32)
STEPS = {CacheFormat.INT8: 1 / 127, CacheFormat.INT4: 1 / 7, CacheFormat.FP8: 2.0**-3}


@pytest.mark.parametrize("form", FORMATS)
def test_elements_are_off_by_half_a_step_of_their_head(form):
    """e4m3's step is of the element itself: an eighth of the power of two below it."""
    x = np.random.default_rng(0).normal(size=(3, 5, 2, 8)).astype(np.float32)
    x[0, 0] *= 1e4
    x[1, 1] = 0.0
    codes, scales = jax.jit(stored_tokens, static_argnums=(1, 2))(x, form, FP32)
    assert codes.shape[-1] == (4 if form is CacheFormat.INT4 else 8)
    assert scales.shape == x.shape[:-1]
    got = np.asarray(jax.jit(read_tokens, static_argnums=(2, 3))(codes, scales, form, FP32))
    largest = np.abs(x).max(-1, keepdims=True)
    bound = 0.5 * STEPS[form] * (np.abs(x) if form is CacheFormat.FP8 else largest)
    assert (np.abs(got - x) <= bound * 1.0001 + largest * 2.0**-16).all()
    assert (got[1, 1] == 0).all()


@pytest.mark.parametrize("form", FORMATS)
def test_a_cache_keeps_what_attention_is_told_it_keeps(form):
    spec = CONFIG.blocks[0].mixer.cache
    options = {"num_layers": 2, "batch": 1, "num_slots": 4, "dtype": FP32}
    cache = ContiguousCache.zeros(spec, **options, form=form)
    per_token = sum(x.nbytes for x in cache.arrays.values()) / (2 * 4)
    bits = {CacheFormat.INT4: 4}.get(form, 8)
    assert per_token == spec.elements * bits / 8 + spec.scales * 4
    cache = dataclasses.replace(cache, layer=jnp.int32(1))
    new = np.random.default_rng(1).normal(size=(1, 3, 2, 8)).astype(np.float32)
    tokens, positions = {"k": new, "v": 2 * new}, np.array([[0, 1, -1]])
    cache = jax.jit(ContiguousCache.append)(cache, tokens, positions)
    read = jax.device_get(jax.jit(lambda cache: cache.view().tokens(FP32))(cache))
    for name, x in tokens.items():
        kept = np.asarray(jax.jit(as_cached, static_argnums=1)(x, form))
        np.testing.assert_array_equal(read[name][:, :2], kept[:, :2])
        assert (read[name][:, 2:] == 0).all()


def test_bytes_and_what_is_refused():
    assert element_bits("bf16", width=128) == 16
    assert element_bits("int4", width=128) == 4 + 16 / 128
    latent = LatentAttentionConfig(
        num_q_heads=2,
        query_rank=None,
        nope_dim=4,
        rope_dim=3,
        value_dim=4,
        kv_rank=8,
        rope=None,
    )
    assert {a.name for a in latent.cache.stored_as(CacheFormat.INT8).arrays} == {
        *("latent", "latent_scale", "rotated_key", "rotated_key_scale")
    }
    with pytest.raises(UnsupportedError, match="int4 cache of rotated_key with 3 elements"):
        latent.cache.stored_as(CacheFormat.INT4)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_pages_and_rows_give_one_text(form, num_drafts):
    """However prompts are cut into chunks, shared, or run ahead by what the text itself suggests:
    tokens that attend to each other before they are cached see what will be read.
    """
    execution = dataclasses.replace(execution_on(), cache_format=form)
    model = define_model(CONFIG, execution).bind(parameters())
    plain = define_model(CONFIG, execution_on()).bind(parameters())
    options = {"max_new_tokens": 10, "sampling": GREEDY, "num_ids": 257}
    want = [[each.token for each in served(model, [p], **options)] for p in PROMPTS]
    if form is CacheFormat.INT4:
        assert want != [[each.token for each in served(plain, [p], **options)] for p in PROMPTS]
    engine = Engine(model, options=dataclasses.replace(OPTIONS, num_drafts=num_drafts), num_ids=257)
    numbers = [engine.submit(GenerationRequest(prompt_ids=p, max_new_tokens=10)) for p in PROMPTS]
    got = {number: [] for number in numbers}
    while engine.is_busy:
        for progress in engine.step():
            got[progress.request] += progress.tokens
    assert [got[number] for number in numbers] == want


def test_states_in_bf16_take_half_and_entries_stay_plain():
    config = hybrid("gated_delta")
    small = dataclasses.replace(execution_on(), cache_format=CacheFormat.BF16_STATES)
    found, plain = (
        jax.eval_shape(functools.partial(empty_cache, config, how, batch=1, num_slots=8))
        for how in (small, execution_on())
    )
    changed = {
        name
        for one, other in zip(found, plain, strict=True)
        for name, x in one.arrays.items()
        if x.dtype != other.arrays[name].dtype
    }
    assert changed == {"state"}
    kept = [x for each in found if isinstance(each, StateCache) for x in each.arrays.values()]
    held = sum(x.size * x.dtype.itemsize for x in kept)
    assert held == recurrent_bytes(config, accum=2, compute=4)
    planned = plan_model(config, name="hybrid")
    caches = [
        kv_bytes(planned, batch=1, context=0, cache_format=f) for f in ("bf16-states", "bf16")
    ]
    assert caches == [recurrent_bytes(config, accum=each) for each in (2, 4)]
    with pytest.raises(UnsupportedError, match="none of whose layers has a state"):
        check_states(CONFIG, CacheFormat.BF16_STATES)
