"""Floating-point operations, a multiply and an add counted as two.

Causal attention counts the keys that are seen, exactly: T (T + 1) / 2 pairs of a sequence.
"""

from jaxinfra.planning.params import matmul_parameters
from jaxinfra.planning.shapes import Attention, Latent, ModelShape


def visible_pairs(length: int, *, window: int | None = None, start: int = 0) -> int:
    """Query-key pairs of ``length`` queries at positions start.., each seeing itself and before.

    Args:
        window: most keys a query sees, itself among them.
        start: positions cached before the first query.
    """
    if window is None:
        return length * start + length * (length + 1) // 2
    # Queries whose whole past fits the window see start + i + 1 keys, the others ``window``.
    growing = min(max(window - start, 0), length)
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window


def attention_flops(
    attention: Attention, length: int, *, start: int = 0, causal: bool = True
) -> float:
    """Forward FLOPs of q k^T and p v of one sequence and layer: 2 pairs (score + value width)."""
    if causal:
        pairs = visible_pairs(length, window=attention.window, start=start)
    else:
        pairs = length * (start + length)
    return 2.0 * pairs * (attention.score_width + attention.value_width)


def forward_flops(shape: ModelShape, length: int, *, batch: int = 1, start: int = 0) -> float:
    """One forward pass over ``batch`` sequences of ``length`` new tokens after ``start`` cached.

    2 FLOPs an active matmul parameter and token (Kaplan et al. 2020, table 1), and attention.
    """
    core = sum(
        layer.count * attention_flops(layer.attention, length, start=start)
        for layer in shape.layers
    )
    return batch * (2.0 * matmul_parameters(shape) * length + core)


def training_flops(shape: ModelShape, length: int, *, batch: int = 1) -> float:
    """Forward and backward: three times the forward, recomputation not counted (PaLM, app. B)."""
    return 3.0 * forward_flops(shape, length, batch=batch)


def decode_flops(shape: ModelShape, context: int, *, batch: int = 1) -> float:
    """One new token a sequence after ``context`` cached ones.

    Latent attention scores the cached latents themselves, its projections absorbed into queries and
    outputs (arXiv 2405.04434, section 2.1.2): fewer bytes for more FLOPs.
    """
    flops = forward_flops(shape, 1, batch=batch, start=context)
    for layer in shape.layers:
        attention = layer.attention
        if isinstance(attention, Latent):
            absorbed = attention.num_q_heads * (2 * attention.kv_rank + attention.rope_dim)
            wider = absorbed - attention.score_width - attention.value_width
            pairs = visible_pairs(1, window=attention.window, start=context)
            flops += batch * layer.count * 2.0 * pairs * wider
    return flops


def chinchilla_flops(parameters: float, tokens: float) -> float:
    """6 N D (Hoffmann et al. 2022)."""
    return 6.0 * parameters * tokens


def gpt_layer_forward_flops(*, batch: int, length: int, width: int) -> float:
    """2 (12 B L H^2 + 2 B H L^2) of one GPT layer, attention not causal (arXiv 2104.04473)."""
    return 2.0 * (12 * batch * length * width**2 + 2 * batch * width * length**2)


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


def megatron_model_flops(*, batch: int, length: int, layers: int, width: int, vocab: int) -> float:
    """72 B s l h^2 (1 + s/(6h) + V/(12 l h)): without recomputation (arXiv 2205.05198, app. A)."""
    return (
        72.0
        * batch
        * length
        * layers
        * width**2
        * (1 + length / (6 * width) + vocab / (12 * layers * width))
    )


def nemo_flops_per_token(
    *, parameters: int, vocab: int, width: int, layers: int, length: int
) -> float:
    """6 (N - V h) + 6 L h s: what NVIDIA's published Llama-3 figures count, attention halved."""
    return 6.0 * (parameters - vocab * width) + 6.0 * layers * width * length


def training_days(*, tokens: float, parameters: float, devices: int, flops_per_s: float) -> float:
    """8 T P / (n X), in days: forward, backward and a second forward (arXiv 2104.04473, eq. 4)."""
    return 8 * tokens * parameters / (devices * flops_per_s) / 86_400
