"""Floating-point operations of a decoder, counted as multiply and add."""

from jaxinfra.config.model import MixerConfig, ModelConfig


def mean_visible_keys(attention: MixerConfig, *, sequence_length: int) -> float:
    """Keys an average query of a whole document sees: T/2 causal, less under a window."""
    length = sequence_length
    if attention.window is None or attention.window >= length:
        return length / 2
    window = attention.window
    return window - window * window / (2 * length)


def training_flops_per_token(
    config: ModelConfig, *, num_parameters: int, sequence_length: int, num_frozen: int = 0
) -> float:
    """Forward and backward: 6 FLOPs a matmul parameter, and 12 a query-key-width triple.

    A frozen parameter has no gradient of its own: 4.

    Embedding rows are looked up, not multiplied, so an untied or a learned position table does not
    count. Causal attention counts the keys that are seen, recomputation and packing do not count
    (PaLM, arXiv 2204.02311, appendix B, with attention halved for causality).
    """
    lookups = 0 if config.tie_embeddings else config.vocab_size * config.model_dim
    if config.learned_positions:
        lookups += config.max_positions * config.model_dim
    core = sum(
        6
        * (block.mixer.score_width + block.mixer.value_width)
        * mean_visible_keys(block.mixer, sequence_length=sequence_length)
        for block in config.layers
    )
    unused = 2.0 * (num_frozen - lookups) if num_frozen else 0.0
    return 6.0 * (num_parameters - lookups) - unused + core


def palm_flops_per_token(
    config: ModelConfig, *, num_parameters: int, sequence_length: int
) -> float:
    """``6 N + 12 L H Q T``, PaLM's own accounting (arXiv 2204.02311, appendix B), to compare with.

    All parameters count, and every query is taken to see every key: at most twice the attention of
    ``training_flops_per_token``.
    """
    widths = (block.mixer.score_width for block in config.layers)
    return 6.0 * num_parameters + 12.0 * sum(widths) * sequence_length
