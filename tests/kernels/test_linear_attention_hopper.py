"""The Hopper kernels of the gated delta rule: lowering and choice here, numbers on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    UnsupportedError,
    linear_attention,
    linear_attention_in_slots,
    short_convolutions_in_slots,
)
from pallas_kernels.common import device
from pallas_kernels.linear_attention.hopper import levels, spans
from pallas_kernels.linear_attention.hopper.gates import CHUNK, Gate, gates
from pallas_kernels.linear_attention.reference import reference

SHAPE = (2, 150, 2, 4, 128, 128)  # batch, length, key heads, value heads, widths
TOLERANCE = np.sqrt(16) * 2.0**-9  # at most 16 operands on the way are rounded, to 8 bits each


def inputs(shape=SHAPE, seed=0):
    """Keys of length 1, weak and strong decays, documents that begin anywhere."""
    batch, length, num_keys, num_values, width, value_width = shape
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, batch, length, num_keys, width))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    heads = (batch, length, num_values)
    given = {"q": q / np.sqrt(width), "k": k, "v": rng.normal(size=(*heads, value_width))}
    given = {name: jnp.asarray(x, jnp.bfloat16) for name, x in given.items()}
    numbers = {
        "log_decay": -np.exp(rng.normal(-2.0, 1.5, heads)),
        "beta": rng.uniform(0.1, 1.0, heads),
        "state": rng.normal(size=(batch, num_values, width, value_width)),
    }
    given |= {name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}
    ids = np.cumsum(rng.uniform(size=(batch, length)) < 4 / length, axis=1)
    return given | {"segment_ids": jnp.asarray(ids, jnp.int32)}


def cotangents(shape=SHAPE):
    batch, length, _, num_values, width, value_width = shape
    keys = jax.random.split(jax.random.key(1))
    d_out = jax.random.normal(keys[0], (batch, length, num_values, value_width), jnp.bfloat16)
    return d_out, jax.random.normal(keys[1], (batch, num_values, width, value_width))


def pulled(given, cotangents):
    """Outputs and state, and the gradients of all arrays but the documents."""
    ids = given["segment_ids"]
    given = {name: x for name, x in given.items() if name != "segment_ids"}

    def attend(given):
        return linear_attention(**given, segment_ids=ids, implementation="hopper")

    results, pull = jax.vjp(attend, given)
    return results, pull(cotangents)[0]


def formula(given, cotangents):
    """``pulled``, token after token in fp32."""
    ids = given["segment_ids"]
    document = jnp.cumsum(jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)

    def attend(given):
        names = ("q", "k", "v", "log_decay", "beta", "state")
        q, k, v, log_decay, beta, state = (given.get(name) for name in names)
        return reference(q, k, v, log_decay, beta, state, document)

    wide = {n: x.astype(jnp.float32) for n, x in given.items() if n != "segment_ids"}
    results, pull = jax.vjp(attend, wide)
    return results, pull(tuple(x.astype(jnp.float32) for x in cotangents))[0]


def traced(given, **changes):
    return jax.jit(lambda given: linear_attention(**given, **changes)).trace(given)


def test_the_forward_kernels_lower_for_a_gpu():
    with device.compiling_for(device.H200):
        text = traced(inputs()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


def of_kind(given, kind):
    """A call with a decay per channel, also by less than any number, or without the delta rule."""
    if kind == "strong channels":
        given["log_decay"] *= 100.0
    if kind.endswith("channels"):
        channels = jnp.linspace(0.5, 1.5, given["q"].shape[-1])
        given["log_decay"] = jnp.einsum("BTN,K->BTNK", given["log_decay"], channels)
    if kind == "space":
        del given["beta"]
    return given


SHAPES = {
    "shared keys": SHAPE,
    "own keys": (1, 320, 4, 4, 128, 64),
    "more blocks than processors": (9, 192, 8, 16, 128, 128),
    "spans": (1, 1024, 2, 4, 128, 128),
    "spans of two rows": (2, 1024, 2, 2, 128, 128),
    "values of 192": (1, 300, 2, 4, 128, 192),
}
KERNELS = {"delta": 2 + 4, "channels": 3 + 5, "space": 1 + 3, "spans": 2 + 5}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["delta", "channels", "space"])
def test_all_kernels_lower_for_a_gpu(shape, kind):
    """Kernels forward, and backward."""
    count = KERNELS["spans" if kind == "space" and shape.startswith("spans") else kind]
    shape = SHAPES[shape]
    with device.compiling_for(device.H200):
        trace = jax.jit(pulled).trace(of_kind(inputs(shape), kind), cotangents(shape))
        text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == count


def test_states_between_spans_are_those_of_the_formula():
    """What each span adds to a state of zeros, joined, is what the rows' tokens add."""
    batch, length, num_spans = 2, 3 * 2 * CHUNK, 3
    given = inputs((batch, length, 2, 2, 8, 4))
    state = given.pop("state")
    del given["beta"]
    q, k, v, log, ids = (x.astype(jnp.float32) for x in given.values())
    document = jnp.cumsum(jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)

    def cut(x):
        return spans.cut(x, num_spans)

    documents = spans.cut_documents(document, num_spans)
    numbers = gates(cut(log), jnp.ones_like(cut(log)), documents)
    empty = jnp.zeros((batch * num_spans, *state.shape[1:]))
    added = reference(cut(q), cut(k), cut(v), cut(log), None, empty, documents)[1]
    added = added.reshape(batch, num_spans, *state.shape[1:])
    needed = added[:, :-1].reshape(-1, *state.shape[1:])
    found = spans.joined(needed.mT, numbers, state.mT).mT.reshape(added.shape)
    want = [state]
    for until in (length // num_spans, 2 * length // num_spans):
        tokens = (x[:, :until] for x in (q, k, v, log))
        want.append(reference(*tokens, None, state, document[:, :until])[1])
    np.testing.assert_allclose(found, jnp.stack(want, axis=1), rtol=1e-5, atol=1e-5)


def test_spans_fill_the_processors():
    assert spans.num_spans(1, 8192, 32, 128) == 4
    assert spans.num_spans(1, 8192, 64, 64) == 1
    assert spans.num_spans(4, 8192, 32, 128) == 1
    assert spans.num_spans(1, 5 * CHUNK, 32, 128) == 1


def test_short_calls_and_other_devices_use_xla():
    given = inputs()
    assert "mosaic" not in str(traced(given).jaxpr)
    state = {"state": given.pop("state")}
    few = {name: x[:, : CHUNK - 1] for name, x in given.items()} | state
    with device.compiling_for(device.H200):
        assert "mosaic" not in str(traced(few).jaxpr)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"beta": None, "log_decay": jnp.zeros((2, 150, 4, 128))}, "a number per channel"),
        ({name: jnp.zeros((2, 150, 4, 128)) for name in "qkv"}, "multiply bfloat16"),
        ({name: jnp.zeros((2, 150, 4, 64), jnp.bfloat16) for name in "qk"}, "keys of 128"),
    ],
)
def test_calls_that_the_kernels_lack_are_refused(changes, match):
    given = inputs() | changes
    given["state"] = None
    with device.compiling_for(device.H200), pytest.raises(UnsupportedError, match=match):
        traced(given, implementation="hopper")


