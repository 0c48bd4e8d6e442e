"""Linear attention and its short convolution against token after token in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    InputError,
    UnsupportedError,
    linear_attention,
    linear_attention_in_slots,
    short_convolution,
    short_convolutions_in_slots,
)
from pallas_kernels.linear_attention.chunked import CHUNK
from pallas_kernels.linear_attention.reference import reference
from tests.rounding import UNIT, Rounded
from tests.seeds import seeded
from tests.tolerance import assert_no_worse, assert_within_rounding

# (batch, length, key heads, value heads, key width, value width)
SHAPE = (2, 150, 2, 4, 16, 8)
KINDS = ("delta", "channels", "space", "selective")
ADDS = ("space", "selective")  # without a beta
attend = jax.jit(linear_attention)


def inputs(kind, shape=SHAPE, dtype=np.float32):
    """Keys of the delta rule have length 1, as layers give them; decays are weak and strong."""
    batch, length, num_keys, num_values, width, value_width = shape
    rng = np.random.default_rng(seeded(2))
    q, k = rng.normal(size=(2, batch, length, num_keys, width))
    v = rng.normal(size=(batch, length, num_values, value_width))
    if kind not in ADDS:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    ends = (width,) if kind == "channels" else ()
    decay = -np.exp(rng.normal(-2.0, 1.5, (batch, length, num_values, *ends)))
    beta = None if kind in ADDS else rng.uniform(0.1, 1.0, (batch, length, num_values))
    state = rng.normal(size=(batch, num_values, width, value_width))
    given = {"q": q, "k": k, "v": v, "log_decay": decay, "state": state}
    given = given if beta is None else given | {"beta": beta}
    if kind == "selective":
        given["rates"] = rng.uniform(0.5, 4.0, (num_values, width))
    return {name: np.asarray(x, np.float32).astype(dtype) for name, x in given.items()}


def documents(shape=SHAPE):
    """Begins within chunks, at a chunk's first token, and one token after another."""
    ids = np.zeros(shape[:2], np.int32)
    ids[0, 37:], ids[0, CHUNK:], ids[0, 140:] = 1, 2, 3
    ids[1, 1:], ids[1, 2:], ids[1, 149:] = 1, 2, -1
    return ids


def one_by_one(q, k, v, log_decay, state, beta=None, rates=None, *, segment_ids=None):
    """The formula: outputs and state."""
    groups = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, groups, axis=2), np.repeat(k, groups, axis=2)
    outs = []
    for t in range(v.shape[1]):
        if segment_ids is not None and t:
            goes_on = segment_ids[:, t] == segment_ids[:, t - 1]
            state = np.where(goes_on[:, None, None, None], state, np.zeros_like(state))
        log = log_decay[:, t] if rates is None else log_decay[:, t][..., None] * rates[None]
        decay = np.exp(log)
        state = state * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
        new = v[:, t]
        if beta is not None:
            held = np.einsum("bmh,bmhv->bmv", k[:, t], state)
            new = beta[:, t][..., None] * (new - held)
        state = state + k[:, t][..., None] * new[..., None, :]
        outs.append(np.einsum("bmh,bmhv->bmv", q[:, t], state)[:, None])
    return np.concatenate(outs, axis=1), state


def decay_spread(log_decay):
    """How far sums of logarithms within a chunk may be off, whose differences are its decays."""
    length = log_decay.shape[1]
    parts = [log_decay[:, at : at + CHUNK] for at in range(0, length, CHUNK)]
    sums = np.concatenate([np.cumsum(x, axis=1, dtype=np.float64) for x in parts], axis=1)
    return UNIT * np.sqrt(min(CHUNK, length)) * np.abs(sums)


def exact(given, **options):
    rounded = {name: Rounded(np.asarray(x, np.float64)) for name, x in given.items()}
    rounded["log_decay"].spread = decay_spread(rounded["log_decay"].value)
    return one_by_one(**rounded, **options)


