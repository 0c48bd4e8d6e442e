"""Families of Hugging Face models against the reference implementation (tests/golden/families)."""

import json
import pathlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import read_model_directory, write_hf, write_ours
from jaxinfra.data.batch import Batch
from jaxinfra.hf import by_path, from_hf_config, to_hf_config
from jaxinfra.hf.config import FAMILIES
from jaxinfra.model.definition import define_model, merged, only
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.sampling import GREEDY
from jaxinfra.training.gradients import hidden_loss
from tests.generation import served
from tests.golden.families.seeded_weights import digest
from tests.golden_families import GOLDEN, described, golden, write_directory

CASES = sorted(path.stem for path in GOLDEN.glob("*.npz"))

OTHERS = list((GOLDEN.parent / "hf").glob("*/config.json"))

# A layer with a state, and norms of another order; experts are in test_hf_golden.py by default.
QUICK = ("olmo2_odd",)


PROMPT, NEW = 7, 12


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    shapes = write_directory(request.param, path)
    assert digest(shapes) == described(request.param)["tensors"], sorted(shapes)
    return request.param, path, load_pretrained(path)


def test_every_family_has_two_cases():
    here = [described(name)["config"]["model_type"] for name in CASES]
    elsewhere = {json.loads(path.read_text())["model_type"] for path in OTHERS}
    assert {*here, "kimi_k2", "mimo"} | elsewhere == {*FAMILIES}  # DeepSeek-V3's, and Qwen 2's
    assert all(here.count(each) >= 2 for each in here)


def test_the_page_names_every_family():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "families.md").read_text()
    rows = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert {*FAMILIES} <= rows, {*FAMILIES} - rows


@jax.jit
def logits(decoder, ids):
    return decoder(ids)


@pytest.mark.quick_cases(*QUICK)
def test_logits_gradients_and_text(case):
    name, path, model = case
    arrays, definition = golden(name), model.definition
    ids = arrays["ids"].astype(np.int32)
    decoder = definition.bind(model.parameters)
    got = np.asarray(logits(decoder, ids))
    assert np.max(np.abs(got - arrays["logits"])) < 1e-4
    assert_gradient(model, ids, arrays["gradient"])
    assert_greedy(decoder, ids)
    assert_round_trip(path)


def assert_gradient(model, ids, want):
    state = only(model.parameters, model.definition.state_shapes)

    @jax.jit
    @jax.grad
    def gradient(parameters):
        nll = -jax.nn.log_softmax(model.definition.bind(merged(parameters, state))(ids)[:, :-1])
        return jnp.mean(jnp.take_along_axis(nll, ids[:, 1:, None], axis=-1))

    found = by_path(gradient(only(model.parameters, model.definition.shapes)))
    error = np.max(np.abs(np.asarray(found["embedding/table"]) - want))
    # Both sides compute a state in fp32 with sums in another order, and round at every step of it.
    mixers = (block.mixer for block in model.definition.config.blocks)
    bound = 1e-4 if any(each.cache.state for each in mixers) else 1e-5
    assert error <= bound * np.max(np.abs(want)), error / np.max(np.abs(want))


def assert_greedy(decoder, ids):
    """The engine's text is the largest logits' of the whole text so far, without a cache."""
    prompts = [ids[0, :PROMPT], ids[1, : PROMPT + 3]]
    texts = [prompt.tolist() for prompt in prompts]
    for each in served(decoder, prompts, max_new_tokens=NEW, sampling=GREEDY):
        texts[each.row].append(each.token)
    for prompt, text in zip(prompts, texts, strict=True):
        padded = np.zeros((1, PROMPT + 3 + NEW), np.int32)
        padded[0, : len(text)] = text
        whole = np.asarray(logits(decoder, padded))[0, len(prompt) - 1 : len(text) - 1]
        np.testing.assert_array_equal(text[len(prompt) :], np.argmax(whole, axis=-1))


def assert_round_trip(path):
    """Bitwise, through our own layout, with a config that reads back as the same model."""
    given = read_model_directory(path)
    definition = define_model(given.config, execution_on())
    options = dict(hf=given.hf, tokenizer_directory=path, dtype=None, max_shard_bytes=10**9)
    write_ours(given.open(definition), definition, path / "ours", **options)
    ours = read_model_directory(path / "ours").open(definition)
    write_hf(ours, definition, path / "back", **options)
    first, back = load_file(path / "model.safetensors"), load_file(path / "back/model.safetensors")
    assert first.keys() == back.keys()
    assert all(first[name].tobytes() == back[name].tobytes() for name in first)
    model_type = given.hf["model_type"]
    assert from_hf_config(to_hf_config(given.config, model_type=model_type)) == given.config


