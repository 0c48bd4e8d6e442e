"""Linear attention in chunks and its gradient on a Hopper GPU: supported calls, kernels in turn.

Forward, ``inverse`` solves the systems of the delta rule in all chunks, and ``scan`` goes from
chunk to chunk. Before it ``spans`` finds states of a state space, between which rows' chunks are
computed side by side.
Backward, ``scan`` computes the states again, ``reverse`` their cotangents from the last chunk to
the first, and ``gradients`` those of all tokens. For a decay per channel ``channels`` computes what
``scan`` reads, and ``channel_gradients`` the gradients of tokens.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import device

from . import scan, spans
from .channel_gradients import channel_gradients
from .channels import prepared
from .gates import CHUNK, gates
from .gradients import token_gradients
from .inverse import inverses, inverses_of
from .reverse import cotangents as cotangents_of

_KEY_WIDTH, _VALUE_WIDTHS = 128, (64, 128, 192)


def unsupported(
    q_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay: jax.Array,
    beta_BTM: jax.Array | None,
    rates_MH: jax.Array | None,
) -> str | None:
    """Returns why the kernels cannot compute this call; None if they can."""
    if reason := device.why_not_one_hopper():
        return reason
    if rates_MH is not None:
        return "log_decay has rates; the kernels take decays as they are"
    if log_decay.ndim == 4 and beta_BTM is None:
        return "log_decay has a number per channel; the kernels need a beta then"
    if q_BTNH.dtype != jnp.bfloat16:
        return f"q is {q_BTNH.dtype}; the kernels multiply bfloat16"
    if q_BTNH.shape[3] != _KEY_WIDTH or v_BTMV.shape[3] not in _VALUE_WIDTHS:
        return (
            f"heads of {q_BTNH.shape[3]} and {v_BTMV.shape[3]}; the kernels have keys of "
            f"{_KEY_WIDTH} and values of {', '.join(map(str, _VALUE_WIDTHS))}"
        )
    if beta_BTM is not None and v_BTMV.shape[2] % 2:
        return f"{v_BTMV.shape[2]} value heads; the kernels take two at a time"
    return None


@jax.custom_vjp
def in_chunks(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay_BTM: jax.Array,
    beta_BTM: jax.Array | None,
    state_BMHV: jax.Array,
    document_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``reference``: outputs [B, T, M, V] in v's dtype, and the last state in fp32.

    Operands of products are rounded to bf16, sums are fp32, and triangular systems are solved in
    fp32. The backward pass keeps the operands and computes the rest again.
    """
    given = _Given(q_BTNH, k_BTNH, v_BTMV, log_decay_BTM, beta_BTM, state_BMHV, document_BT)
    out, end = scan.outputs(_operands(given))
    return given.whole(out), given.by_row(end)[:, -1].swapaxes(2, 3)