@pytest.mark.slow_cases("one document-channels", "one document-space")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
def test_outputs_and_state(kind, packed):
    given, options = inputs(kind), {"segment_ids": documents()} if packed else {}
    got = attend(**given, **options)
    assert_within_rounding(got, exact(given, **options), what=kind)


@pytest.mark.slow_cases("channels", "space", "selective")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    """No worse than those of the formula in fp32, its decays as far off as sums of them may be."""
    given, ids = inputs(kind, (2, 70, 1, 2, 8, 8)), documents()[:, :70]
    documents_BT = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    rng = np.random.default_rng(seeded(3))
    d_out, d_state = rng.normal(size=given["v"].shape), rng.normal(size=given["state"].shape)

    def gradient(function, given, dtype=np.float32):
        def loss(given):
            out, state = function(**given)
            return jnp.vdot(out, d_out.astype(dtype)) + jnp.vdot(state, d_state.astype(dtype))

        given = {name: np.asarray(x, dtype) for name, x in given.items()}
        return jax.device_get(jax.jit(jax.grad(loss))(given))

    def formula(q, k, v, log_decay, state, beta=None, rates=None):
        log_decay = log_decay if rates is None else log_decay[..., None] * rates[None, None]
        return reference(q, k, v, log_decay, beta, state, jnp.asarray(documents_BT))

    def moved():
        signs = rng.choice([-1.0, 1.0], given["log_decay"].shape)
        off = signs * decay_spread(given["log_decay"])
        return given | {"log_decay": given["log_decay"] + off.astype(np.float32)}

    with jax.enable_x64():
        true = gradient(formula, given, np.float64)
    got = gradient(functools.partial(linear_attention, segment_ids=jnp.asarray(ids)), given)
    others = [gradient(formula, moved()) for _ in range(4)]
    assert_no_worse(got, plain=gradient(formula, given), oracle=true, orders=others, what=kind)


@pytest.mark.slow_cases("channels", "space", "selective")
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_parts_is_the_text(kind):
    """Chunks, several tokens and one token, each from the state before it."""
    given = inputs(kind)
    whole = {name: given.pop(name) for name in ("rates",) if name in given}
    state, outs = given.pop("state"), []
    for start, stop in ((0, 90), (90, 94), (94, 95), (95, 150)):
        part = {name: x[:, start:stop] for name, x in given.items()}
        out, state = attend(**part, **whole, state=state)
        outs.append(out)
    got = jnp.concatenate(outs, axis=1), state
    assert_within_rounding(got, exact(inputs(kind)), what=kind)


@pytest.mark.slow_cases("channels", "space")
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_slots_are_those_of_rows(kind):
    """Two rows go on from one slot; one of them writes nothing, and other slots stay."""
    given = inputs(kind, (3, 2, 2, 4, 16, 8))
    state = given.pop("state")
    states = jnp.stack([state[1], state[0], state[2], state[0]])
    read, written = (np.array(x, np.int32) for x in ([2, 1, 2], [3, 1, 4]))
    slots = {"states": states, "read": read, "written": written}
    out, after = linear_attention_in_slots(**given, **slots)
    want, ends = attend(**given, state=states[read])
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(after, np.stack([states[0], ends[1], states[2], ends[0]]))
    out, after = linear_attention_in_slots(**given, **slots | {"written": None})
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(after, states)


