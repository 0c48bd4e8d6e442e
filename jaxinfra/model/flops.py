"""FLOPs of a decoder's passes, where a multiply and an add count as two.

Each token costs 2 FLOPs per parameter of its matmuls (Kaplan et al. 2020, table 1). Attention
counts the visible query-key pairs: T (T + 1) / 2 of a causal sequence. Those that an indexer does
not choose count too where their scores are computed and masked, as in training. Recomputation does
not count (PaLM, arXiv 2204.02311, appendix B), and packed documents count as one sequence.
"""

from collections.abc import Iterable

from jaxinfra.config.latent import indexer_of
from jaxinfra.config.model import (
    AttentionBesideStateConfig,
    LatentAttentionConfig,
    MixerConfig,
    ModelConfig,
)
from jaxinfra.config.recurrent import RecurrentConfig
from jaxinfra.model.definition import ModelDefinition, ParameterInfo
from jaxinfra.ops.cached_attention import reads_chosen


def matmul_parameters(table: Iterable[ParameterInfo], *, frozen: bool = False) -> int:
    """Counts the parameters in each token's matmuls: active experts only, no lookup tables.

    Args:
        table: ``ModelDefinition.table``.
        frozen: whether to count only the weights that are not trained.
    """
    counted = (each for each in table if each.matmul and not (frozen and each.trained))
    return round(sum(each.size * each.active for each in counted))


def visible_pairs(length: int, *, window: int | None = None, start: int = 0) -> int:
    """Counts the query-key pairs of ``length`` causal queries from position ``start`` on.

    Args:
        window: largest number of keys that a query sees, including its own.
        start: positions cached before the first query.
    """
    if window is None:
        return length * start + length * (length + 1) // 2
    # Queries whose whole past fits the window see start + i + 1 keys, the others ``window``.
    growing = min(max(window - start, 0), length)
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window


def _seen(mixer: MixerConfig, length: int, start: int) -> int | None:
    """Returns the most keys per query of which scores are computed; None: all visible ones."""
    indexer = indexer_of(mixer)
    if indexer is not None and start and reads_chosen(indexer, length, start + length):
        return indexer.top_k
    return mixer.window


def attention_flops(mixer: MixerConfig, length: int, *, start: int = 0) -> float:
    """Counts forward FLOPs per sequence and layer of attention's two matmuls, over all heads; of a
    mixer with a state, of reading and writing it token by token.
    """
    if isinstance(mixer, AttentionBesideStateConfig):
        both = (mixer.attention, mixer.state_space)
        return sum(attention_flops(each, length, start=start) for each in both)
    if isinstance(mixer, RecurrentConfig):
        return length * mixer.token_flops
    pairs = visible_pairs(length, window=_seen(mixer, length, start), start=start)
    return 2.0 * pairs * (mixer.score_width + mixer.value_width)


def index_flops(config: ModelConfig, length: int, *, start: int = 0) -> float:
    """Counts forward FLOPs per sequence of indexers' scores, in all layers that have one.

    There are none, as there is no choice, where ``top_k`` keys are all that a query may see.
    """
    flops = 0.0
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        indexer = indexer_of(block.mixer)
        if indexer is not None and start + length > indexer.top_k:
            pairs = visible_pairs(length, start=start)
            flops += repeats * 2.0 * pairs * indexer.num_heads * indexer.head_dim
    return flops


def forward_flops(
    config: ModelConfig, parameters: int, length: int, *, batch: int = 1, start: int = 0
) -> float:
    """Counts FLOPs of a forward pass: ``length`` new tokens after ``start`` cached, per sequence.

    Args:
        parameters: ``matmul_parameters`` of the model's table.
    """
    core = sum(
        repeats * attention_flops(block.mixer, length, start=start)
        for block, repeats in zip(config.blocks, config.repeats, strict=True)
    )
    return batch * (2.0 * parameters * length + core + index_flops(config, length, start=start))


def training_flops(
    config: ModelConfig, parameters: int, length: int, *, batch: int = 1, frozen: int = 0
) -> float:
    """Counts FLOPs of forward and backward: 3 times the forward, less frozen weights' gradients and
    those of indexers' scores.

    Multi-token prediction has its layer's attention, and multiplies with the vocabulary once more.

    Args:
        parameters, frozen: ``matmul_parameters`` of all weights and of frozen weights.
    """
    whole = 3.0 * forward_flops(config, parameters, length, batch=batch)
    whole -= 2.0 * batch * index_flops(config, length)
    if config.mtp:
        again = config.vocab_size * config.model_dim
        whole += 3.0 * forward_flops(config.mtp_part, again, length, batch=batch)
        whole -= 2.0 * batch * index_flops(config.mtp_part, length)
    return whole - 2.0 * frozen * batch * length


def training_flops_per_token(model: ModelDefinition, length: int) -> float:
    """Returns the training FLOPs per token of a sequence of this length, the basis of MFU."""
    table = model.table()
    parameters, frozen = matmul_parameters(table), matmul_parameters(table, frozen=True)
    return training_flops(model.config, parameters, length, frozen=frozen) / length


def decode_flops(config: ModelConfig, parameters: int, context: int, *, batch: int = 1) -> float:
    """Counts FLOPs of a decode step: one new token per sequence after ``context`` cached ones.

    Latent attention is counted with its key and value projections absorbed into queries and outputs
    (arXiv 2405.04434, section 2.1.2). It then attends to the latents: fewer bytes, more FLOPs.
    """
    flops = forward_flops(config, parameters, 1, batch=batch, start=context)
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        mixer = block.mixer
        if isinstance(mixer, LatentAttentionConfig):
            absorbed = mixer.num_q_heads * (2 * mixer.kv_rank + mixer.rope_dim)
            wider = absorbed - mixer.score_width - mixer.value_width
            pairs = visible_pairs(1, window=_seen(mixer, 1, context), start=context)
            flops += batch * repeats * 2.0 * pairs * wider
    return flops
