"""The lightning indexer of DeepSeek-V3.2: which keys a query attends to, with and without a cache.

Logits and gradients of whole models are held to the reference implementation in test_families.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.latent import INDEXER_PARAMETERS, IndexerConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import NormConfig
from jaxinfra.config.precision import Numerics
from jaxinfra.config.presets.runs import tiny
from jaxinfra.config.rope import RopeConfig, RopePairs
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.config.validate import validate
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.model.exactness import check_exact
from jaxinfra.model.flops import decode_flops, forward_flops, training_flops
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.ops.attention import attention
from jaxinfra.ops.key_choice import KeyIndex, best_keys, chosen_keys
from jaxinfra.parallel.execution import execution_on
from jaxinfra.quantize.equivalence import divided_norm, scaled_inputs
from jaxinfra.quantize.quantize import quantize_model, source_model
from jaxinfra.quantize.recipes import Method, quantization_recipe
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions, Preemption
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import GREEDY
from tests.decoder_oracle import drawn, latent_attention, model
from tests.generation import recomputed
from tests.golden_families import write_directory

INDEXER = IndexerConfig(num_heads=5, head_dim=7, top_k=3)
ATTENTION = latent_attention(
    indexer=INDEXER, rope=RopeConfig(pairs=RopePairs.NEIGHBOURS), norm=NormConfig(epsilon=1e-6)
)
CONFIG = model(ATTENTION, tie_embeddings=False)
LENGTH = 24


@functools.cache
def decoder(form=CacheFormat.PLAIN, *, mtp=False):
    execution = dataclasses.replace(execution_on(), cache_format=form)
    definition = define_model(dataclasses.replace(CONFIG, mtp=mtp), execution)
    return definition.bind(drawn(definition))


def an_index(rng, *, batch=2, queries=5, keys=9, ties=False):
    """Random queries, weights and keys; with few values, so that many scores are equal."""
    shapes = ((batch, queries, 4, 6), (batch, queries, 4), (batch, keys, 6))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    if ties:
        arrays = [np.sign(x) * (np.abs(x) > 1.0) for x in arrays]
    q, weight, key = map(jnp.asarray, arrays)
    return KeyIndex(q_BTIJ=q, weight_BTI=weight, key_BTJ=key[:, :queries]), key


@pytest.mark.parametrize("ties", [False, True])
def test_the_choice_is_the_beginning_of_a_stable_sort(ties):
    """Larger scores come first, and of equal scores that of the earlier key."""
    rng = np.random.default_rng(0)
    index, key = an_index(rng, queries=7, keys=9, ties=ties)
    visible = rng.random((2, 7, 9)) < 0.6
    visible[0, 0] = False
    dots = np.einsum("btij,bsj->btis", np.asarray(index.q_BTIJ, float), np.asarray(key, float))
    scores = np.einsum("bti,btis->bts", np.asarray(index.weight_BTI), np.maximum(dots, 0.0))
    order = np.argsort(np.where(visible, -scores, np.inf), axis=-1, kind="stable")[..., :3]
    best = best_keys(index, key, jnp.asarray(visible), top_k=3)
    np.testing.assert_array_equal(best, order)
    want = np.zeros(visible.shape, bool)
    np.put_along_axis(want, order, values=True, axis=-1)
    got = np.asarray(chosen_keys(index, key, jnp.asarray(visible), top_k=3))
    np.testing.assert_array_equal(got, want & visible)
    assert (got.sum(-1) == np.minimum(visible.sum(-1), 3)).all()
    all_of_them = chosen_keys(index, key, jnp.asarray(visible), top_k=9)
    np.testing.assert_array_equal(all_of_them, visible)


@jax.jit
def whole(decoder, ids, segments=None, positions=None):
    return decoder(ids, segment_ids=segments, positions=positions)


@functools.cache
def text():
    return np.random.default_rng(3).integers(0, 31, (2, LENGTH)).astype(np.int32)


@pytest.mark.slow
def test_packed_documents_choose_among_their_own_keys():
    ids, ends = text(), (9, 20, LENGTH)
    segments, positions = np.zeros((2, LENGTH), np.int32), np.zeros((2, LENGTH), np.int32)
    want, start = [], 0
    for number, end in enumerate(ends):
        segments[:, start:end] = number
        positions[:, start:end] = np.arange(end - start)
        want.append(whole(decoder(), ids[:, start:end]))
        start = end
    got = whole(decoder(), ids, jnp.asarray(segments), jnp.asarray(positions))
    np.testing.assert_allclose(got, np.concatenate(want, axis=1), atol=2e-5)
    joined = np.asarray(whole(decoder(), ids))
    assert np.abs(joined - np.asarray(got))[:, ends[0] :].max() > 0.1


@jax.jit
def chunk(decoder, ids, positions, cache):
    out = decoder.run(ids, positions=positions, cache=cache)
    return decoder.logits(out.x), out.cache


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(LENGTH,), (1,) * LENGTH, (5, 9, 1, 1, 2, 6), (2, 22)])
def test_cached_tokens_are_chosen_among_as_in_the_whole_text(sizes):
    """In one chunk, where all scores are masked; one by one, where chosen latents are read."""
    ids, want = text(), np.asarray(whole(decoder(), text()))
    cache, start = decoder().empty_cache(batch=2, num_slots=LENGTH), 0
    for size in sizes:
        places = np.broadcast_to(np.arange(start, start + size, dtype=np.int32), (2, size))
        logits, cache = chunk(decoder(), ids[:, start : start + size], places, cache)
        np.testing.assert_allclose(logits, want[:, start : start + size], atol=2e-5)
        start += size
    one_more = dataclasses.replace(ATTENTION, indexer=dataclasses.replace(INDEXER, top_k=4))
    other = define_model(model(one_more, tie_embeddings=False), execution_on())
    other = other.bind(drawn(define_model(CONFIG, execution_on())))
    assert np.abs(np.asarray(whole(other, ids)) - want)[:, 3:].max() > 0.05


PROMPTS = [tuple(map(int, text()[row, :n])) for row, n in ((0, 14), (0, 9), (1, 3), (0, 14))]
OPTIONS = EngineOptions(
    max_running=3, page_size=4, num_pages=17, max_step_tokens=24, chunk_sizes=(8,), max_piece_rows=1
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "num_drafts", "mtp", "preemption"),
    [
        (CacheFormat.PLAIN, 0, False, Preemption.HOST),
        (CacheFormat.PLAIN, 2, False, Preemption.RECOMPUTE),
        (CacheFormat.PLAIN, 2, True, Preemption.HOST),
        (CacheFormat.FP8, 0, False, Preemption.HOST),
        (CacheFormat.INT8, 2, False, Preemption.RECOMPUTE),
    ],
)
def test_an_engine_gives_what_a_request_gets_alone(form, num_drafts, mtp, preemption):
    """Shared beginnings, prompts in chunks, drafts, and too few pages for all requests."""
    given = decoder(form, mtp=mtp)
    new = 18
    if form is CacheFormat.PLAIN:
        want = [[] for _ in PROMPTS]
        for each in recomputed(given, PROMPTS, max_new_tokens=new, sampling=GREEDY):
            want[each.row].append(each.token)
    else:
        options = dataclasses.replace(OPTIONS, num_pages=80, chunk_sizes=(32,), max_step_tokens=40)
        alone = Engine(given, options=dataclasses.replace(options, share_prefixes=False))
        want = [tokens_of(alone, [prompt], new)[0] for prompt in PROMPTS]
    options = dataclasses.replace(
        OPTIONS, num_drafts=num_drafts, preemption=preemption, num_pages=14
    )
    engine = Engine(given, options=options)
    assert tokens_of(engine, PROMPTS, new) == want
    assert tokens_of(engine, PROMPTS, new) == want
    assert engine.scheduler.num_preemptions > 0
    assert engine.counts.cached_tokens > 0


def tokens_of(engine, prompts, new):
    requests = [GenerationRequest(prompt_ids=p, max_new_tokens=new) for p in prompts]
    return [[t for each in came for t in each.tokens] for came in engine.run(requests)]


@pytest.mark.slow
def test_no_gradient_passes_through_the_choice():
    definition = define_model(CONFIG, execution_on())

    @jax.jit
    @jax.grad
    def gradient(parameters):
        return jnp.sum(jnp.sin(definition.bind(parameters)(text())))

    found = by_path(gradient(drawn(definition)))
    zero = {path for path, x in found.items() if not np.asarray(x).any()}
    assert zero == {f"blocks/0/attention/indexer/{name}" for name in INDEXER_PARAMETERS}


def run_of(config, **changes):
    base = tiny()
    base = dataclasses.replace(base, model=dataclasses.replace(config, vocab_size=2048))
    training = dataclasses.replace(base.training, sequence_length=32)
    return dataclasses.replace(base, **{"training": training} | changes)


def test_an_indexer_is_frozen_in_training():
    config = dataclasses.replace(CONFIG, max_positions=64)
    paths = by_path(define_model(config, execution_on()).shapes)
    indexers = {path for path in paths if "/indexer/" in path}
    assert indexers == {f"blocks/0/attention/indexer/{name}" for name in INDEXER_PARAMETERS}
    run = run_of(config)
    with pytest.raises(ConfigError, match=r"leaves out blocks/0/attention/indexer/query/weight"):
        validate(run)
    for given in (config, dataclasses.replace(config, mtp=True)):
        frozen = dataclasses.replace(run.optimizer, frozen=("*/indexer/*",))
        validate(run_of(given, optimizer=frozen))
    partly = dataclasses.replace(run.optimizer, frozen=("blocks/*/indexer/*",))
    with pytest.raises(ConfigError, match=r"leaves out mtp/block/attention/indexer/query"):
        validate(run_of(dataclasses.replace(config, mtp=True), optimizer=partly))


def test_what_an_indexer_does_not_work_with_is_named():
    with pytest.raises(ConfigError, match=r"an indexer with query_rank=None"):
        latent_attention(indexer=INDEXER, query_rank=None)
    with pytest.raises(ConfigError, match=r"and window=5: it reads compressed queries"):
        latent_attention(indexer=INDEXER, window=5)
    with pytest.raises(ConfigError, match=r"indexer.head_dim=2 is below rope_dim=4"):
        latent_attention(indexer=dataclasses.replace(INDEXER, head_dim=2))
    with pytest.raises(ConfigError, match=r"top_k=0 must be at least 1"):
        dataclasses.replace(INDEXER, top_k=0)
    exact = dataclasses.replace(
        execution_on(), policy=dataclasses.replace(POLICIES["fp32"], numerics=Numerics.EXACT)
    )
    with pytest.raises(ConfigError, match="numerics=exact with indexer"):
        check_exact(CONFIG, exact)
    run = run_of(dataclasses.replace(CONFIG, max_positions=64), mesh=MeshConfig(context=2))
    with pytest.raises(ConfigError, match="context=2 with an indexer"):
        validate(run)
    index, _ = an_index(np.random.default_rng(0), batch=1, queries=9)
    q = jnp.ones((1, 9, 4, 10))
    for each in (AttentionImplementation.HOPPER, AttentionImplementation.CUDNN):
        with pytest.raises(UnsupportedError, match=rf"attention={each.value} with an indexer"):
            attention(
                *(q, q, q),
                config=ATTENTION,
                segment_ids_BT=None,
                index=index,
                implementation=each,
            )
    for target in ("query", "key"):
        with pytest.raises(ConfigError, match=f"lora target '{target}': this model has no such"):
            define_model(CONFIG, execution_on(), lora=LoraConfig(rank=2, targets=(target,)))


def test_a_token_is_cached_with_its_index_key():
    arrays = {each.name: each.shape for each in ATTENTION.cache.arrays}
    assert arrays == {"latent": (10,), "rotated_key": (4,), "index_key": (7,)}
    assert ATTENTION.cache.elements == 21


def test_flops_are_of_what_is_computed():
    heads = 2 * 2 * INDEXER.num_heads * INDEXER.head_dim  # of two layers
    dense = dataclasses.replace(CONFIG.blocks[0], mixer=latent_attention())
    plain = CONFIG.with_blocks(lambda _: dense)
    assert forward_flops(CONFIG, 0, 3) == forward_flops(plain, 0, 3)
    pairs = 10 * 11 // 2
    assert forward_flops(CONFIG, 0, 10) == forward_flops(plain, 0, 10) + heads * pairs
    both = training_flops(CONFIG, 0, 10) - training_flops(plain, 0, 10)
    assert both == heads * pairs  # not of a backward pass
    # A decode step reads 3 latents, and all index keys.
    step = decode_flops(CONFIG, 0, 40) - heads * 41
    assert step == decode_flops(plain, 0, 2)


@pytest.mark.slow
def test_an_indexer_is_not_quantized(tmp_path):
    """Quantized weights of an indexer would choose other keys."""
    write_directory("deepseek_v32", tmp_path / "a")
    bytes_tokenizer().save(tmp_path / "a" / "tokenizer.json")
    ids = np.random.default_rng(0).integers(0, 64, (4, 16))
    with source_model(tmp_path / "a") as given:
        report = quantize_model(given, tmp_path / "b", quantization_recipe("fp8"), ids_BT=ids)
    assert all(layer.error is not None for layer in report.layers)
    before, after = (by_path(load_pretrained(tmp_path / each).parameters) for each in "ab")
    rounded = {path for path, x in before.items() if not np.array_equal(x, after[path])}
    assert not any("/indexer/" in path for path in rounded)
    assert any("/query_down/" in path for path in rounded)


@pytest.mark.slow
def test_scales_of_quantization_reach_the_indexer():
    """If a norm is divided by scales, the weights that read it are multiplied by them."""
    definition = define_model(CONFIG, execution_on())
    given, want = drawn(definition), np.asarray(whole(decoder(), text()))
    flat, rng = by_path(given), np.random.default_rng(5)
    for group in scaled_inputs(CONFIG.blocks[0], Method.SMOOTH):
        first = {p.removeprefix("blocks/0/"): x[0] for p, x in flat.items() if "blocks" in p}
        scales = jnp.asarray(rng.uniform(0.5, 2.0, first[f"{group.norm}/scale"].shape))
        changed = divided_norm(first, group, scales)
        for name in (*group.kept, *group.readers):
            changed[name] = first[name] * scales.reshape(-1, *[1] * (first[name].ndim - 1))
        for name, x in changed.items():
            flat[f"blocks/0/{name}"] = flat[f"blocks/0/{name}"].at[0].set(x)
    tree = jax.tree.unflatten(jax.tree.structure(given), [flat[p] for p in by_path(given)])
    got = np.asarray(whole(definition.bind(tree), text()))
    np.testing.assert_allclose(got, want, atol=1e-4)