@pytest.mark.parametrize("kind", ["delta", "space"])
def test_states_in_bf16_are_off_by_what_each_step_rounds(kind):
    """A step multiplies a state's error by at most its decay, as keys have length 1 and beta is at
    most 1, and adds that of rounding to 8 bits. In e4m3, of 4 bits, outputs are beyond that.
    """
    length, slot = 12, {"read": np.zeros(1, np.int32), "written": np.zeros(1, np.int32)}
    given = inputs(kind, (1, length, 2, 4, 16, 8))
    state, lengths = given.pop("state"), np.linalg.norm(given["q"], axis=-1).repeat(2, axis=2)
    step = jax.jit(functools.partial(linear_attention_in_slots, **slot))

    def steps(dtype):
        states, outs = state.astype(dtype), []
        for t in range(length):
            part = {name: x[:, t : t + 1] for name, x in given.items()}
            out, states = step(**part, states=states)
            outs.append((out[0, 0], states.astype(np.float32)))
        return [np.stack(each) for each in zip(*outs, strict=True)]

    exact, states = steps(np.float32)
    sizes = np.linalg.norm(np.stack([state, *states])[:, 0], axis=(2, 3))
    decays, bound, error = np.exp(given["log_decay"][0]), [], 2.0**-8 * sizes[0]
    for t in range(length):
        error = decays[t] * error
        bound.append(lengths[0, t] * error)
        error += 2.0**-8 * (sizes[t + 1] + error)
    off = {
        dtype: np.linalg.norm(steps(dtype)[0] - exact, axis=-1)
        for dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    }
    slack = 2.0**-20 * np.abs(exact).max()
    assert np.all(off[jnp.bfloat16] <= np.array(bound) + slack)
    assert np.any(off[jnp.float8_e4m3fn] > np.array(bound))


def test_slots_that_do_not_fit_are_refused():
    given = jax.tree.map(jnp.asarray, inputs("delta", (1, 1, 2, 4, 16, 8)))
    states, slot = given.pop("state"), np.zeros(1, np.int32)
    for changes, match in (
        ({"states": states[0]}, "a matrix per slot"),
        ({"written": np.zeros(2, np.int32)}, "one per row"),
    ):
        slots = {"states": states, "read": slot, "written": slot} | changes
        with pytest.raises(InputError, match=match):
            linear_attention_in_slots(**given, **slots)
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(
            lambda q: jnp.sum(
                linear_attention_in_slots(
                    **given | {"q": q}, states=states, read=slot, written=slot
                )[0]
            )
        )(given["q"])


def test_tokens_that_neither_decay_nor_write_leave_the_state():
    given = inputs("delta")
    state = given["state"]
    given["log_decay"], given["beta"] = map(np.zeros_like, (given["log_decay"], given["beta"]))
    given["v"][:] = 1e30
    np.testing.assert_array_equal(attend(**given)[1], state)


@pytest.mark.slow_cases("channels", "space", "selective")
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_rounds_operands_only(kind):
    given = inputs(kind, dtype=jnp.bfloat16)
    wide = [name for name in ("log_decay", "state", "rates") if name in given]
    given |= {name: given[name].astype(np.float32) for name in wide}
    out, state = attend(**given)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    true = exact(given)
    for got, want in zip((out, state), true, strict=True):
        error = np.asarray(got, np.float64) - want.value
        # Operands of each product are rounded once, to 8 bits.
        assert np.sqrt(np.mean(error**2)) < 4 * 2.0**-9 * np.sqrt(np.mean(want.value**2))


def test_the_gradient_s_memory_is_linear():
    def temporaries(length):
        given = inputs("delta", (1, length, 1, 1, 16, 16))
        loss = jax.grad(lambda given: jnp.sum(linear_attention(**given)[0]))
        return jax.jit(loss).lower(given).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.5 * temporaries(1024)