def in_slots(kind, length, shape=SHAPE, implementation="hopper"):
    """A call with states in slots of which two rows read the same, and its arrays."""
    given = inputs((3, length, *shape[2:]))
    del given["segment_ids"]
    given = of_kind(given, kind)
    states = jnp.concatenate([given.pop("state"), jnp.zeros((1, shape[3], *shape[4:]))])
    slots = {"read": jnp.array([3, 1, 3]), "written": jnp.array([0, 1, 4])}

    def run(given, states):
        return linear_attention_in_slots(
            **given, **slots, states=states, implementation=implementation
        )

    return run, given, states


def test_states_in_slots_take_a_kernel_of_few_tokens():
    run, given, states = in_slots("delta", 1)
    for kept in (states, states.astype(jnp.bfloat16)):
        with device.compiling_for(device.H200):
            text = jax.jit(run).trace(given, kept).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1
    run, given, states = in_slots("delta", 17)
    with (
        device.compiling_for(device.H200),
        pytest.raises(UnsupportedError, match="17 tokens of a row"),
    ):
        jax.jit(run).trace(given, states)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("kind", ["delta", "channels", "space"])
def test_states_in_slots_are_those_of_the_formula(kind, length):
    """Sums of at most 256 products in fp32, some of a state that a few tokens have changed."""
    run, given, states = in_slots(kind, length, (2, 150, 2, 4, 256, 64))
    got = jax.jit(run)(given, states)
    plain = in_slots(kind, length, implementation="xla")[0]
    wide = {name: x.astype(jnp.float32) for name, x in given.items()}
    out, after = jax.jit(plain)(wide, states)
    np.testing.assert_allclose(got[1], after, rtol=0, atol=2.0**-20 * np.abs(after).max())
    # Outputs are rounded to 8 bits.
    np.testing.assert_allclose(got[0].astype(jnp.float32), out, rtol=2.0**-8, atol=2.0**-8)
    np.testing.assert_array_equal(got[1][2:], states[2:])


def convolutions(rows, implementation):
    """Three convolutions of a row's channels; a row does not count, and one writes nothing."""
    rng, heads = np.random.default_rng(2), (4, 4, 8)
    tails = [rng.normal(size=(rows + 2, 3, n, 128)) for n in heads]
    weights = [rng.normal(size=(n, 128, 4)) for n in heads]
    given = {"x": rng.normal(size=(rows, 2304)), "weights": weights, "tails": tails}
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), given)
    given["read"] = jnp.arange(rows, dtype=jnp.int32)
    given["written"] = given["read"].at[:2].set(jnp.array([rows + 1, rows + 2]))
    given["counted"] = given["read"] != 2

    def run(given):
        more = {"lengths": (0.1, 1.0, None), "implementation": implementation}
        return short_convolutions_in_slots(**given, **more)

    return run, given


