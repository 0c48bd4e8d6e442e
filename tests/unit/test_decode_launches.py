"""A layer of a decoding step of one row is seven kernels, and nothing of size between them.

What XLA makes of pads, iotas, norms and sums is a kernel each, which takes the host as long to
launch as one that reads a weight. The traced layer is read, which takes no GPU.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from experiments.bench.serving.decode import FORMATS, in_format
from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import GroupedAttentionConfig, MlpConfig, ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.rope import RopeConfig
from jaxinfra.model.cache import after_pass
from jaxinfra.model.definition import ModelDefinition, define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.model.whole_step import can_be_whole
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.ops import decode_layers
from jaxinfra.ops.quantized import H200, compiling_for
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.load import serving_placement
from pallas_kernels.few_rows_matmul import api
from pallas_kernels.few_rows_matmul.config import (
    FusedConfig,
    QuantizedConfig,
    default_fused,
    default_quantized,
)
from pallas_kernels.few_rows_matmul.reference import FewRowsCall
from tests.decoder_oracle import model

NAMES = (
    "norm, qkv",
    "append",
    "attend",
    "merge",
    "out, residual",
    "norm, gate, up",
    "down, residual",
)
MOVED = {"reshape", "squeeze", "freeze", "new_ref", "optimization_barrier"}
"""Primitives that no kernel is made of."""
ATTENTION = GroupedAttentionConfig(
    num_q_heads=16, num_kv_heads=4, head_dim=64, rope=RopeConfig(theta=100.0)
)
NUM_SLOTS, PAGES = 4096, 64


def config(model_dim: int = 512) -> ModelConfig:
    """Two small layers that the kernels take."""
    small = model(ATTENTION, vocab_size=64, model_dim=model_dim, max_positions=NUM_SLOTS)
    (stack,) = small.stacks
    fed = MlpConfig(kind=MlpKind.SWIGLU, hidden_dim=1024)
    block = dataclasses.replace(stack.pattern[0], feed_forward=fed)
    return dataclasses.replace(small, stacks=(dataclasses.replace(stack, pattern=(block,)),))


def traced_step(
    weights: str, sizes: ModelConfig, mesh: MeshConfig | None = None, *, batch: int = 1
) -> jax.extend.core.Jaxpr:
    """A step of so many rows in the midst of generation."""
    policy = stored_as_computed(POLICIES[PolicyName.BF16])
    placement = None if mesh is None else serving_placement(sizes, mesh)
    definition = define_model(sizes, execution_on(placement, policy=policy))
    served = execution_on(placement, policy=policy, decode_form=DecodeForm(packed=True))
    form = serving_form(definition, served)
    made = functools.partial(in_format, definition, form=FORMATS[weights].weights)
    drawn = jax.eval_shape(
        lambda key: serving_parameters(form, made(definition.initialize(key))), jax.random.key(0)
    )
    return traced(form, drawn, batch=batch, length=1)


def traced(
    form: ModelDefinition, parameters: Any, *, batch: int, length: int
) -> jax.extend.core.Jaxpr:
    """Rows of new tokens, into an empty cache or after what one holds."""

    def step(parameters: Any, ids: jax.Array, positions: jax.Array) -> jax.Array:
        decoder = form.bind(parameters)
        cache = decoder.empty_cache(batch=batch, num_slots=NUM_SLOTS)
        if length == 1:
            cache = tuple(after_pass(each, each.arrays) for each in cache)
        return decoder.logits(decoder.run(ids, positions=positions, cache=cache).x)

    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return jax.make_jaxpr(step)(parameters, ids, ids).jaxpr


def operations(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """Of a program and of what it calls; a kernel is one."""
    for equation in jaxpr.eqns:
        inner = list(jax.extend.core.jaxprs_in_params(equation.params))
        if equation.primitive.name == "mpmd_map" or not inner:
            yield equation
        for part in inner if equation.primitive.name != "mpmd_map" else ():
            yield from operations(part)


@pytest.mark.slow_cases("int4 g128")
@pytest.mark.parametrize("weights", ["bf16", "int4 g128"])
def test_a_layer_is_seven_kernels(weights, monkeypatch):
    # As if every product had been measured to be faster with what is around it.
    def fast(call: FewRowsCall) -> FusedConfig | QuantizedConfig | None:
        return default_fused(call.shape) if call.shape.bits == 16 else default_quantized(call.shape)

    monkeypatch.setattr(api, "fused_config", fast)
    monkeypatch.setattr(decode_layers, "MEASURED", {})
    with compiling_for(H200):
        step = traced_step(weights, config())
    layers = [e for e in step.eqns if e.params.get("name") == "one_repetition"]
    assert len(layers) == 2
    for layer in layers:
        found = [*operations(layer.params["jaxpr"].jaxpr)]
        kernels = [e for e in found if e.primitive.name == "mpmd_map"]
        assert len(kernels) == len(NAMES)
        others = [e for e in found if e not in kernels and e.primitive.name not in MOVED]
        for each in others:
            for out in each.outvars:
                # The plan of who attends to what is some numbers, one for all layers; where their
                # pages lie in the pools, XLA makes in one fusion of all layers.
                is_number = jnp.issubdtype(out.aval.dtype, jnp.integer) or out.aval.dtype == bool
                assert is_number, each
                assert out.aval.size <= PAGES, each


@pytest.mark.quick_cases("options0-True", "options3-False")
@pytest.mark.parametrize(
    ("options", "is_whole"),
    [
        ({}, True),
        ({"weights": "int4 g128"}, True),
        ({"weights": "fp8"}, True),
        ({"kind": "NVIDIA GH200 480GB"}, False),  # nobody timed it there
        ({"width": 576}, False),  # no multiple of a tile's rows
        ({"mesh": MeshConfig(tensor=2)}, True),
        ({"mesh": MeshConfig(tensor=4)}, False),  # nobody timed it there
    ],
)
def test_whole_layers_are_taken_where_they_were_measured(options, is_whole):
    def kernels(
        kind: str = H200.kind,
        weights: str = "bf16",
        width: int = 2048,
        mesh: MeshConfig | None = None,
    ) -> int:
        with compiling_for(dataclasses.replace(H200, kind=kind)):
            step = traced_step(weights, config(width), mesh)
        return len([e for e in operations(step) if e.primitive.name == "mpmd_map"])

    assert (kernels(**options) == 1) == is_whole


@pytest.mark.quick_cases("options0-True", "options1-False")
@pytest.mark.parametrize(
    ("options", "is_in_one_hop"),
    [
        ({}, True),
        ({"kind": "NVIDIA GH200 480GB"}, False),  # nobody timed it there
        ({"width": 1536}, False),  # no multiple of what a warpgroup takes
        ({"mesh": MeshConfig(tensor=2, fsdp=2)}, False),  # peers are all devices of the mesh
        ({"mesh": MeshConfig(tensor=4)}, False),  # nobody timed it there
        ({"batch": 300}, False),
        ({"weights": "int4 g128"}, False),
    ],
)
def test_rows_of_several_sequences_are_added_in_one_hop(options, is_in_one_hop):
    given = {"kind": H200.kind, "width": 2048, "mesh": MeshConfig(tensor=2), "batch": 4} | options
    with compiling_for(dataclasses.replace(H200, kind=given["kind"])):
        weights = given.get("weights", "bf16")
        step = traced_step(weights, config(given["width"]), given["mesh"], batch=given["batch"])
    found = [*operations(step)]
    kernels = [e.params["name"] for e in found if e.primitive.name == "mpmd_map"]
    assert kernels.count("open_mailbox") == is_in_one_hop
    assert kernels.count("sum_rows") == 4 * is_in_one_hop, "two in each of two layers"
    if is_in_one_hop:
        assert len([e for e in found if "psum" in e.primitive.name]) == 1, "the embedding's"


def test_a_prompt_into_an_empty_cache_is_appended_by_a_kernel():
    policy = stored_as_computed(POLICIES[PolicyName.BF16])
    served = execution_on(policy=policy, decode_form=DecodeForm(packed=True))
    form = serving_form(define_model(config(), execution_on(policy=policy)), served)
    drawn = jax.eval_shape(form.initialize, jax.random.key(0))
    with compiling_for(H200):
        found = operations(traced(form, drawn, batch=2, length=256))
    names = [e.params["name"] for e in found if e.primitive.name == "mpmd_map"]
    assert names == 2 * ["append_heads", "paged_attention_chunk"]


def test_models_whose_layers_differ_from_the_launch_are_told():
    (stack,) = config().stacks
    assert can_be_whole(config())
    for change in ({"window": 100}, {"sinks": True}, {"qkv_bias": True}):
        mixer = dataclasses.replace(ATTENTION, **change)
        block = dataclasses.replace(stack.pattern[0], mixer=mixer)
        changed = dataclasses.replace(stack, pattern=(block,), repeats=1)
        assert not can_be_whole(dataclasses.replace(config(), stacks=(changed,)))
    block = dataclasses.replace(stack.pattern[0], mixer=dataclasses.replace(ATTENTION, window=100))
    several = dataclasses.replace(stack, pattern=(stack.pattern[0], block))
    assert not can_be_whole(dataclasses.replace(config(), stacks=(several,)))
