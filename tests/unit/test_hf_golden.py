"""Every architecture against the reference implementation's files (tests/golden/hf)."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.parameter_sources import LiveParameters, assemble
from jaxinfra.config.precision import PolicyName
from jaxinfra.hf import by_path, weight_map
from jaxinfra.model.definition import merged, only
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.sampling import GREEDY
from tests.generation import served
from tests.rounding import UNIT, Rounded
from tests.seeds import seeded
from tests.sharded import oracle
from tests.tolerance import assert_no_worse, assert_within_rounding

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
# One of each architecture, for time.
BF16_CASES = ("gemma2", "gpt2", "llama3", "qwen3")
# Windows, learned positions, scaled rotations, latents, sinks: what a cache must know of.
CONTINUED_CASES = ("gemma2", "gpt2", "phi3_longrope", "deepseek_v3", "gpt_oss")
# qwen3's layers are these with norms of heads; llama3 scales its rotation, which has no weights.
SLOW_GRADIENT_CASES = (
    *("llama3", "mistral", "phi3_longrope", "qwen2"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2"),
)
GRADIENT_CASES = (
    *("gemma2", "gpt2", "llama3", "mistral", "phi3_longrope", "qwen2", "qwen3"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"),
)


@functools.cache
def golden(name):
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return dict(arrays)


@functools.cache
def pretrained(name):
    return load_pretrained(GOLDEN / name)


def decoder(name):
    return pretrained(name).definition.bind(pretrained(name).parameters)


@jax.jit
def logits(decoder, ids):
    return decoder(ids)


@pytest.mark.slow_cases(
    "llama3",
    "llama_linear",
    "llama_yarn",
    "phi3",
    "qwen2",
    "qwen2_yarn",
    "gpt2_untied",
    "deepseek_v2",
    "deepseek_v2_lite",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "gpt_oss",
    "phi3_longrope",
)
@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    arrays = golden(name)
    for prefix in ("", "short_"):
        if f"{prefix}logits32" not in arrays:
            continue
        plain, oracle = arrays[f"{prefix}logits32"], arrays[f"{prefix}logits64"]
        got = logits(decoder(name), arrays["ids"][:, : plain.shape[1]].astype(np.int32))
        assert np.max(np.abs(np.asarray(got) - plain)) < 1e-4
        assert_no_worse(got, plain=plain, oracle=oracle, what=f"{name} {prefix}logits")


@pytest.mark.slow_cases("gemma2", "gpt2", "qwen3")
@pytest.mark.parametrize("name", BF16_CASES)
def test_bfloat16_logits(name):
    """Weights and activations rounded alike, so no worse than the reference implementation's."""
    arrays = golden(name)
    model = load_pretrained(GOLDEN / name, policy=PolicyName.BF16)
    got = logits(model.definition.bind(model.parameters), arrays["ids"].astype(np.int32))
    plain, oracle = arrays["logits16"], arrays["logits64"]
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"{name} bfloat16 logits")


