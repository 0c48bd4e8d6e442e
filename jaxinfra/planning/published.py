"""Formulas that others publish, which the self-check and references compare with."""

from jaxinfra.planning.formats import RECIPES


def megatron_flops(*, batch: int, length: int, layers: int, width: int, vocab: int) -> float:
    """96 B s l h^2 (1 + s/(6h) + V/(16 l h)): a step with full recomputation (arXiv 2104.04473,
    equation 3).
    """
    return (
        96.0
        * batch
        * length
        * layers
        * width**2
        * (1 + length / (6 * width) + vocab / (16 * layers * width))
    )


def nemo_flops_per_token(
    *, parameters: int, vocab: int, width: int, layers: int, length: int
) -> float:
    """6 (N - V h) + 6 L h s: what NVIDIA's published Llama-3 figures count, attention halved."""
    return 6.0 * (parameters - vocab * width) + 6.0 * layers * width * length


def training_days(*, tokens: float, parameters: float, devices: int, flops_per_s: float) -> float:
    """8 T P / (n X), in days: forward, backward and a second forward (arXiv 2104.04473, eq. 4)."""
    return 8 * tokens * parameters / (devices * flops_per_s) / 86_400


def zero_bytes(parameters: float, devices: int, stage: int, *, recipe: str = "fp16-adam") -> float:
    """Bytes a device of weights, gradients and optimizer at a ZeRO stage.

    (W + G + O), (W + G + O/N), (W + (G + O)/N), (W + G + O)/N (arXiv 1910.02054, figure 1).
    """
    sizes = RECIPES[recipe]
    by_stage = (
        (sizes.optimizer_bytes, 1),
        (sizes.gradient_bytes, 2),
        (sizes.weights, 3),
    )
    return sum(size * parameters / (devices if stage >= first else 1) for size, first in by_stage)
