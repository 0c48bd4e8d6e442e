"""Collectives of activations: rows of tables, tensor-parallel sums, the loss, the ring of keys.

Shapes are of one device's result, in fp32.
"""

from jaxinfra.planning.communication_call import Call, Step
from jaxinfra.planning.shapes import Dense, ModelShape


def lookup_calls(shape: ModelShape, step: Step) -> list[Call]:
    """Rows of the token table: ids to all holders of a width, rows to their tokens."""
    micro, positions = step.accumulation, step.length // step.context
    found: list[Call] = []
    tables = 2 if shape.learned_positions else 1
    by_width = step.zero >= 3 and step.fsdp > 1
    rows = step.local_rows * (step.fsdp if by_width else 1)
    width = shape.model_dim // (step.fsdp if by_width else 1)
    for table in range(tables):
        if by_width:
            found.append(
                Call(
                    kind="all-gather",
                    dtype="s32",
                    shape=(rows, positions),
                    times=micro,
                    reason="token ids to every holder of a part of the width",
                )
            )
            # Both tables' rows are added, so one gradient serves both.
            for reason in ("rows to their tokens", "rows' gradients back")[: 2 - table]:
                found.append(
                    Call(
                        kind="all-to-all",
                        dtype="f32",
                        shape=(step.fsdp, step.local_rows, positions, width),
                        times=micro,
                        reason=reason,
                    )
                )
    if step.tensor > 1:
        found.append(
            Call(
                kind="all-reduce",
                dtype="f32",
                shape=(rows, positions, width),
                times=micro,
                reason="rows found on one device of the vocabulary",
            )
        )
    return found


def tensor_calls(shape: ModelShape, step: Step) -> list[Call]:
    """Row-parallel outputs, and the input gradients of column-parallel projections, each alone."""
    if step.tensor == 1:
        return []
    stream = (step.local_rows, step.length // step.context, shape.model_dim)
    found = []
    for layer in shape.layers:
        times = layer.count * step.accumulation
        gated = isinstance(layer.feed_forward, Dense) and layer.feed_forward.gated
        for reason in (
            "attention output",
            "mlp output",
            *("query", "key", "value"),
            *(("gate", "up") if gated else ("up",)),
            *(("attention output again",) if step.recomputes_outputs else ()),
        ):
            suffix = "" if "output" in reason else " input gradient"
            found.append(
                Call(
                    kind="all-reduce",
                    dtype="f32",
                    shape=stream,
                    times=times,
                    reason=reason + suffix,
                )
            )
    return found


def loss_calls(shape: ModelShape, step: Step) -> list[Call]:
    """Vocabulary-parallel cross entropy: maximum, sum and target of each token, and dx."""
    if step.tensor == 1:
        return []
    chunks, size = step.loss_chunks(shape.vocab_size)
    tokens, times = (1, step.local_rows, size), chunks * step.accumulation
    found = [
        Call(kind="all-reduce", dtype="f32", shape=tokens, times=times, reason=reason)
        for reason in ("largest logit", "sum of exponentials", "target's logit")
    ]
    found.append(
        Call(
            kind="all-reduce",
            dtype="f32",
            shape=(*tokens, shape.model_dim),
            times=times,
            reason="logits' input gradient",
        )
    )
    return found


def ring_calls(shape: ModelShape, step: Step) -> list[Call]:
    """Keys, values and documents one device further, c - 1 times each way; back, with the fp32
    gradients of the keys and values behind them, packed together where both move at once.
    """
    if step.context == 1:
        return []
    turns = step.context - 1
    found = []
    for layer in shape.layers:
        words = layer.attention.kv_elements // step.tensor
        times = layer.count * step.accumulation
        rows, positions = step.local_rows, step.length // step.context
        both = max(turns - 2, 0)
        alone = turns - both
        for count, width, reason in (
            (turns, words + 1, "keys round the ring"),
            (turns * step.recomputes_attention, words + 1, "keys round the ring, recomputed"),
            (alone, words + 1, "keys round the ring again"),
            (both, 2 * words + 1, "keys and their gradients round the ring"),
            (alone, words, "gradients of keys round the ring"),
        ):
            found += [
                Call(
                    kind="collective-permute",
                    dtype="u32",
                    shape=(rows, positions, width),
                    times=times,
                    reason=reason,
                )
            ] * count
    return found
