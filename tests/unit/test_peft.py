"""Adapters that PEFT wrote: its logits, its gradients, its merged model, and its files again."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfra import load_model
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.checkpoint.onto_mesh import place_parameters
from jaxinfra.checkpoint.peft_files import MergedParameters, read_peft, write_peft
from jaxinfra.checkpoint.peft_settings import read_settings
from jaxinfra.cli.main import main
from jaxinfra.config.precision import PolicyName
from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.hf import by_path, weight_map
from jaxinfra.model.definition import define_model, nest
from jaxinfra.parallel.execution import execution_on

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = {"qwen2_dora": "qwen2", "phi3_dora_rslora": "phi3", "mistral_lora": "mistral"}
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "phi3_dora_rslora"]


class Case:
    """A golden model and the adapters of PEFT over it."""

    def __init__(self, base, adapters):
        path = GOLDEN / "hf" / base
        self.directory = read_model_directory(path)
        self.base = load_pretrained(path, policy=PolicyName.FP32)
        definition = self.base.definition
        self.source = self.directory.open(definition)
        self.weights = weight_map(
            self.directory.hf["model_type"], self.directory.config, definition.arrays
        )
        self.adapters = read_peft(adapters, self.weights, definition, source=self.source)
        whole = define_model(definition.config, definition.execution, lora=self.adapters.lora)
        self.model = whole.freeze(self.base.parameters)

    @property
    def tree(self):
        keys = {path: tuple(_key(each) for each in path.split("/")) for path in self.arrays}
        return nest({keys[path]: jnp.asarray(x) for path, x in self.arrays.items()})

    @property
    def arrays(self):
        return self.adapters.arrays


class GoldenCase(Case):
    """A directory of golden/peft, with the arrays that PEFT computed."""

    def __init__(self, name, adapters=None):
        super().__init__(CASES[name], adapters or GOLDEN / "peft" / name)
        with np.load(GOLDEN / "peft" / name / "golden.npz") as arrays:
            self.golden = dict(arrays)


def _key(text):
    return int(text) if text.isdigit() else text


def close(got, golden, name, rest=""):
    """No further from float64 than four times what PEFT's own float32 is, as both round alike."""
    want = golden[f"{name}64{rest}"]
    error = np.abs(golden[f"{name}32{rest}"] - want).max()
    assert error > 0
    assert np.abs(np.asarray(got) - want).max() <= 4 * error