def test_the_convolution_is_a_sum_of_taps():
    rng = np.random.default_rng(seeded(4))
    x, weight = rng.normal(size=(2, 9, 3, 2)), rng.normal(size=(3, 2, 4))
    tail, ids = rng.normal(size=(2, 3, 3, 2)), np.array([[0] * 9, [0, 0, 1, 1, 1, 2, 3, 3, 3]])
    x, weight, tail = (each.astype(np.float32) for each in (x, weight, tail))
    got = short_convolution(x, weight, tail=tail, segment_ids=ids)
    want = Rounded(np.zeros(x.shape))
    for row, ids_T in enumerate(ids):
        seen = np.concatenate([tail[row], x[row]])
        for t in range(9):
            taken = [w for w in range(4) if t + w < 3 or ids_T[t + w - 3] == ids_T[t]]
            taken = [w for w in taken if t + w >= 3 or ids_T[t] == ids_T[0]]
            terms = Rounded(seen[[t + w for w in taken]]) * np.moveaxis(weight, -1, 0)[taken]
            want[row, t] = np.sum(terms, axis=0)
    assert_within_rounding(got, want)
    parts = [short_convolution(x[:, :4], weight, tail=tail)]
    parts.append(short_convolution(x[:, 4:], weight, tail=x[:, 1:4]))
    whole = short_convolution(x, weight, tail=tail)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"k": np.ones((2, 150, 2, 8), np.float32)}, r"q and k are \[B, T, N, H\] alike"),
        ({"v": np.ones((2, 150, 3, 8), np.float32)}, "equally many value heads"),
        ({"v": np.ones((2, 150, 4, 8), np.float16)}, "one floating dtype"),
        ({"log_decay": np.ones((2, 150, 4, 8), np.float32)}, "one per value head"),
        ({"beta": np.ones((2, 150, 2), np.float32)}, "beta"),
        ({"state": np.ones((2, 4, 8, 8), np.float32)}, "a matrix per row and value head"),
        ({"rates": np.ones((4, 16), np.float32)}, "no beta"),
    ],
)
def test_what_does_not_fit_is_refused(changes, match):
    with pytest.raises(InputError, match=match):
        linear_attention(**inputs("delta") | changes)


def test_convolutions_in_slots_are_those_of_sequences():
    """Rows read and write slots of others' making; one does not count, and one writes nothing."""
    rng = np.random.default_rng(seeded(5))
    x, heads, lengths = rng.normal(size=(3, 20)).astype(np.float32), (2, 3), (0.5, None)
    weights = [rng.normal(size=(n, 3, 4)).astype(np.float32) for n in heads]
    tails = [rng.normal(size=(4, 3, n, 3)).astype(np.float32) for n in heads]
    read, written, counted = np.array([2, 0, 1]), np.array([2, 3, 4]), np.array([True, False, True])
    given = {"lengths": lengths, "read": read, "written": written, "counted": counted}
    slots = [jnp.asarray(tail) for tail in tails]
    out, after = short_convolutions_in_slots(x, weights, tails=slots, **given)
    first = 0
    for i, (n, length) in enumerate(zip(heads, lengths, strict=True)):
        own = x[:, first : first + 3 * n].reshape(3, 1, n, 3)
        first += 3 * n
        want = jax.nn.silu(short_convolution(own, weights[i], tail=tails[i][read]))[:, 0]
        if length is not None:
            want *= length / jnp.linalg.norm(want, axis=-1, keepdims=True)
        # Sums of four products, and SiLU's exponential.
        np.testing.assert_allclose(out[i][::2], want[::2], rtol=1e-5, atol=1e-6)
        assert not out[i][1].any()
        kept = tails[i].copy()
        kept[2] = np.concatenate([tails[i][2], own[0]])[1:]
        kept[3] = tails[i][0]
        np.testing.assert_array_equal(after[i], kept)
    with pytest.raises(InputError, match="a length and a tail per weight"):
        short_convolutions_in_slots(x[:, :14], weights, tails=slots, **given)


def test_taps_of_other_channels_are_refused():
    with pytest.raises(InputError, match="row of taps"):
        short_convolution(jnp.ones((1, 4, 3)), jnp.ones((2, 4)))
    with pytest.raises(InputError, match="inputs before the first"):
        short_convolution(jnp.ones((1, 4, 3)), jnp.ones((3, 4)), tail=jnp.ones((1, 2, 3)))