def _kept(*given: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    return in_chunks(*given), given


def _pulled(
    kept: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    given = _Given(*kept)
    operands = _operands(given)
    (d_out,) = given.padded(cotangents[0])
    start = cotangents[1].astype(jnp.float32).swapaxes(2, 3)
    reading = operands | {"values": d_out}
    states, solved = scan.states({name: x for name, x in operands.items() if name != "q"})
    if given.spans > 1:
        start = spans.reversed_starts(reading, start)
    d_states, d_v, d_start = cotangents_of(reading | {"start": start})
    d_q, d_k, d_log, d_beta = token_gradients(
        operands, d_out, solved=solved, states=states, d_states=d_states, d_v=d_v
    )
    found = (d_q, d_k, d_v, d_log, d_beta)
    d_given = [
        None if like is None else given.whole(x).astype(like.dtype)
        for x, like in zip(found, kept, strict=False)
    ]
    d_state = given.by_row(d_start)[:, 0].swapaxes(2, 3)
    return *d_given, d_state.astype(given.state.dtype), None


in_chunks.defvjp(_kept, _pulled)


class _Given(NamedTuple):
    """Operands of ``in_chunks``."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None
    state: jax.Array
    document: jax.Array

    @property
    def spans(self) -> int:
        """Number of spans of a row that are computed side by side."""
        return 1 if self.beta is not None else spans.num_spans(*self.v.shape)

    def padded(self, *arrays: jax.Array) -> list[jax.Array]:
        """Appends tokens that neither decay nor write, up to whole chunks, and cuts spans."""
        return [spans.cut(x, self.spans) for x in _padded(*arrays)]

    def whole(self, x: jax.Array) -> jax.Array:
        """Undoes ``padded``."""
        return x.reshape(len(self.v), -1, *x.shape[2:])[:, : self.v.shape[1]]

    def by_row(self, x: jax.Array) -> jax.Array:
        """Reshapes an array of spans to [B, S, ...]."""
        return x.reshape(len(self.v), self.spans, *x.shape[1:])


def _operands(given: _Given) -> dict[str, jax.Array]:
    """Operands of the kernels that go from chunk to chunk."""
    q, k, v, log_decay = given.padded(given.q, given.k, given.v, given.log_decay)
    beta = None if given.beta is None else given.padded(given.beta)[0]
    document = spans.cut_documents(_with_edge(given.document), given.spans)
    numbers, start = gates(log_decay, beta, document), given.state.swapaxes(2, 3)
    named = {"q": q, "k": k, "values": v, "gates": numbers, "start": start.astype(jnp.float32)}
    if given.spans > 1:
        named["start"] = spans.starts(named, named["start"])
    return named if beta is None else named | {"inverses": inverses(k, numbers)}


def _padded(*arrays: jax.Array) -> list[jax.Array]:
    """Appends tokens that neither decay nor write, up to whole chunks."""

    def pad(x: jax.Array) -> jax.Array:
        missing = -x.shape[1] % CHUNK
        ends = ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))
        return jnp.pad(x, ends) if missing else x

    return [pad(x) for x in arrays]


def _with_edge(document_BT: jax.Array) -> jax.Array:
    """The documents, with the last token's for those of ``_padded``."""
    return jnp.pad(document_BT, ((0, 0), (0, -document_BT.shape[1] % CHUNK)), mode="edge")


@jax.custom_vjp
def by_channel(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay_BTMH: jax.Array,
    beta_BTM: jax.Array,
    state_BMHV: jax.Array,
    document_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``in_chunks`` of the delta rule with a decay per channel.

    A token's decay below 2^-30 counts as 2^-30.
    """
    q, k, v, log_decay, beta = _padded(q_BTNH, k_BTNH, v_BTMV, log_decay_BTMH, beta_BTM)
    numbers = gates(None, beta, _with_edge(document_BT))
    out, end = scan.outputs(_operands_by_channel(q, k, v, log_decay, numbers, state_BMHV))
    return out[:, : q_BTNH.shape[1]], end.swapaxes(2, 3)


def _operands_by_channel(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay_BTMH: jax.Array,
    numbers: jax.Array,
    state_BMHV: jax.Array,
    *,
    has_gradient: bool = False,
) -> dict[str, jax.Array]:
    """Operands of the kernels that go from chunk to chunk, and "sums" for the gradient."""
    log_decay_BTMH = log_decay_BTMH.astype(jnp.float32)
    found = prepared(q_BTNH, k_BTNH, log_decay_BTMH, numbers, has_gradient=has_gradient)
    inverses = inverses_of(found.pop("systems"), k_BTNH.dtype)
    start = state_BMHV.astype(jnp.float32).swapaxes(2, 3)
    return found | {"values": v_BTMV, "inverses": inverses, "start": start}


def _kept_by_channel(*operands: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    return by_channel(*operands), operands


def _pulled_by_channel(
    kept: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    *tokens, state, document_BT = kept
    q, k, v, log_decay, beta = _padded(*tokens)
    (d_out,) = _padded(cotangents[0])
    numbers = gates(None, beta, _with_edge(document_BT))
    operands = _operands_by_channel(q, k, v, log_decay, numbers, state, has_gradient=True)
    sums = operands.pop("sums")
    d_end = cotangents[1].astype(jnp.float32).swapaxes(2, 3)
    reading = operands | {"values": d_out, "start": d_end}
    writing = {name: x for name, x in operands.items() if name not in ("q", "weights")}
    states, solved = scan.states(writing)
    d_states, d_v, d_start = cotangents_of(reading)
    tokens_of = {"q": q, "k": k, "sums": sums, "decays": operands["decays"], "gates": numbers}
    d_q, d_k, d_log, d_beta = channel_gradients(
        tokens_of, d_out, solved=solved, states=states, d_states=d_states, d_v=d_v
    )
    found = (d_q, d_k, d_v, d_log, d_beta)
    length = document_BT.shape[1]
    d_given = [x[:, :length].astype(like.dtype) for x, like in zip(found, tokens, strict=True)]
    return *d_given, d_start.swapaxes(2, 3).astype(state.dtype), None


by_channel.defvjp(_kept_by_channel, _pulled_by_channel)