@pytest.mark.parametrize("name", ["phi3_dora_rslora", *SLOW])
def test_logits_and_gradients_are_those_of_peft(name):
    case = GoldenCase(name)
    ids = case.golden["ids"]

    def loss(tree):
        logits = case.model.bind(tree)(ids)
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(ids[:, 1:, None]), axis=-1
        )
        return -chosen.mean(), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(case.tree)
    close(logits, case.golden, "logits")
    # Their gradients, as adapters are: B's factor is ours already where ranks are alike.
    found = {path: np.asarray(x) for path, x in by_path(gradients).items()}
    names = {key.removeprefix("gradient64/") for key in case.golden if key.startswith("gradient64")}
    assert len(names) == (4 if name == "mistral_lora" else 6)
    for key in names:
        module, _, kind = key.removesuffix(".weight").rpartition(".lora_")
        (path, (layer,)) = next(
            (part.path, part.index)
            for tensor in case.weights.tensors.values()
            if tensor.name == f"{module}.weight"
            for part in tensor.parts
        )
        if len(case.weights.tensors[f"{module}.weight"].parts) > 1:
            continue  # parts of ours have each their A
        prefix = path.removesuffix("weight") + "adapter/"
        ours = found[prefix + {"A": "a", "B": "b", "magnitude_vector": "magnitude"}[kind]][layer]
        want = case.golden[f"gradient64/{key}"]
        rank = 2 if name == "mistral_lora" else case.adapters.lora.rank
        if kind == "A":
            ours = ours.reshape(-1, ours.shape[-1]).T[:rank]
        elif kind == "B":
            # d/dB of theirs is by B, ours by B with its factor over the common one.
            ratio = 0.25 if name == "mistral_lora" and "down" in key else 1.0
            ours = ratio * ours.reshape(ours.shape[0], -1).T[:, :rank]
        close(ours.reshape(want.shape), case.golden, "gradient", f"/{key}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_merged_weights_are_those_of_peft(name):
    case = GoldenCase(name)
    source = MergedParameters(base=case.source, adapters=case.adapters)
    definition, placement = case.base.definition, case.base.placement
    shardings = placement.parameters(definition)
    # Small pieces: a norm needs inputs that lie in others.
    parameters = place_parameters(source, definition, shardings, piece_bytes=300)
    merged = definition.bind(parameters)(case.golden["ids"])
    error = np.abs(case.golden["logits32"] - case.golden["logits64"]).max()
    assert np.abs(merged - case.golden["merged64"]).max() <= 4 * error
    assert np.abs(case.golden["plain64"] - case.golden["merged64"]).max() > 1


@pytest.mark.slow
def test_adapters_are_merged_into_a_directory(tmp_path, capsys):
    base, adapters = GOLDEN / "hf" / "phi3", GOLDEN / "peft" / "phi3_dora_rslora"
    out = tmp_path / "out"
    assert main(["convert", str(base), str(out), "--merge", str(adapters)]) == 0
    assert "Hugging Face" in capsys.readouterr().out
    with np.load(adapters / "golden.npz") as golden:
        merged = load_model(out)(golden["ids"])
        error = np.abs(golden["logits32"] - golden["logits64"]).max()
        assert np.abs(merged - golden["merged64"]).max() <= 4 * error


@pytest.mark.parametrize("name", ["phi3_dora_rslora", *SLOW])
def test_what_is_written_is_read_again(name, tmp_path):
    case = GoldenCase(name)
    write_peft(case.adapters, case.weights, tmp_path / "out", base="x", source=case.source)
    values = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert values["use_dora"] == ("dora" in name)
    assert values["use_rslora"] == ("rslora" in name)
    again = GoldenCase(name, tmp_path / "out")
    first, second = (
        MergedParameters(base=case.source, adapters=each.adapters) for each in (case, again)
    )
    for path, leaf in by_path(case.base.definition.shapes).items():
        index = tuple(slice(0, size) for size in leaf.shape)
        # Other ranks, other factors, the same sums of few products.
        want = first.read(path, index)
        np.testing.assert_allclose(second.read(path, index), want, rtol=1e-5, atol=1e-6)
        assert ("/query/weight" not in path) or not np.array_equal(
            want, case.source.read(path, index)
        )


@pytest.mark.slow
def test_magnitudes_begin_at_the_norms_of_the_base():
    case = GoldenCase("phi3_dora_rslora")
    found = by_path(case.model.initialize(jax.random.key(0), beside=case.base.parameters))
    for name, module in {"attention/query": "self_attn.qkv", "mlp/down": "mlp.down"}.items():
        got = np.asarray(found[f"blocks/0/{name}/adapter/magnitude"])[1].reshape(-1)
        want = case.golden[f"begin/model.layers.1.{module}_proj.lora_magnitude_vector.weight"]
        # A sum of squares of n numbers in another order: n roundings of positive terms.
        bound = 2 * 44 * np.finfo(np.float32).eps
        np.testing.assert_allclose(got, want[: len(got)], rtol=bound)
    with pytest.raises(AssertionError, match="norms"):
        case.model.initialize(jax.random.key(0))


@pytest.fixture
def spoiled(tmp_path):
    """A copy of golden adapters, its settings or tensors changed."""

    def make(settings=(), tensors=None):
        path = shutil.copytree(GOLDEN / "peft" / "phi3_dora_rslora", tmp_path / "copy")
        values = json.loads((path / "adapter_config.json").read_text()) | dict(settings)
        (path / "adapter_config.json").write_text(json.dumps(values))
        if tensors is not None:
            found = load_file(path / "adapter_model.safetensors")
            tensors(found)
            save_file(found, path / "adapter_model.safetensors")
        return path

    return make


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_"
WRONG = {
    "peft_type": ({"peft_type": "LOHA"}, None),
    "own biases were trained": ({"bias": "all"}, None),
    "init_lora_weights='pissa'": ({"init_lora_weights": "pissa"}, None),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, None),
    "unknown keys": ({"new_form": 3}, None),
    "alpha_pattern": ({"alpha_pattern": {"(a+)+": 1}}, None),
    "is no adapter of a projection": (
        {},
        lambda t: t.update({"mlp.lora_A.weight": t[FIRST + "A.weight"]}),
    ),
    "of another one": (
        {},
        lambda t: t.update({"base_model.model.q.lora_A.weight": t[FIRST + "A.weight"]}),
    ),
    "has A, B, its config asks for A, B, magnitude": (
        {},
        lambda t: t.pop(FIRST + "magnitude_vector"),
    ),
    "adapters are of another model": (
        {},
        lambda t: t.update({FIRST + "A.weight": np.ones((4, 9), np.float32)}),
    ),
    "adapts the output head": (
        {},
        lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[FIRST + "A.weight"]}),
    ),
    "adapts the embeddings": (
        {},
        lambda t: t.update(
            {"base_model.model.model.embed_tokens.lora_embedding_A": t[FIRST + "A.weight"]}
        ),
    ),
    "biases of adapters": ({"lora_bias": True}, None),
    "write this one out": ({"alpha_pattern": {"(": 1}}, None),
    r"'\(\?i\)q_proj': expressions that": ({"alpha_pattern": {"(?i)q_proj": 1}}, None),
    r"layers_pattern '\(\?i\)h': expressions that": ({"layers_pattern": "(?i)h"}, None),
    "rank_pattern '.*down_proj': 1.5": ({"rank_pattern": {".*down_proj": 1.5}}, None),
    "has rank 4 in its tensors and 5 by r": ({"rank_pattern": {"down_proj": 5}}, None),
    "not finite": ({}, lambda t: t[FIRST + "A.weight"].fill(np.nan)),
    "mlp.down_proj has tensors.*do not choose it": ({"target_modules": ["qkv_proj"]}, None),
    "target_modules names none": ({"target_modules": None}, None),
    "no str or list": ({"target_modules": 7}, None),
    "an expression or names": ({"exclude_modules": [3]}, None),
    "layers_to_transform=.*numbers": ({"layers_to_transform": ["all"]}, None),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_read_is_refused_by_name(message, spoiled):
    settings, tensors = WRONG[message]
    path = spoiled(settings, tensors)
    base = read_model_directory(GOLDEN / "hf" / "phi3")
    definition = define_model(base.config, execution_on())
    weights = weight_map(base.hf["model_type"], base.config, definition.arrays)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        read_peft(path, weights, definition, source=base.open(definition))


