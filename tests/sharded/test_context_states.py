"""Linear attention and convolutions over the context axis: values and gradients of one device.

Both are fp32 sums of the same terms in other orders; terms are of order 1.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import stacked
from jaxinfra.config.presets import MODELS
from jaxinfra.config.recurrent import GatedDeltaConfig
from jaxinfra.errors import ConfigError
from jaxinfra.ops.linear_attention import linear_attention, short_convolution
from jaxinfra.parallel.context.states import ContextRecurrence
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import zigzag_indices
from jaxinfra.planning.layout import lay_out
from jaxinfra.planning.model import plan_model
from jaxinfra.planning.operations import layer_operations

SHARDS, LENGTH = 4, 32
ORDER = zigzag_indices(LENGTH, SHARDS)
# Documents that end within chunks of 4 tokens, between them, and that are longer than some.
IDS = np.array([[0] * 3 + [1] * 5 + [2] * 17 + [-1] * 7, [5] * 32], np.int32)


@functools.cache
def sharded() -> ContextRecurrence:
    mesh = make_mesh(MeshConfig(context=SHARDS), devices=jax.devices()[:SHARDS])
    return ContextRecurrence(placement=Placement(mesh=mesh))


def operands(kind: str) -> dict[str, jax.Array]:
    heads, values, width = {"channels": (4, 4, 3), "rates": (1, 6, 3)}.get(kind, (2, 4, 3))
    keys = iter(jax.random.split(jax.random.key(3), 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), (2, LENGTH, *shape))

    q, k, v = normal(heads, width), normal(heads, width), normal(values, 1 + (kind != "rates"))
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    decay = -jax.nn.softplus(normal(values, *[width] * (kind == "channels")))
    given = {"q": q, "k": k, "v": v, "log_decay": decay}
    if kind in ("delta", "channels"):
        given["beta"] = jax.nn.sigmoid(normal(values))
    if kind == "rates":
        given["rates"] = jax.random.uniform(next(keys), (values, width))
    return given


def value_and_gradients(function, given, ids):
    def scalar(given):
        out = function(given, ids)
        weights = jax.random.normal(jax.random.key(7), out.shape)
        return jnp.sum(weights * out), out

    (_, out), gradients = jax.jit(jax.value_and_grad(scalar, has_aux=True))(given)
    return out, gradients


def in_zigzag(function):
    """A function of arrays in the sequence's order, by one of arrays in zig-zag order."""

    def moved(x):
        is_of_tokens = x is not None and x.shape[:2] == (2, LENGTH)
        return jnp.asarray(x)[:, ORDER] if is_of_tokens else x

    return lambda given, ids: function(jax.tree.map(moved, given), moved(ids))[:, np.argsort(ORDER)]


def assert_as_one_device(over_context, whole, given, ids):
    got = value_and_gradients(in_zigzag(over_context), given, ids)
    want = value_and_gradients(whole, given, ids)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.quick_cases("delta-packed")
@pytest.mark.parametrize("ids", [IDS, None], ids=["packed", "one"])
@pytest.mark.parametrize("kind", ["delta", "channels", "added", "rates"])
def test_states_pass_along_chunks(kind, ids):
    def computed(recur, given, ids):
        given = {"beta": None, "rates": None, **given}
        return recur(**given, state=None, segment_ids=ids)[0]

    over_context = functools.partial(computed, sharded())
    whole = functools.partial(computed, linear_attention)
    assert_as_one_device(over_context, whole, operands(kind), ids)


@pytest.mark.quick_cases("packed")
@pytest.mark.parametrize("ids", [IDS, None], ids=["packed", "one"])
def test_convolutions_read_the_chunk_before(ids):
    x, weight = jax.random.normal(jax.random.key(1), (2, LENGTH, 2, 3)), jnp.ones((2, 3, 4))

    def computed(convolve, given, ids):
        return convolve(*given, tail=None, segment_ids=ids)

    over_context = functools.partial(computed, sharded().convolve)
    whole = functools.partial(computed, short_convolution)
    assert_as_one_device(over_context, whole, (x, weight), ids)
    with pytest.raises(ConfigError, match=r"chunks of 2 tokens .* reads 3 tokens back"):
        sharded().convolve(x[:, :16], weight, tail=None, segment_ids=None)


def test_the_plan_counts_gathered_states():
    config = MODELS["tiny"]()
    delta = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=5)
    (block,) = config.blocks
    block = dataclasses.replace(block, mixer=delta)
    config = dataclasses.replace(config, stacks=stacked(block, num_layers=2))
    (layer,) = plan_model(config).layers
    planned = layer_operations(layer, lay_out(batch=4, length=64, context=2))
    (states,) = (each for each in planned.forward if getattr(each, "axis", None) == "context")
    tails = sum(math.prod(each.shape) for each in delta.cache.state if each.name != "state")
    assert states.size == 4 * 4 * (4 * 6 * (5 + 6) + tails) * 4  # rows, chunks, numbers, bytes
