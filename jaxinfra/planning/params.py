"""Parameter counts."""

import functools

from jaxinfra.planning.shapes import ModelShape, Weight


def total_parameters(shape: ModelShape) -> int:
    """Elements of every weight."""
    return sum(weight.total for weight in shape.weights())


def active_parameters(shape: ModelShape, *, with_embedding: bool = True) -> int:
    """Elements that one token meets: all but the routed experts it is not sent to.

    Args:
        with_embedding: count the whole input table, as DeepSeek-V3's "37B activated" does, though
            a token reads one row of it. A tied table always counts: the logits multiply with it.
    """
    skipped = {"embedding"} if not with_embedding and not shape.tie_embeddings else set()
    return round(
        sum(
            weight.total * weight.active for weight in shape.weights() if weight.name not in skipped
        )
    )


@functools.lru_cache(maxsize=64)
def matmul_parameters(shape: ModelShape) -> int:
    """Active elements that a token is multiplied with: neither lookups nor norms nor biases."""
    return round(sum(weight.total * weight.active for weight in shape.weights() if weight.matmul))


def parameters_by_role(shape: ModelShape) -> dict[str, int]:
    """Elements of attention, mlp, experts, shared experts, router, norms and tables."""
    roles: dict[str, int] = {}
    for weight in shape.weights():
        roles[_role(weight)] = roles.get(_role(weight), 0) + weight.total
    return roles


def _role(weight: Weight) -> str:
    head = weight.name.partition("/")[0]
    return "norm" if head.startswith(("norm", "final_norm")) else head


def gpt_layer_parameters(width: int) -> int:
    """12 H^2 + 13 H of one GPT layer, biases and norms counted (Megatron, arXiv 2104.04473)."""
    return 12 * width * width + 13 * width


def gpt_parameters(*, layers: int, width: int, vocab: int, length: int) -> float:
    """12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)) (arXiv 2104.04473, equation 2)."""
    return (
        12 * layers * width**2 * (1 + 13 / (12 * width) + (vocab + length) / (12 * layers * width))
    )
