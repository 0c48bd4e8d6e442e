"""Matmuls of 8-bit operands against NumPy, which quantizes by its own code; refusals; the watch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfra.config.precision import (
    Fp8Format,
    Fp8Matmuls,
    Fp8Scales,
    Fp8Scaling,
    PolicyName,
    PrecisionConfig,
    Site,
)
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.numerics.policy import policy_of, unquantized
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.fp8 import QUANTIZED
from jaxinfra.ops.fp8_operands import empty_record
from jaxinfra.ops.multiply import GatheredWeight, multiply
from jaxinfra.training.statistics import Fp8Watch, fp8_record
from tests.rounding import Rounded
from tests.tolerance import assert_within_rounding

B, T, D, N, H = 2, 256, 200, 2, 72
SPEC = "BTD,DNH->BTNH"
TYPES = {Fp8Format.E4M3: ml_dtypes.float8_e4m3fn, Fp8Format.E5M2: ml_dtypes.float8_e5m2}
LARGEST = {Fp8Format.E4M3: 448.0, Fp8Format.E5M2: 57344.0}


def recipe_of(config: Fp8Matmuls) -> Recipe:
    return policy_of(PrecisionConfig(policy=PolicyName.BF16, fp8=config)).recipe(Site.PROJECTION)


def arrays():
    """x, weight and cotangent in bf16, of rows whose sizes differ by powers of ten."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, D)) * 10.0 ** rng.uniform(-2, 2, (B, T, 1))
    weight = rng.normal(size=(D, N, H)) * 10.0 ** rng.uniform(-1, 0, (D, 1, 1))
    cotangent = rng.normal(size=(B, T, N, H)) * 1e-4
    cotangent[0, :, 0, 3] = 0.0
    x, weight, cotangent = (each.astype(ml_dtypes.bfloat16) for each in (x, weight, cotangent))
    return x, weight, cotangent


def blocks_of(shape, rows: int, columns: int):
    """Slices of blocks of a matrix."""
    return [
        (slice(i, i + rows), slice(j, j + columns))
        for i in range(0, shape[0], rows)
        for j in range(0, shape[1], columns)
    ]


def rounded_to(matrix, config: Fp8Matmuls, kind: Fp8Format, size) -> Rounded:
    """A matrix as 8 bits hold it: each block of ``size`` by its own largest element, in fp32."""
    result = Rounded(np.zeros(matrix.shape))
    rows, columns = (
        whole if part is None else part for part, whole in zip(size, matrix.shape, strict=True)
    )
    for block in blocks_of(matrix.shape, rows, columns):
        part = matrix[block].astype(np.float32)
        largest = np.maximum(np.abs(part).max(), np.float32(2.0**-100))
        if config.scales is Fp8Scales.POWER_OF_TWO:
            scale = np.float32(2.0 ** np.ceil(np.log2(float(largest) / LARGEST[kind])))
            inverse = np.float32(1.0) / scale
        else:
            scale = largest * np.float32(1.0 / LARGEST[kind])
            inverse = np.float32(LARGEST[kind]) / largest
        values = (part * inverse).astype(TYPES[kind]).astype(np.float64)
        result[block] = Rounded(values) * float(scale)
    return result


SIZES = {  # of x or a cotangent, of a weight: rows and contracted dim
    Fp8Scaling.BLOCKS: ((1, 128), (128, 128)),
    Fp8Scaling.SQUARES: ((128, 128), (128, 128)),
}


def expected(config: Fp8Matmuls, x, weight, cotangent):
    """y, dx and dweight in float64, from operands rounded along the dim that is contracted."""
    tokens, of_weight = SIZES[config.scaling]
    w = weight.reshape(len(weight), -1)
    width, outputs = w.shape
    shapes = cotangent.shape, x.shape, weight.shape
    x, g = x.reshape(-1, width), cotangent.reshape(-1, outputs)
    first, last = config.forward, config.gradient
    to = functools.partial(rounded_to, config=config)
    y = np.matmul(to(x, kind=first, size=tokens), to(w.T, kind=first, size=of_weight).T)
    dx = np.matmul(to(g, kind=last, size=tokens), to(w, kind=first, size=of_weight).T)
    dw = np.matmul(to(x.T, kind=first, size=tokens), to(g.T, kind=last, size=tokens).T)
    return tuple(each.reshape(shape) for each, shape in zip((y, dx, dw), shapes, strict=True))


CONFIGS = {
    "blocks": Fp8Matmuls(),
    "squares": Fp8Matmuls(scaling=Fp8Scaling.SQUARES),
    "blocks by powers of two": Fp8Matmuls(scales=Fp8Scales.POWER_OF_TWO, gradient=Fp8Format.E5M2),
}


@functools.cache
def computed(name: str):
    """y, dx, dweight and what the record emits."""
    recipe = recipe_of(CONFIGS[name])

    def run(x, weight, cotangent):
        def product(x, weight, record):
            return multiply(SPEC, x, weight, recipe=recipe, record=record)

        y, pull = jax.vjp(product, x, weight, empty_record())
        return y, *pull(cotangent)

    x, weight, cotangent = map(jnp.asarray, arrays())
    return jax.tree.map(np.asarray, jax.jit(run)(x, weight.astype(jnp.float32), cotangent))


