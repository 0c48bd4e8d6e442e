"""Append and attention in one call: the definition, the kernel in the interpreter, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import InputError, UnsupportedError, append_and_attend
from pallas_kernels.common import device
from pallas_kernels.paged_attention.hopper import append_and_attend_hopper
from pallas_kernels.paged_attention.hopper.config import QueryLayout, config_for
from pallas_kernels.paged_attention.validate import make_call
from tests.kernels import step_cases as cases


def by_kernel(heads, k, v, tables, positions, rope, **options):
    call = make_call(
        heads[:, :, : heads.shape[2] - 2 * k.shape[2]], k, v, tables, positions[:, 0] + 1,
        query_lengths=None, value_width=None, **({"sinks": None} | options),
    )  # fmt: skip
    config = config_for(QueryLayout.of(call))
    config = dataclasses.replace(config, num_blocks=2, num_workers=1)
    return append_and_attend_hopper(call, heads, positions, rope, config=config, interpretable=True)


@pytest.mark.slow  # half a minute each: blocks are threads of Python
@pytest.mark.parametrize("case", cases.SHORT, ids=lambda case: case.name)
def test_the_kernel_is_both_functions(case):
    """A row longer than a tile, a new token at each end of a page, and a row without one."""
    step = cases.step_of(case, hidden=0.0)
    arguments = jax.tree.map(jnp.asarray, step.arguments)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.block_until_ready(
            jax.jit(by_kernel, static_argnames=STATIC)(*arguments, **step.options)
        )
    cases.assert_is_step(got, step)
    wrong = dataclasses.replace(step, want=(step.want[0] * 1.01, *step.want[1:]))
    with pytest.raises(AssertionError):
        cases.assert_is_step(got, wrong)


STATIC = ("window", "soft_cap", "scale")


@pytest.mark.parametrize("case", cases.SHORT[:1], ids=lambda case: case.name)
def test_both_functions_are_the_definition(case):
    step = cases.step_of(case, hidden=0.0)
    cases.assert_is_step(cases.run(step, implementation="xla"), step)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"T": 2}, "2 tokens per row"),
        ({"H": 256}, "heads of 256 columns are none of 64, 128"),
        ({"N": 12}, "12 query heads are no multiple of 8"),
        ({"K": 2}, "are not multiples of 4"),
        ({"size": 48}, "pages of 48 slots"),
    ],
    ids=str,
)
def test_refuses(changes, words):
    sizes = {"T": 1, "H": 64, "N": 8, "K": 4, "size": 16} | changes
    T, H, N, K = (sizes[name] for name in ("T", "H", "N", "K"))
    heads = np.zeros((1, T, N + 2 * K, H), jnp.bfloat16)
    pool = np.zeros((2, sizes["size"], K, H), jnp.bfloat16)
    rope = (np.ones((1, T, H // 2), np.float32),) * 2
    tables, positions = np.zeros((1, 2), np.int32), np.zeros((1, T), np.int32)
    with device.compiling_for(device.H200), pytest.raises(UnsupportedError, match=words):
        append_and_attend(heads, pool, pool, tables, positions, rope, implementation="hopper")


def test_names_an_implementation():
    step = cases.step_of(cases.SHORT[0])
    with pytest.raises(InputError, match="'auto' must be hopper or xla"):
        cases.run(step, implementation="auto")
    with pytest.raises(UnsupportedError, match="Hopper"):
        cases.run(step, implementation="hopper")
