"""The planner's loss is the one that the code runs: the same form, in the same chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxinfra.config.presets import MODELS
from jaxinfra.ops.cross_entropy import HOPPER_LEAST_IDS, linear_cross_entropy
from jaxinfra.ops.quantized import H200, compiling_for
from jaxinfra.planning.layout import lay_out
from jaxinfra.planning.model import plan_model
from jaxinfra.planning.operations import PlannedCollective, loss_form, loss_operations


def llama(vocab):
    config = MODELS["llama32_1b"]()
    return plan_model(dataclasses.replace(config, vocab_size=vocab))


WIDTH = 128


def traced(*, rows, length, ids, num_devices=1):
    """(whether it is the kernel, chunks) of the loss's gradient."""
    shape = jax.ShapeDtypeStruct

    def total(hidden, table, targets, weights):
        return linear_cross_entropy(hidden, table, targets, weights, num_devices=num_devices).total

    with compiling_for(H200):
        jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1)))(
            shape((rows, length, WIDTH), jnp.bfloat16),
            shape((ids, WIDTH), jnp.float32),
            shape((rows, length), jnp.int32),
            shape((rows, length), jnp.float32),
        )
    kernel = "wgmma" in str(jaxpr)
    loops = [each for each in jaxpr.eqns if each.primitive.name == "scan"]
    turns = sum(each.params["length"] for each in loops)
    return kernel, turns + kernel  # the kernel's first chunk comes before the loop


@pytest.mark.parametrize(
    ("layout", "vocab"),
    [
        pytest.param({"batch": 4, "length": 4096}, 128_256, marks=pytest.mark.slow),
        ({"batch": 1, "length": 1024}, 128_256),
        pytest.param({"batch": 32, "length": 2048, "fsdp": 4}, 151_936, marks=pytest.mark.slow),
        ({"batch": 16, "length": 4096, "fsdp": 2, "tensor": 2}, 262_144),
        ({"batch": 4, "length": 4096}, 32_000),
        ({"batch": 8, "length": 4096, "tensor": 4}, 128_256),
        ({"batch": 2, "length": 4096, "context": 4}, 50_176),
    ],
    ids=str,
)
def test_form_and_chunks_are_the_codes(layout, vocab):
    layout = lay_out(**layout)
    form = loss_form(llama(vocab), layout)
    own = vocab // layout.mesh.tensor
    assert form.kernel == (own >= HOPPER_LEAST_IDS)
    rows, length = layout.micro_rows, layout.micro_tokens // layout.micro_rows
    # Devices run the kernel on their own tokens and ids; XLA's form is of the whole vocabulary.
    ids = own if form.kernel else vocab
    found = traced(
        rows=rows, length=length, ids=ids, num_devices=1 if form.kernel else layout.mesh.tensor
    )
    assert found == (form.kernel, form.chunks)
    assert form.chunk_bytes <= (470 if form.kernel else 1.5 * 1024) * 2**20


def test_what_devices_that_share_the_vocabulary_tell_each_other():
    """Of the kernel, 20 bytes a token, and dx once in 16 bits; of XLA's form, dx in fp32."""
    model = llama(262_144)
    layout = lay_out(batch=4, length=4096, tensor=2)
    tokens, width = layout.micro_tokens, model.config.model_dim

    def sent(layout):
        return sum(
            each.size * each.count
            for each in loss_operations(model, layout)
            if isinstance(each, PlannedCollective)
        )

    assert sent(layout) == pytest.approx(tokens * (2 * width + 20))
    traits = dataclasses.replace(layout.traits, loss_kernel=False)
    portable = dataclasses.replace(layout, traits=traits)
    assert sent(portable) == pytest.approx(tokens * (4 * width + 8))
