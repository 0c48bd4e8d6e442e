"""Formulas that others publish, which the self-check and references compare with."""

from jaxinfra.planning.formats import RECIPES


def gpt_parameters(*, layers: int, width: int, vocab: int, length: int) -> float:
    """12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)) (arXiv 2104.04473, equation 2)."""
    return (
        12 * layers * width**2 * (1 + 13 / (12 * width) + (vocab + length) / (12 * layers * width))
    )


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


def megatron_activation_bytes(
    *,
    layers: int,
    width: int,
    heads: int,
    length: int,
    micro_batch: int,
    tensor: int,
    pipe: int = 1,
    chunks: int = 1,
    sequence_parallel: bool = False,
    selective: bool = False,
) -> float:
    """Activations of the first pipeline stage's device, without full recomputation.

    s b h L (10 + 24/t + 5 a s/(h t)), or s b h L (34/t + 5 a s/(h t)) with sequence parallelism,
    less the score term with selective recomputation; the stage holds p micro-batches of L/p
    layers, and 1 + (p-1)/(p m) times as much interleaved in m chunks (arXiv 2205.05198,
    equations 2, 4, 6 and section 4.2.3).
    """
    scores = 0.0 if selective else 5 * heads * length / (width * tensor)
    rest = 34 / tensor if sequence_parallel else 10 + 24 / tensor
    whole = length * micro_batch * width * layers * (rest + scores)
    return whole * (1 + (pipe - 1) / (pipe * chunks) if chunks > 1 else 1)