def test_the_loss_has_the_bias_of_logits(tmp_path):
    write_directory("phi", tmp_path)
    model = load_pretrained(tmp_path)
    ids = golden("phi")["ids"].astype(np.int32)
    batch = Batch(
        tokens=jnp.asarray(ids[:, :-1]),
        targets=jnp.asarray(ids[:, 1:]),
        weights=jnp.ones(ids[:, 1:].shape, jnp.float32),
        segment_ids=None,
        positions=None,
    )
    decoder = model.definition.bind(model.parameters)
    hidden = decoder.hidden(batch.tokens)
    options = dict(z_loss=0.0, label_smoothing=0.0, loss=None)
    got = hidden_loss(model.definition, model.parameters, hidden, batch, **options).nll
    each = jax.nn.log_softmax(decoder.logits(hidden))
    want = -jnp.sum(jnp.take_along_axis(each, ids[:, 1:, None], axis=-1))
    assert abs(float(got) - float(want)) <= 1e-5 * float(want)


def fused_experts(tensors):
    """Joins the experts of a layer into one tensor, as Qwen3.5's own files store them."""
    fused = {name: x for name, x in tensors.items() if ".experts." not in name}
    found = [re.match(r"(.*\.experts\.)(\d+)\.", name) for name in tensors]
    counts = Counter(each[1] for each in found if each)
    for prefix, count in counts.items():
        parts = {
            kind: np.stack([tensors[f"{prefix}{e}.{kind}_proj.weight"] for e in range(count // 3)])
            for kind in ("gate", "up", "down")
        }
        fused[f"{prefix}gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        fused[f"{prefix}down_proj"] = parts["down"]
    return fused


def with_dense_beside_experts(tensors):
    """Renames tensors to those that transformers' ``save_pretrained`` writes for Kimi Linear."""
    return {
        re.sub(r"\.mlp\.(\w+_proj)", r".block_sparse_moe.\1", name): x
        for name, x in tensors.items()
    }


def with_an_empty_tensor(tensors):
    """Adds the shared expert of a layer without one, as transformers writes it."""
    return tensors | {"model.layers.1.mlp.shared_experts.up_proj.weight": np.zeros((0, 32))}


@pytest.mark.slow_cases("qwen3_5_moe-fused_experts")
@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("qwen3_5_moe", fused_experts),
        ("kimi_linear", with_dense_beside_experts),
        ("glm", with_an_empty_tensor),
    ],
)
def test_other_files_of_the_same_model_are_read(name, renamed, tmp_path):
    write_directory(name, tmp_path)
    want = load_pretrained(tmp_path).parameters
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    other = renamed(tensors)
    assert other.keys() != tensors.keys()
    save_file({n: np.ascontiguousarray(x) for n, x in other.items()}, file)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path).parameters, want)


def inputs_first(tensors):
    """Joins the experts of a layer as Qwen3-VL's own files store them: inputs before outputs."""
    return {
        name: x.transpose(0, 2, 1) if ".experts." in name else x
        for name, x in fused_experts(tensors).items()
    }


@pytest.mark.slow_cases(
    "gemma3-gemma3-language_model.model.",
    "qwen2_vl-qwen2-model.language_model.",
    "kimi_k25-deepseek_v3-language_model.model.",
)
@pytest.mark.parametrize(
    ("whole", "inner", "root"),
    [
        ("gemma3", "gemma3", "language_model.model."),
        ("gemma4", "gemma4", "model.language_model."),
        ("mistral3", "ministral3_odd", "language_model.model."),
        ("qwen2_vl", "qwen2", "model.language_model."),
        ("qwen3_vl_moe", "qwen3_moe", "model.language_model."),
        ("kimi_k25", "deepseek_v3", "language_model.model."),
        ("lfm2_vl", "lfm2", "model.language_model."),
        ("exaone4_5", "exaone4", "model.language_model."),
    ],
)
def test_the_text_part_of_a_model_of_images_is_read(whole, inner, root, tmp_path):
    source = GOLDEN.parent / "hf" / inner
    if source.is_dir():
        text = json.loads((source / "config.json").read_text())
        if whole.startswith("qwen"):
            text |= {"model_type": f"{whole}_text"}
            text["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
    else:
        source, text = tmp_path / "text", described(inner)["config"]
        write_directory(inner, source)
    config = {"model_type": whole, "text_config": text, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = load_file(source / "model.safetensors")
    stored = inputs_first(stored) if whole == "qwen3_vl_moe" else stored
    tensors = {name.replace("model.", root, 1): value for name, value in stored.items()}
    others = ("vision_tower.patches.weight", "mm_projector.0.bias", "mtp.norm.weight")
    tensors |= dict.fromkeys(others[: 3 if whole == "exaone4_5" else 2], np.ones(2))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    plain, found = load_pretrained(source), load_pretrained(tmp_path)
    assert found.definition.config == plain.definition.config
    jax.tree.map(np.testing.assert_array_equal, found.parameters, plain.parameters)
    assert read_model_directory(tmp_path).hf["model_type"] in FAMILIES
