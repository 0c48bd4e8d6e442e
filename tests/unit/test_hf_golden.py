"""Every architecture against the reference implementation's files (tests/golden/hf)."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import assert_no_worse

from jaxinfra.config.precision import PolicyName
from jaxinfra.models.definition import merged, only
from jaxinfra.models.hf import by_path, weight_map
from jaxinfra.models.hf.config import FAMILIES
from jaxinfra.models.serving_form import serving_form, serving_parameters
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.generate import FinishReason, generate
from jaxinfra.serving.sampling import GREEDY
from jaxinfra.weights.load_pretrained import load_pretrained
from jaxinfra.weights.parameter_sources import LiveParameters, assemble

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
# One of each architecture, for time.
BF16_CASES = ("gemma2", "gpt2", "llama3", "qwen3")
# Windows, learned positions, scaled rotations, latents, sinks: what a cache must know of.
CONTINUED_CASES = ("gemma2", "gpt2", "phi3_longrope", "deepseek_v3", "gpt_oss")
SLOW_GRADIENT_CASES = (
    *("mistral", "phi3_longrope", "qwen2"),
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


def test_all_architectures_have_a_case():
    architectures = {
        json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in CASES
    }
    assert architectures == set(FAMILIES)


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
    form = serving_form(model.definition, execution_on(packed=True))
    parameters = serving_parameters(form, model.definition.config, model.parameters)
    assert_continues(name, form.bind(parameters))


def assert_continues(name, decoder):
    arrays = golden(name)
    prompts = [ids[:length] for ids, length in zip(arrays["ids"], arrays["prompts"], strict=True)]
    # LongRoPE: one prompt is of the original context, one beyond it, which cannot share a batch.
    batches = [[0], [1]] if "longrope" in name else [[0, 1]]
    for rows in batches:
        new = arrays["continued"][rows]
        drawn = np.full_like(new, -1)
        for each in generate(
            decoder,
            [prompts[row] for row in rows],
            max_new_tokens=new.shape[1],
            sampling=GREEDY,
        ):
            drawn[each.row, each.index] = each.token
        np.testing.assert_array_equal(drawn, new)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_GRADIENT_CASES))
        for name in GRADIENT_CASES
    ],
)
def test_loss_and_gradients(name):
    arrays = golden(name)
    ids = arrays["ids"].astype(np.int32)
    model = pretrained(name)
    values = json.loads((GOLDEN / name / "config.json").read_text())

    state = only(model.parameters, model.definition.state_shapes)

    @jax.jit
    @jax.value_and_grad
    def loss(parameters):
        nll = -jax.nn.log_softmax(model.definition.bind(merged(parameters, state))(ids)[:, :-1])
        return jnp.mean(jnp.take_along_axis(nll, ids[:, 1:, None], axis=-1))

    value, gradients = loss(only(model.parameters, model.definition.shapes))
    plain, oracle = np.float32(arrays["loss32"]), arrays["loss64"]
    assert_no_worse(value, plain=plain, oracle=oracle, what=f"{name} loss")
    # In their layout, which the weight map makes of gradients as it does of weights.
    weights = weight_map(values["model_type"], model.definition.config, model.definition.arrays)
    ours = LiveParameters(arrays=by_path(gradients))
    names = [key.removeprefix("gradient32/") for key in arrays if key.startswith("gradient32/")]
    assert len(names) >= 2
    for each in names:
        got = assemble(ours, weights.tensors[each])
        plain, oracle = arrays[f"gradient32/{each}"], arrays[f"gradient64/{each}"]
        assert_no_worse(got, plain=plain, oracle=oracle, what=f"{name} gradient of {each}")


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
    for each in generate(model, prompts, max_new_tokens=20, sampling=GREEDY):
        assert each.index == len(drawn[each.row])
        assert each.row not in finishes
        drawn[each.row].append(each.token)
        if each.finish is not None:
            finishes[each.row] = each.finish
    assert finishes == dict.fromkeys(range(3), FinishReason.LENGTH)
    for row, new in zip(rows, drawn, strict=True):
        whole = [*row, *new]
        want = []
        for length in range(len(row), len(whole)):
            # The first original tokens predict by the short factors, whatever follows them.
            cut = whole[: original if length <= original else len(whole)]
            want.append(int(np.argmax(logits(model, np.array([cut], np.int32))[0, length - 1])))
        assert new == want


def test_longrope_rows_end_with_the_context():
    ids = golden("phi3_longrope")["ids"][0]
    model = decoder("phi3_longrope")
    tokens = list(generate(model, [ids[:29]], max_new_tokens=90, sampling=GREEDY))
    assert [each.finish for each in tokens[-2:]] == [None, FinishReason.CONTEXT]
    assert len(tokens) == model.config.max_positions - 29 + 1