PATTERNS = json.loads((GOLDEN / "peft" / "patterns.json").read_text())


@pytest.mark.parametrize(("patterns", "wanted"), PATTERNS)
def test_patterns_match_as_in_peft(patterns, wanted, spoiled):
    settings = {"alpha_pattern": patterns, "lora_alpha": -1 + 1e9, "use_rslora": False, "r": 2}
    found = read_settings(spoiled(settings))
    for module, alpha in wanted.items():
        assert found.scale(module) == (settings["lora_alpha"] if alpha == -1 else alpha) / 2


MODULES = json.loads((GOLDEN / "peft" / "modules.json").read_text())


@pytest.mark.parametrize(("settings", "wanted"), MODULES)
def test_settings_choose_modules_as_in_peft(settings, wanted, spoiled):
    choice = read_settings(spoiled(settings)).modules
    assert [module for module in PATTERNS[0][1] if choice.has(module)] == wanted


CHOICES = json.loads((GOLDEN / "peft" / "choices.json").read_text())
READ = (
    "expression",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "excluded",
            "excluded_expression",
            "layers",
            "anchored",
            "anchored_fused",
            "tied",
        )
    ),
)
REFUSED = {
    "embeddings": "adapts the embeddings, or holds a whole copy",
    "head": "adapts the output head, or holds a whole copy",
    "tied_embeddings": "adapts the output head, or holds a whole copy",
    "whole_modules": "modules_to_save.*trained whole",
    "whole_rows": "trainable_token_indices.*rows of the embedding were trained whole",
    "adapter_biases": "lora_bias=True: biases of adapters are not read",
    "own_biases": "bias='lora_only': the model's own biases were trained",
    "stacked_experts": "target_parameters.*adapters of stacked parameters",
    "resized": "adapts the output head, or holds a whole copy",
}


@pytest.fixture
def chosen(tmp_path):
    """The directory that PEFT wrote for a case of choices.json, and what it computed."""

    def make(name):
        case = CHOICES[name]
        with np.load(GOLDEN / "peft" / "choices.npz") as arrays:
            found = {
                key.removeprefix(f"{name}/"): arrays[key]
                for key in arrays
                if key.startswith(f"{name}/")
            }
        tensors = {
            key: found.get(key, np.ones(shape, np.float32))
            for key, shape in case["tensors"].items()
        }
        (tmp_path / "adapter_config.json").write_text(json.dumps(case["config"]))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        return found

    return make


@pytest.mark.parametrize("name", READ)
def test_modules_are_chosen_as_in_peft(name, chosen, tmp_path):
    golden = chosen(name)
    case = Case(CHOICES[name]["base"], tmp_path)
    logits = case.model.bind(case.tree)(golden["ids"])
    # Both round in float32; the test of logits and gradients has bounds from float64.
    size = np.abs(golden["logits"]).max()
    assert np.abs(logits - golden["logits"]).max() <= 1e-5 * size
    assert np.abs(golden["plain"] - golden["logits"]).max() > 0.1 * size


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_of_more_than_projections_are_refused(name, chosen, tmp_path):
    chosen(name)
    base = read_model_directory(GOLDEN / "hf" / CHOICES[name]["base"])
    definition = define_model(base.config, execution_on())
    weights = weight_map(base.hf["model_type"], base.config, definition.arrays)
    with pytest.raises(ConfigError, match=REFUSED[name]):
        read_peft(tmp_path, weights, definition, source=base.open(definition))