@pytest.mark.slow_cases("blocks by powers of two")
@pytest.mark.parametrize("name", CONFIGS)
def test_product_and_gradients_are_those_of_rounded_operands(name):
    y, dx, dweight, _ = computed(name)
    assert (y.dtype, dx.dtype, dweight.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert_within_rounding((y, dx, dweight), expected(CONFIGS[name], *arrays()))


def test_another_blocks_scale_is_caught():
    config = CONFIGS["blocks"]
    wrong = expected(dataclasses.replace(config, scaling=Fp8Scaling.SQUARES), *arrays())
    with pytest.raises(AssertionError, match="spread"):
        assert_within_rounding(computed("blocks")[:3], wrong)


def test_a_record_tells_what_8_bits_lose():
    """Largest elements, and more small rows that vanish where larger ones share their scale."""
    largest = [np.abs(each.astype(np.float32)).max() for each in arrays()]
    of_rows, of_squares = (computed(name)[3] for name in ("blocks", "squares"))
    for emitted in (of_rows, of_squares):
        np.testing.assert_allclose(emitted[:, 0], largest, rtol=1e-6)
        assert np.all(emitted[:, -1] == 0.0)
    assert of_squares[0, -2] > 10 * of_rows[0, -2]


@pytest.mark.parametrize("scaling", Fp8Scaling)
def test_what_is_kept_for_the_backward_pass_is_what_was_quantized(scaling):
    """``jax.checkpoint`` would make infinities of 8-bit floats above 240."""
    x, weight, cotangent = (jnp.asarray(each) for each in arrays())
    recipe = recipe_of(Fp8Matmuls(scaling=scaling))

    def loss(x, weight):
        return jnp.vdot(multiply(SPEC, x, weight, recipe=recipe), cotangent)

    kept = jax.checkpoint(
        loss, policy=jax.checkpoint_policies.save_only_these_names(QUANTIZED), prevent_cse=False
    )
    both = [jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, weight) for f in (loss, kept)]
    for plain, with_names in zip(*(jax.tree.leaves(each) for each in both), strict=True):
        np.testing.assert_array_equal(np.asarray(plain), np.asarray(with_names))


def test_what_is_no_matmul_is_refused():
    recipe = recipe_of(Fp8Matmuls())
    with pytest.raises(UnsupportedError, match="is no matmul of tokens and a weight"):
        multiply("BTNH,RNH->BTNR", jnp.ones((1, 2, 3, 4)), jnp.ones((5, 3, 4)), recipe=recipe)


def test_a_gathered_weight_in_8_bits_is_refused():
    x, weight = map(jnp.asarray, arrays()[:2])
    kept = GatheredWeight(share=weight, value=weight)
    with pytest.raises(UnsupportedError, match=r"gathered in bfloat16.* leave keep_gathered=False"):
        multiply(SPEC, x, kept, recipe=recipe_of(Fp8Matmuls()))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"sites": (Site.EXPERTS,), "scaling": Fp8Scaling.SQUARES},
            "scaling=squares: groups .* choose scaling=blocks",
        ),
        ({"sites": (Site.ROUTER,)}, "sends a token elsewhere"),
        ({"sites": ()}, "names no matmul"),
    ],
    ids=["experts", "router", "nothing"],
)
def test_configs_that_cannot_be_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        Fp8Matmuls(**settings)


def test_other_sites_and_evaluation_stay_in_the_policys_format():
    policy = policy_of(PrecisionConfig(policy=PolicyName.BF16, fp8=Fp8Matmuls()))
    assert policy.recipe(Site.PROJECTION).fp8 is not None
    assert all(policy.recipe(site).fp8 is None for site in Site if site is not Site.PROJECTION)
    assert unquantized(policy).recipe(Site.PROJECTION).fp8 is None


def emitted(layer_values) -> dict[str, np.ndarray]:
    """Of one matmul in two layers: [largest, vanished, lost] of x, the weight, the cotangent."""
    return {"blocks/0/mlp/down": np.asarray(layer_values, np.float32)}


def test_the_watch_names_what_diverges():
    watch, usual = Fp8Watch(), np.tile([1.0, 0.01, 0.0], (2, 3, 1))
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = 2.0 ** rng.uniform(-1.5, 1.5, (2, 3, 1))
        assert watch.add(emitted(usual * noise)) == []
    grown = usual.copy()
    grown[1, 2, 0] = 40.0
    (text,) = watch.add(emitted(grown))
    assert text.startswith("blocks/0/mlp/down, cotangent: layer 1's largest element is 40")
    assert watch.add(emitted(grown)) == []  # said once
    lost = usual.copy()
    lost[0, 0, 2] = 0.02
    (text,) = watch.add(emitted(lost))
    assert text.startswith("blocks/0/mlp/down, x: 2.00% of layer 0's elements saturate")
    gone = usual.copy()
    gone[0, 1, 1] = 0.5
    (text,) = watch.add(emitted(gone))
    assert "weight: 50.0% of layer 0's elements become 0 in 8 bits" in text
    assert fp8_record(emitted(grown))["fp8/blocks/0/mlp/down/cotangent/largest"] == 40.0