def test_convolutions_in_slots_take_one_kernel():
    run, given = convolutions(3, "auto")
    with device.compiling_for(device.H200):
        text = jax.jit(run).trace(given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1
        other = given | {"x": given["x"].astype(jnp.float32)}
        with pytest.raises(UnsupportedError, match="arrays are bfloat16, float32"):
            jax.jit(convolutions(3, "hopper")[0]).trace(other)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("rows", [3, 64])
def test_convolutions_in_slots_are_those_of_xla(rows):
    """Results are rounded to 8 bits: once, and twice where XLA scales them to a length."""
    run, given = convolutions(rows, "hopper")
    got, want = jax.jit(run)(given), jax.jit(convolutions(rows, "xla")[0])(given)
    for out, true in zip(got[0], want[0], strict=True):
        out, true = (np.asarray(x, np.float32) for x in (out, true))
        np.testing.assert_allclose(out, true, rtol=2.0**-6, atol=2.0**-9)
    jax.tree.map(np.testing.assert_array_equal, got[1], want[1])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("kind", ["delta", "channels", "space"])
def test_states_in_bf16_are_those_of_fp32_rounded(kind):
    run, given, states = in_slots(kind, 3)
    states = states.astype(jnp.bfloat16)
    out, after = jax.jit(run)(given, states)
    wide_out, wide = jax.jit(run)(given, states.astype(jnp.float32))
    np.testing.assert_array_equal(out, wide_out)
    np.testing.assert_array_equal(after, wide.astype(jnp.bfloat16))


def test_gates_are_decays_within_documents():
    given = inputs()
    log, beta = (given[name][:, :128] for name in ("log_decay", "beta"))
    document = given["segment_ids"][:, :128]
    document -= document[:, :1]
    found = np.asarray(gates(log, beta, document))
    log, beta, document = np.asarray(log, np.float64), np.asarray(beta), np.asarray(document)
    for b, m, t in np.ndindex(2, 4, 128):
        j, i = divmod(t, CHUNK)
        chunk = slice(j * CHUNK, (j + 1) * CHUNK)
        before = document[b, j * CHUNK - 1] if j else 0
        ids, logs = document[b, chunk], log[b, chunk, m]
        want = {
            Gate.SUM: logs[: i + 1].sum() / np.log(2),
            Gate.BETA: beta[b, t, m],
            Gate.ENTERED: np.exp(logs[: i + 1].sum()) if ids[i] == before else 0.0,
            Gate.WRITTEN: beta[b, t, m] * np.exp(logs[i + 1 :].sum()) * (ids[i] == ids[-1]),
            Gate.FIRST: np.argmax(ids == ids[i]),
        }
        for gate, number in want.items():
            # Sums of 64 logarithms, each addition rounded once; their exponentials magnify it.
            bound = 2.0**-22 * (1 + np.abs(logs).sum()) * CHUNK
            assert abs(found[b, m, j, gate, i] - number) <= bound, gate


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["delta", "channels", "space"])
def test_results_and_gradients_are_those_of_the_formula(shape, kind):
    given, d_results = of_kind(inputs(shape), kind), cotangents(shape)
    run = jax.jit(pulled)
    got, again = run(given, d_results), run(given, d_results)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    off = errors(got, jax.jit(formula)(given, d_results))
    assert max(off.values()) < TOLERANCE, off


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_decays_to_nothing_give_the_formula_s_gradients():
    """The kernels' least decay of a token, 2^-30, is nothing beside what is rounded."""
    shape = SHAPES["own keys"]
    given, d_results = of_kind(inputs(shape), "strong channels"), cotangents(shape)
    off = errors(jax.jit(pulled)(given, d_results), jax.jit(formula)(given, d_results))
    assert max(off.values()) < TOLERANCE, off


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_pairs_that_a_gradient_lacks_are_found(monkeypatch):
    """Without the level of blocks of 16 tokens, gradients of keys and decays are off."""
    monkeypatch.setattr(levels, "HALVES", (32, 16, 4))
    shape = (1, 128, 2, 2, 128, 64)
    given, d_results = of_kind(inputs(shape), "channels"), cotangents(shape)
    off = errors(jax.jit(pulled)(given, d_results), jax.jit(formula)(given, d_results))
    assert min(off[f"[1]['{name}']"] for name in ("q", "k", "log_decay")) > TOLERANCE


def errors(got, true):
    """Norms of differences over norms of what is true, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(got)
    found = {}
    for (path, x), want in zip(leaves, jax.tree.leaves(true), strict=True):
        x, want = (np.asarray(each, np.float64) for each in (x, want))
        found[jax.tree_util.keystr(path)] = np.linalg.norm(x - want) / np.linalg.norm(want)
    return found