# The others' logits are held above; a continuation is of them and of the cache, which is not of
# an architecture.
@pytest.mark.slow_cases("gemma2", "gpt2", "gpt_oss", "phi3_longrope", "deepseek_v3")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in CONTINUED_CASES))
        for name in CASES
    ],
)
def test_greedy_continuations(name):
    assert_continues(name, decoder(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations_of_the_serving_form(name):
    model = pretrained(name)
    form = serving_form(model.definition, execution_on(decode_form=DecodeForm(packed=True)))
    parameters = serving_parameters(form, model.parameters)
    assert_continues(name, form.bind(parameters))


def assert_continues(name, decoder):
    arrays = golden(name)
    prompts = [ids[:length] for ids, length in zip(arrays["ids"], arrays["prompts"], strict=True)]
    # LongRoPE: one prompt is of the original context, one beyond it, which cannot share a batch.
    batches = [[0], [1]] if "longrope" in name else [[0, 1]]
    for rows in batches:
        new = arrays["continued"][rows]
        tokens = [[] for _ in rows]
        for each in served(
            decoder,
            [prompts[row] for row in rows],
            max_new_tokens=new.shape[1],
            sampling=GREEDY,
        ):
            tokens[each.row].append(each.token)
        drawn = np.array(tokens)
        np.testing.assert_array_equal(drawn, new)


@functools.cache
def loss_and_gradients(name):
    """Our fp32 results, and by how much such programs differ: trees of the same structure.

    A product of a sum of n terms, in any order, is the exact product of weights each moved by
    sqrt(n) u (Higham and Mary 2019, theorem 3.1, by columns). So weights, embeddings among them,
    are moved by a random sign times sqrt(n) u, n the longest sum here; activations and what comes
    back to them move with them.
    """
    ids = golden(name)["ids"].astype(np.int32)
    model = pretrained(name)
    state = only(model.parameters, model.definition.state_shapes)

    @jax.jit
    @jax.value_and_grad
    def loss(parameters):
        nll = -jax.nn.log_softmax(model.definition.bind(merged(parameters, state))(ids)[:, :-1])
        return jnp.mean(jnp.take_along_axis(nll, ids[:, 1:, None], axis=-1))

    # All of them as NumPy's: where arrays lie is part of what a program is compiled for.
    parameters = jax.device_get(only(model.parameters, model.definition.shapes))
    longest = max(ids.size, *(size for leaf in jax.tree.leaves(parameters) for size in leaf.shape))
    rng = np.random.default_rng(seeded(0))

    def moved(leaf):
        signs = rng.integers(0, 2, leaf.shape) * 2.0 - 1.0
        change = signs * UNIT * np.sqrt(longest)
        return (leaf.astype(np.float64) * (1.0 + change)).astype(leaf.dtype)

    samples = [loss(jax.tree.map(moved, parameters)) for _ in range(oracle.NUM_SAMPLES)]
    return loss(parameters), samples


def assert_gradients_are_the_reference_s(name, change=lambda gradient: gradient):
    """``change`` is made to each gradient first."""
    arrays = golden(name)
    (value, gradients), samples = loss_and_gradients(name)
    values = json.loads((GOLDEN / name / "config.json").read_text())
    # In their layout, which the weight map makes of gradients as it does of weights.
    definition = pretrained(name).definition
    weights = weight_map(values["model_type"], definition.config, definition.arrays)
    names = [key.removeprefix("gradient64/") for key in arrays if key.startswith("gradient64/")]
    assert len(names) >= 2

    def named(value, gradients):
        source = LiveParameters(arrays=by_path(gradients))
        return {"loss": value} | {key: assemble(source, weights.tensors[key]) for key in names}

    mine = named(value, gradients)
    exact = {"loss": arrays["loss64"]} | {key: arrays[f"gradient64/{key}"] for key in names}
    others = [named(*sample) for sample in samples]
    for key, got in mine.items():
        got = np.asarray(got)
        true = oracle.rounded(
            [got.astype(np.float64), *(np.asarray(other[key], np.float64) for other in others)]
        )
        # A token that went to another expert for a rounding would make the bound worth nothing.
        assert np.max(true.spread) <= 3e-5 * np.max(np.abs(exact[key])), (
            f"{name} {key} is not sharp"
        )
        want = Rounded(np.reshape(exact[key], got.shape), true.spread)
        assert_within_rounding(change(got), want, what=f"{name} {key}")


@pytest.mark.slow_cases("gemma2", "gpt2", "deepseek_v3", "gpt_oss")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_GRADIENT_CASES))
        for name in GRADIENT_CASES
    ],
)
def test_loss_and_gradients(name):
    assert_gradients_are_the_reference_s(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda got: got * np.float32(1.0003),
        lambda got: got.astype(jnp.bfloat16).astype(np.float32),
        lambda got: np.roll(got, 1),
        lambda got: np.where(got == np.max(got), 0.0, got).astype(np.float32),
    ],
    ids=["scale", "bfloat16", "rolled", "dropped"],
)
def test_a_wrong_gradient_is_caught(change):
    with pytest.raises(AssertionError, match="rounding"):
        assert_gradients_are_the_reference_s("deepseek_v3", change)


@pytest.mark.slow
def test_longrope_rows_that_cross_over_are_run_again():
    """As without a cache, where each sequence is of one kind or the other by its length.

    One row begins beyond the original context, one ends within it, one crosses over.
    """
    ids, original = golden("phi3_longrope")["ids"], 30
    model = decoder("phi3_longrope")
    prompts = [ids[0, :17], ids[1, : original + 1], ids[1, :5]]
    rows = [prompt.tolist() for prompt in prompts]
    drawn: list[list[int]] = [[], [], []]
    finishes = {}
    for each in served(model, prompts, max_new_tokens=20, sampling=GREEDY):
        assert each.row not in finishes
        drawn[each.row].append(each.token)
        if each.end is not None:
            finishes[each.row] = each.end
    assert finishes == dict.fromkeys(range(3), EndReason.LENGTH)
    for row, new in zip(rows, drawn, strict=True):
        whole = [*row, *new]
        want = []
        for length in range(len(row), len(whole)):
            # The first original tokens predict by the short factors, whatever follows them.
            cut = whole[: original if length <= original else len(whole)]
            want.append(int(np.argmax(logits(model, np.array([cut], np.int32))[0, length - 1])))
        assert new == want
