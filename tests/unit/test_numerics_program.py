"""Precision asserted on programs: what the compiler is handed is what the policy says.

Steps are lowered for CUDA, which needs no GPU; the CPU's compiled program is read as well.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import Remat
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.multiply import multiply
from tests.lowered_matmuls import (
    Matmul,
    Reduction,
    compiled_matmuls,
    matmuls,
    opaque_operations,
    reductions,
)
from tests.sharded.cases import build, gemma_like, gpt_like, llama_like, packed_batch

COMPUTE = {PolicyName.FP32: "f32", PolicyName.BF16: "bf16", PolicyName.FP16: "f16"}
# Of one step: (matmuls a block forward, projections a block, blocks of the pattern). A projection
# has two backward matmuls, attention five, the fused loss three in all.
SIZES = {gpt_like: (8, 6, 1), gemma_like: (9, 7, 2)}


def lowered_for_cuda(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


@functools.cache
def lowered_step(make, policy: PolicyName, remat: Remat = Remat.NONE):
    built = build(make(), policy=policy, accumulation=2, z_loss=0.01, remat=remat)
    traced = built.step.trace(built.shapes, packed_batch())
    return traced.lower(lowering_platforms=("cuda",))


def equation(matmul: Matmul) -> str:
    """The einsum that a matmul came from: its scope ends in ``BTD,DF->BTF/dot_general``."""
    return matmul.scope.split("/")[-2]


def is_weight_gradient(matmul: Matmul) -> bool:
    """Whether the result has no batch dim left, neither B nor the loss's b."""
    return not set("Bb") & set(equation(matmul).partition("->")[2])


def wrong_matmuls(found: list[Matmul], compute: str) -> list[Matmul]:
    """Matmuls whose operands are not in ``compute``, whose sums are not pinned to fp32, that round
    a weight's gradient, or that autodiff wrote: its scope
    ``transpose(jvp(BTD,DF->BTF))`` is no equation, and it rounds weights' gradients.

    In bf16 alone no preset pins the sums: XLA's CUDA compiler would copy the operands, and sums
    bf16 in fp32 without one (``ops.multiply``; ``test_einsum_gpu`` measures it).
    """
    pinned = {"bf16": ("f32", None)}.get(compute, ("f32",))

    def right(matmul: Matmul) -> bool:
        return (
            re.fullmatch(r"\w+,\w+->\w+", equation(matmul)) is not None
            and matmul.lhs == matmul.rhs == compute
            and matmul.accumulator in pinned
            and matmul.result in (compute, "f32")
            and (matmul.result == "f32" or not is_weight_gradient(matmul))
        )

    return [matmul for matmul in found if not right(matmul)]


def wrong_reductions(found: list[Reduction]) -> list[Reduction]:
    """Floating-point reductions that are not in fp32."""
    return [each for each in found if "f" in each.dtype and each.dtype != "f32"]


@pytest.mark.slow_cases(
    "fp32-gemma_like", "fp32-gpt_like", "fp16-gemma_like", "bf16-gpt_like", "fp16-gpt_like"
)
@pytest.mark.parametrize("make", SIZES)
@pytest.mark.parametrize("policy", PolicyName)
def test_every_matmul_of_a_step_is_what_the_policy_says(make, policy):
    lowered = lowered_step(make, policy)
    found = matmuls(lowered)
    forward, projections, blocks = SIZES[make]
    assert len(found) == blocks * (forward + 2 * projections + 5) + 3
    weight_gradients = [matmul for matmul in found if is_weight_gradient(matmul)]
    assert len(weight_gradients) == blocks * projections + 1
    assert not wrong_matmuls(found, COMPUTE[policy])
    assert not opaque_operations(lowered), "a library call may hide a matmul"


@pytest.mark.slow_cases("fp32-gemma_like", "fp32-gpt_like", "fp16-gemma_like", "bf16-gpt_like")
@pytest.mark.parametrize("make", SIZES)
@pytest.mark.parametrize("policy", PolicyName)
def test_every_reduction_of_a_step_is_in_fp32(make, policy):
    found = reductions(lowered_step(make, policy))
    assert not wrong_reductions(found)
    # Norms, softmax and loss; biases' and embeddings' gradients (the latter scatters).
    for part in ("layer", "core", "loss", "final_norm", "optimizer", "scatter"):
        assert any(part in each.scope for each in found), f"no reduction of {part} was read"


