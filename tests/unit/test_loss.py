"""linear_cross_entropy: both implementations and all gradients against float64 NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.cross_entropy import linear_cross_entropy
from tests.kernels.loss_oracle import exact
from tests.seeds import seeded
from tests.sharded.cases import COMPILER_OPTIONS
from tests.tolerance import assert_within_rounding

B, T, D, V = 3, 12, 16, 40
LOGITS_BYTES = B * T * V * 4
NARROW = ("bfloat16", "float16")
OPTIONS = {
    "plain": {},
    "z_loss": {"z_loss": 0.02},
    "soft_cap": {"logit_soft_cap": 1.5},
    "smoothed": {"label_smoothing": 0.2},
    "both": {"z_loss": 0.02, "logit_soft_cap": 1.5},
    "all": {"z_loss": 0.02, "logit_soft_cap": 1.5, "label_smoothing": 0.2},
}


@functools.cache
def inputs(dtype: str):
    """hidden, table, targets, weights; the table is fp32 but representable in ``dtype``."""
    rng = np.random.default_rng(seeded(0))
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    table = jnp.asarray((rng.normal(size=(V, D)) / 2).astype(jnp.dtype(dtype)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    weights = rng.choice([0.0, 1.0, 0.5], size=(B, T)).astype(np.float32)
    return hidden, table, targets, jnp.asarray(weights)


@functools.cache
def evaluate(dtype: str, **options):
    """(total, nll) and the gradients of the total by hidden and table."""
    hidden, table, targets, weights = inputs(dtype)

    def total(hidden, table):
        sums = linear_cross_entropy(hidden, table, targets, weights, **options)
        return sums.total, sums.nll

    gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    run = jax.jit(gradient, compiler_options=COMPILER_OPTIONS)
    return run(hidden, table)


@pytest.mark.slow_cases("both-float32", "smoothed-float32", "soft_cap-float32", "z_loss-float32")
@pytest.mark.parametrize(
    ("options", "dtype"), [*((each, "float32") for each in OPTIONS), *(("all", d) for d in NARROW)]
)
def test_reference_is_the_formula(options, dtype):
    got = evaluate(dtype, implementation="reference", **OPTIONS[options])
    assert_within_rounding(got, exact(inputs(dtype), **OPTIONS[options]), what=f"{options} {dtype}")


@pytest.mark.slow_cases(
    "both-4-float32",
    "plain-4-bfloat16",
    "plain-4-float16",
    "smoothed-4-float32",
    "soft_cap-4-float32",
    "z_loss-4-float32",
)
@pytest.mark.parametrize(
    ("options", "num_chunks", "dtype"),
    [
        *((each, 4, "float32") for each in OPTIONS),
        ("all", 1, "float32"),
        ("all", T, "float32"),
        *((each, 4, dtype) for each in ("plain", "all") for dtype in NARROW),
    ],
)
def test_chunked_is_no_worse_than_the_reference(options, num_chunks, dtype):
    chosen = OPTIONS[options]
    got = evaluate(dtype, implementation="xla", chunk_bytes=LOGITS_BYTES // num_chunks, **chosen)
    assert_within_rounding(got, exact(inputs(dtype), **chosen), what=f"{options} {dtype}")


@pytest.mark.parametrize(("chunk_length", "sequence_shards"), [(5, 1), (7, 1), (4, 2)])
def test_chunks_need_not_divide_positions_and_shards_change_nothing(chunk_length, sequence_shards):
    """12 positions, or twice 6, in chunks of another length; rows and halves of them apart, as
    devices would hold them.
    """
    got = evaluate(
        "float32",
        implementation="xla",
        chunk_bytes=chunk_length * V * 4,
        batch_shards=B,
        sequence_shards=sequence_shards,
        **OPTIONS["both"],
    )
    assert_within_rounding(got, exact(inputs("float32"), **OPTIONS["both"]))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_targets_of_weight_0_do_not_count(implementation):
    """Whatever they are: padding may hold ids that no table has."""
    hidden, table, targets, weights = inputs("float32")
    uncounted = np.asarray(weights) == 0.0
    padded = np.where(uncounted, np.int32(V + 7), targets)
    assert (padded != np.asarray(targets)).any()

    def total(hidden, table, targets):
        return linear_cross_entropy(
            hidden, table, targets, weights, implementation=implementation
        ).total

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    chex.assert_trees_all_equal(run(hidden, table, padded), run(hidden, table, targets))
    gradient = np.asarray(run(hidden, table, targets)[1][0])
    np.testing.assert_array_equal(gradient[uncounted], 0.0)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_cotangent_scales_and_nll_has_no_gradient(implementation):
    hidden, table, targets, weights = inputs("float32")

    def loss(table, factor):
        sums = linear_cross_entropy(hidden, table, targets, weights, implementation=implementation)
        return factor * sums.total + 100.0 * jax.lax.stop_gradient(sums.nll)

    gradient = jax.jit(jax.grad(loss))
    once, four_times = (np.asarray(gradient(table, factor)) for factor in (1.0, 4.0))
    np.testing.assert_array_equal(4 * once, four_times)

    def reported(table):
        return linear_cross_entropy(
            hidden, table, targets, weights, implementation=implementation
        ).nll

    np.testing.assert_array_equal(jax.jit(jax.grad(reported))(table), 0.0)


def test_memory_is_bounded_by_chunks():
    rows, length, width, vocab = 4, 64, 16, 512
    logits_bytes = rows * length * vocab * 4

    def temporaries(**options) -> int:
        def total(hidden, table, targets, weights):
            return linear_cross_entropy(hidden, table, targets, weights, **options).total

        floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        shapes = (
            floats((rows, length, width)),
            floats((vocab, width)),
            jax.ShapeDtypeStruct((rows, length), jnp.int32),
            floats((rows, length)),
        )
        compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    chunk_bytes = logits_bytes // 16
    gradients = (rows * length + 2 * vocab) * width * 4
    # A chunk's logits, probabilities and their gradient; both inputs' gradients, one of them
    # updated; the inputs once more, cut in chunks.
    bound = 3 * chunk_bytes + 2 * gradients
    assert bound < logits_bytes
    assert temporaries(implementation="xla", chunk_bytes=chunk_bytes) <= bound
    assert temporaries(implementation="reference") >= logits_bytes


def test_bad_calls_are_refused():
    hidden, table, targets, weights = inputs("float32")
    with pytest.raises(InputError, match=r"table has shape \(16, 40\).*asks for \[V, 16\]"):
        linear_cross_entropy(hidden, table.T, targets, weights)
    with pytest.raises(InputError, match=r"targets has shape \(3, 11\)"):
        linear_cross_entropy(hidden, table, targets[:, 1:], weights)
    with pytest.raises(InputError, match="weights are bfloat16"):
        linear_cross_entropy(hidden, table, targets, weights.astype(jnp.bfloat16))
    with pytest.raises(InputError, match="batch_shards=2 does not divide a batch of 3"):
        linear_cross_entropy(hidden, table, targets, weights, batch_shards=2)
    with pytest.raises(InputError, match="sequence_shards=5 does not divide a sequence of 12"):
        linear_cross_entropy(hidden, table, targets, weights, sequence_shards=5)
    with pytest.raises(InputError, match="'fast' is unknown; choose auto, hopper"):
        linear_cross_entropy(hidden, table, targets, weights, implementation="fast")
    with pytest.raises(InputError, match=r"label_smoothing=1\.0 must be at least 0 and below 1"):
        linear_cross_entropy(hidden, table, targets, weights, label_smoothing=1.0)
    with pytest.raises(UnsupportedError, match=r"it is of a whole table; implementation='xla' can"):
        linear_cross_entropy(
            hidden, table, targets, weights, implementation="reference", vocabulary_axes=("x",)
        )
