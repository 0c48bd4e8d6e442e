"""Exact numerics: an engine's log-probabilities are the trainer's, to the last bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.kinds import MlpKind, NormKind
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ExpertsConfig, MlpConfig, NormConfig, stacked
from jaxinfra.config.precision import Fp8Matmuls, Numerics, PolicyName, PrecisionConfig
from jaxinfra.config.routing import RoutingConfig, Scoring
from jaxinfra.config.run import Remat
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.definition import define_model
from jaxinfra.model.exactness import check_exact
from jaxinfra.model.execution import Recomputation
from jaxinfra.numerics.exact import pinned, rounded
from jaxinfra.ops.exact_attention import exact_attention
from jaxinfra.ops.exact_rows import ordered_log_probability, whole_tiles
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.serving.engine.engine import Engine
from pallas_kernels.common.device import H200, compiling_for
from pallas_kernels.flash_attention.hopper.config import SHIPPED
from pallas_kernels.norm.formulas import NormForm, forward
from pallas_kernels.rows.choice import config_for
from pallas_kernels.rows.formula import RowCall
from tests.exact_scores import (
    LATENT,
    PROMPTS,
    SMALL_CHUNKS,
    WHOLE_PROMPTS,
    WINDOWED,
    completed,
    num_different,
    policy,
    random_parameters,
    requested,
    sampled,
    trained_scores,
)
from tests.small_models import dense


def made(config, name=PolicyName.FP32, numerics=Numerics.EXACT):
    definition = define_model(config, execution_on(policy=policy(name, numerics)))
    return definition, random_parameters(definition)


# Wide enough that libraries cut the sums of fp32 products differently by the number of rows.
WIDE = {"hidden_dim": 352, "vocab_size": 72, "tie_embeddings": False}


def test_scores_of_an_engine_are_those_of_training():
    config = dense(attention=WINDOWED, **WIDE)
    definition, tree = made(config, PolicyName.BF16)
    engine = Engine(definition.bind(tree), options=SMALL_CHUNKS)
    found = sampled(engine)
    assert engine.scheduler.num_preemptions > 0
    assert max(each.num_cached for each in found) >= 8  # pages of a shared prefix
    assert num_different(found, trained_scores(definition, tree, found)) == 0


@pytest.mark.slow
def test_fast_numerics_have_scores_of_their_own():
    config = dense(attention=WINDOWED, **WIDE)
    definition, tree = made(config, PolicyName.BF16)
    found = sampled(Engine(definition.bind(tree), options=SMALL_CHUNKS))
    fast = define_model(config, execution_on(policy=policy(PolicyName.BF16, Numerics.FAST)))
    assert num_different(found, trained_scores(fast, tree, found, differentiated=False)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("attention", [{}, WINDOWED], ids=["dense", "windows"])
@pytest.mark.parametrize("name", [PolicyName.FP32, PolicyName.BF16], ids=["fp32", "bf16"])
def test_tokens_and_scores_do_not_depend_on_what_is_beside_them(name, attention):
    definition, tree = made(dense(attention=attention, **WIDE), name)
    found = sampled(Engine(definition.bind(tree), options=SMALL_CHUNKS))
    other = Engine(definition.bind(tree), options=WHOLE_PROMPTS)
    again = {each.prompt: each for each in sampled(other, PROMPTS[::-1])}
    assert [again[each.prompt].tokens for each in found] == [each.tokens for each in found]
    assert num_different(found, [again[each.prompt].scores for each in found]) == 0
    recomputed = dataclasses.replace(
        definition.execution, recomputation=Recomputation(remat=Remat.FULL)
    )
    trainer = define_model(definition.config, recomputed)
    assert num_different(found, trained_scores(trainer, tree, found)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [PolicyName.FP32, PolicyName.BF16], ids=["fp32", "bf16"])
def test_drafts_change_no_bit(name):
    """Drawn tokens and their log-probabilities are equal with and without drafts.

    Keys that verifying steps leave in pages are right, too: requests that share such pages get the
    log-probabilities of training, bit for bit.
    """
    definition, tree = made(dense(**WIDE), name)
    plain, drafting = (
        Engine(definition.bind(tree), options=dataclasses.replace(SMALL_CHUNKS, num_drafts=drafts))
        for drafts in (0, 3)
    )
    # Cold, so that n-grams repeat and drafts are accepted.
    cold = [requested(each, temperature=0.1, new=20) for each in PROMPTS]
    one, other = (completed(engine, cold) for engine in (plain, drafting))
    assert [each.tokens for each in one] == [each.tokens for each in other]
    assert drafting.counts.accepted_tokens > 0
    for completions in (one, other):
        assert num_different(completions, trained_scores(definition, tree, completions)) == 0
    goes_on = [requested((*each.prompt, *each.tokens[:-5])) for each in other]
    mixed = [each for pair in zip(cold, goes_on, strict=True) for each in pair]
    found = completed(drafting, mixed)[1::2]
    assert (
        max(each.num_cached - len(old.prompt) for each, old in zip(found, other, strict=True)) >= 4
    )
    assert drafting.scheduler.num_preemptions > 0
    assert num_different(found, trained_scores(definition, tree, found)) == 0


ROUTINGS = {
    "softmax": RoutingConfig(),
    "groups": RoutingConfig(
        scoring=Scoring.SIGMOID, correction_bias=True, num_groups=3, top_groups=2, scale=1.5
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("name", [PolicyName.FP32, PolicyName.BF16], ids=["fp32", "bf16"])
def test_scores_of_a_mixture_of_experts_are_those_of_training(name, routing):
    feed = ExpertsConfig(
        num_experts=6, top_k=2, hidden_dim=160, shared_hidden_dim=24, routing=routing
    )
    config = dense(**WIDE)
    block = dataclasses.replace(config.blocks[0], feed_forward=feed)
    config = dataclasses.replace(config, stacks=stacked(block, num_layers=2))
    definition, tree = made(config, name)
    found = sampled(Engine(definition.bind(tree), options=SMALL_CHUNKS))
    assert num_different(found, trained_scores(definition, tree, found)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [PolicyName.FP32, PolicyName.BF16], ids=["fp32", "bf16"])
def test_scores_of_latent_attention_are_those_of_training(name):
    config = dense(**WIDE)
    block = dataclasses.replace(config.blocks[0], mixer=LATENT)
    config = dataclasses.replace(config, stacks=stacked(block, num_layers=2))
    definition, tree = made(config, name)
    found = sampled(Engine(definition.bind(tree), options=SMALL_CHUNKS))
    assert num_different(found, trained_scores(definition, tree, found)) == 0


def test_layers_that_were_not_compared_on_a_gpu_are_refused():
    config = dense()
    changed = {
        "latent attention": {"mixer": LATENT},
        "kind=gelu": {"feed_forward": MlpConfig(hidden_dim=8, kind=MlpKind.GELU)},
        "norms other than RMSNorm": {"norm": NormConfig(kind=NormKind.LAYER)},
    }
    execution = execution_on(policy=policy(PolicyName.BF16))
    for named, change in changed.items():
        block = dataclasses.replace(config.blocks[0], **change)
        model = dataclasses.replace(config, stacks=stacked(block, num_layers=1))
        check_exact(model, execution)
        with compiling_for(H200), pytest.raises(ConfigError, match=f"{named}.* on a GPU"):
            check_exact(model, execution)


@pytest.mark.slow
def test_scores_with_an_adapter_are_those_of_its_training():
    execution = execution_on(policy=policy(PolicyName.BF16))
    definition = define_model(dense(**WIDE), execution, lora=LoraConfig(rank=3, alpha=5.0))
    tree = random_parameters(definition)
    found = sampled(Engine(definition.bind(tree), options=SMALL_CHUNKS))
    assert num_different(found, trained_scores(definition, tree, found)) == 0


def test_attention_of_packed_documents_is_that_of_each_alone():
    config = dense(attention=WINDOWED).blocks[0].mixer
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 64, n, 8)), jnp.float32) for n in (4, 2, 2))
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)
    segments = np.repeat([0, 1, -1, 2], [19, 19, 7, 19])[None].astype(np.int32)

    @jax.jit
    def attended(q, k, v, ids):
        return exact_attention(q, k, v, config=config, segment_ids_BT=ids, sinks_N=sinks)

    def attend(part, ids):
        return attended(*(x[:, part] for x in (q, k, v)), ids)

    packed = attend(slice(None), jnp.asarray(segments))
    for number in (0, 1, 2):
        (places,) = np.nonzero(segments[0] == number)
        part = slice(places[0], places[-1] + 1)
        assert np.array_equal(packed[:, part], attend(part, None))
    assert not np.any(packed[:, segments[0] < 0])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"attention": {"chunk": 8}}, "chunk=8"),
        ({"attention": {"out_gate": True}}, "out_gate"),
    ],
)
def test_a_layer_without_an_exact_form_is_refused(changed, named):
    with pytest.raises(ConfigError, match=f"numerics=exact with.*{named}.*set numerics=fast"):
        made(dense(**changed))


def test_a_cache_in_few_bits_and_fp8_are_refused():
    execution = execution_on(policy=policy(PolicyName.BF16), cache_format=CacheFormat.INT8)
    with pytest.raises(ConfigError, match="cache=int8"):
        define_model(dense(), execution)
    with pytest.raises(ConfigError, match="numerics=exact with fp8"):
        PrecisionConfig(policy=PolicyName.BF16, numerics=Numerics.EXACT, fp8=Fp8Matmuls())


def test_attention_that_was_not_compared_on_a_gpu_is_refused():
    config = dense(attention=WINDOWED).blocks[0].mixer
    q, k = (jax.ShapeDtypeStruct((1, 64, n, 8), jnp.bfloat16) for n in (4, 2))
    attend = functools.partial(exact_attention, config=config, segment_ids_BT=None)
    with compiling_for(H200), pytest.raises(UnsupportedError, match=r"sinks=True.*head_dim=8"):
        jax.eval_shape(attend, q, k, k)


def test_a_mesh_that_splits_sums_is_refused():
    placement = Placement(mesh=make_mesh(MeshConfig(context=2), devices=jax.devices()[:2]))
    with pytest.raises(UnsupportedError, match=r"mesh with context=2.*give their devices to"):
        execution_on(placement, policy=policy(PolicyName.FP32))


@pytest.mark.parametrize("columns", [128, 256, 1024, 1280, 4096])
def test_rows_of_any_number_are_normalized_in_tiles_of_one_kind(columns):
    form = NormForm(
        columns=columns, epsilon=1e-5, centered=False, biased=False, residual=False,
        dtype=jnp.dtype("bfloat16"),
    )  # fmt: skip
    scale = jax.ShapeDtypeStruct((columns,), jnp.float32)

    def tiles(rows):
        x = jax.eval_shape(whole_tiles, jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16))
        return config_for(x.shape[0], RowCall.of(forward(form), (x,), (scale,)))

    assert len({tiles(rows) for rows in (1, 2, 3, 8, 63, 200, 8192)}) == 1


def test_forward_passes_of_one_width_have_key_tiles_of_one_size():
    sizes = {}
    for (kernel, key), config in SHIPPED.items():
        if kernel == "forward":
            sizes.setdefault(key.split()[0], set()).add(config.block_kv)
    assert all(len(each) == 1 for each in sizes.values()), sizes


def test_gradients_of_exact_numerics_are_those_of_fast_ones():
    """And nothing is kept for them but logits and one sum of each row."""
    logits = 3.0 * jax.random.normal(jax.random.key(0), (2, 5, 11))
    ids = jax.random.randint(jax.random.key(1), (2, 5), 0, 11)
    weights = jnp.arange(10.0).reshape(2, 5)

    def exact(logits):
        return jnp.sum(weights * ordered_log_probability(pinned(logits), ids))

    def fast(logits):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1)
        return jnp.sum(weights * chosen[..., 0])

    (value, gradient), wanted = (jax.value_and_grad(f)(logits) for f in (exact, fast))
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted[1], atol=1e-5)
    assert rounded(jnp.float32(1.001), jnp.dtype("bfloat16")) == jnp.bfloat16(1.0)
    _, backward = jax.vjp(lambda x: rounded(pinned(x), jnp.dtype("bfloat16")), logits)
    assert not jax.tree.leaves(backward)