@pytest.mark.slow  # the policy is of a scope, and so are they
def test_recomputed_matmuls_follow_the_policy_too():
    found = matmuls(lowered_step(gpt_like, PolicyName.BF16, Remat.FULL))
    forward, projections, blocks = SIZES[gpt_like]
    assert len(found) > blocks * (forward + 2 * projections + 5) + 3
    assert not wrong_matmuls(found, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [PolicyName.FP32, PolicyName.BF16])
def test_compiled_cpu_program_sums_in_fp32(policy):
    built = build(llama_like(), policy=policy)
    compiled = built.step.lower(built.shapes, packed_batch()).compile()
    found = compiled_matmuls(compiled)
    # Nine forward, two for each of seven projections and five of attention backward, three of loss.
    assert len(found) == 9 + 14 + 5 + 3
    # The CPU has no 16-bit products: operands are widened, which is exact.
    assert {(m.lhs, m.rhs, m.accumulator, m.result) for m in found} == {("f32",) * 4}


X, W = jnp.ones((2, 4, 8)), jnp.ones((8, 6))


def policy_einsum(name: PolicyName):
    recipe = POLICIES[name].recipe(Site.PROJECTION)
    return functools.partial(multiply, "BTD,DF->BTF", recipe=recipe)


def plain_fp16(x, w):
    return jnp.einsum("BTD,DF->BTF", x.astype(jnp.float16), w.astype(jnp.float16))


def rounded_weight_gradient(x, w):
    """The usual mixed-precision code: autodiff returns to fp32 after rounding to bf16."""
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return jnp.einsum("BTD,DF->BTF", x, w, precision=algorithm)


def gradient(function):
    return jax.grad(lambda x, w: jnp.sum(function(x, w).astype(jnp.float32)), argnums=(0, 1))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(policy_einsum(PolicyName.FP32), id="operands-in-fp32"),
        pytest.param(policy_einsum(PolicyName.FP16), id="operands-in-fp16"),
        pytest.param(gradient(rounded_weight_gradient), id="weight-gradient-rounded"),
    ],
)
def test_reader_notices_a_wrong_matmul(wrong):
    right = gradient(policy_einsum(PolicyName.BF16))
    assert not wrong_matmuls(matmuls(lowered_for_cuda(right, X, W)), "bf16")
    assert wrong_matmuls(matmuls(lowered_for_cuda(wrong, X, W)), "bf16")


def bias_in_bf16(x, b):
    return x.astype(jnp.bfloat16) + jnp.expand_dims(b.astype(jnp.bfloat16), (0, 1))


def gather_in_bf16(x, b):
    return b.astype(jnp.bfloat16).at[jnp.argsort(x[0, :, 0])].get()


@pytest.mark.parametrize("wrong", [bias_in_bf16, gather_in_bf16])
def test_reader_notices_a_wrong_reduction(wrong):
    found = reductions(lowered_for_cuda(gradient(wrong), X, jnp.ones(8)))
    assert [each.dtype for each in wrong_reductions(found)]


def test_reader_notices_a_hidden_matmul():
    def solve(a):
        return jnp.linalg.cholesky(a)

    assert opaque_operations(lowered_for_cuda(solve, jnp.eye(3)))


def test_reader_names_scopes():
    scopes = [matmul.scope for matmul in matmuls(lowered_step(gpt_like, PolicyName.BF16))]
    for part in ("attention", "core", "mlp", "loss", "jvp(layer)", "transpose(jvp(layer))"):
        assert any(part in scope for scope in scopes)


def test_reader_notices_an_accumulator_left_open():
    right = gradient(policy_einsum(PolicyName.FP16))
    assert not wrong_matmuls(matmuls(lowered_for_cuda(right, X, W)), "f16")
    assert wrong_matmuls(matmuls(lowered_for_cuda(plain_fp16, X, W)), "f16")
