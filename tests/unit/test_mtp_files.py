"""Multi-token prediction in Hugging Face directories, by the published names of its tensors.

The reference joins hidden state and embedding in NumPy. Block and vocabulary are those of a second
directory: a model of one layer, whose embeddings are the joined rows and whose tensors are the
module's, renamed. Families' layers themselves are held to transformers in ``test_families``.
"""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import read_model_directory, write_hf
from jaxinfra.hf import from_hf_config, weight_map
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.parallel.execution import execution_on

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LENGTH = 7

DEEPSEEK = {
    "prefix": "model.layers.{}.",
    "embedding": "enorm",
    "hidden": "hnorm",
    "join": "eh_proj",
    "final": "shared_head.norm",
    "copies": {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
}
MIMO = {
    "prefix": "model.mtp_layers.0.",
    "embedding": "token_layernorm",
    "hidden": "hidden_layernorm",
    "join": "input_proj",
    "final": "final_layernorm",
    "hidden_first": True,
}
QWEN = {
    "prefix": "mtp.",
    "block": "layers.0.",
    "embedding": "pre_fc_norm_embedding",
    "hidden": "pre_fc_norm_hidden",
    "join": "fc",
    "final": "norm",
    "offset": 1.0,
}


def family(name):
    """Config and names of a family."""

    def golden(file):
        found = json.loads((GOLDEN / file).read_text())
        return found.get("config", found)

    match name:
        case "mimo":
            config = golden("hf/qwen2/config.json")
            more = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
            more |= {"num_nextn_predict_layers": 1, "layer_types": ["sliding_attention"] * 4}
            return config | more, MIMO
        case "deepseek_v3":
            return golden("hf/deepseek_v3/config.json") | {"num_nextn_predict_layers": 1}, DEEPSEEK
        case "glm4_moe":
            return golden("families/glm4_moe.json") | {"num_nextn_predict_layers": 1}, DEEPSEEK
        case "glm4_moe_lite":
            return golden("families/glm4_moe_lite.json") | {"num_nextn_predict_layers": 1}, DEEPSEEK
        case "deepseek_v32":  # whose indexer chooses 5 of the 7 tokens
            return golden("families/deepseek_v32.json") | {"num_nextn_predict_layers": 1}, DEEPSEEK
        case _:
            return golden("families/qwen3_next.json"), QWEN


def drawn(values, rng, *, mtp):
    """Random tensors of a config, by their names."""
    config = dataclasses.replace(from_hf_config(values), mtp=mtp)
    shapes = define_model(config, execution_on()).arrays
    tensors = weight_map(values["model_type"], config, shapes).tensors
    return {
        name: rng.normal(0.0, 0.25, each.shape).astype(np.float32) for name, each in tensors.items()
    }


def written(path, values, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    save_file(tensors, path / "model.safetensors")
    return load_pretrained(path)


def normed(x, scale, *, epsilon, offset):
    mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    return x / np.sqrt(mean + epsilon) * (scale + offset)


FAMILIES = ("mimo", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "qwen3_next")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:]]


def given(name, path):
    """A directory of a family with random tensors: its config, names, tensors, and the model."""
    values, names = family(name)
    tensors = drawn(values, np.random.default_rng(0), mtp=True)
    prefix = names["prefix"].format(values["num_hidden_layers"])
    for copy, original in names.get("copies", {}).items():
        tensors[prefix + copy] = tensors[original]
    return values, names | {"prefix": prefix}, tensors, written(path, values, tensors)


@pytest.mark.parametrize("name", ["mimo", *SLOW])
def test_a_published_module_is_read_and_written_bitwise(name, tmp_path):
    _, _, tensors, model = given(name, tmp_path / "given")
    assert model.definition.config.mtp
    directory = read_model_directory(tmp_path / "given")
    write_hf(
        directory.open(model.definition),
        model.definition,
        tmp_path / "again",
        hf=directory.hf,
        tokenizer_directory=tmp_path,
        dtype=None,
        max_shard_bytes=10**9,
    )
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[each], tensors[each]) for each in tensors)
    assert read_model_directory(tmp_path / "again").config == directory.config


@pytest.mark.slow
def test_experts_of_the_module_may_be_stored_otherwise_than_the_models(tmp_path):
    """Each with tensors of its own, where the model's layers have all of them in one."""
    values = json.loads((GOLDEN / "families/qwen3_5_moe.json").read_text())["config"]
    tensors = drawn(values, np.random.default_rng(0), mtp=True)
    mixed = {}
    for name, x in tensors.items():
        layer, _, last = name.partition(".mlp.experts.0.")
        if not last or name.startswith("mtp."):
            if ".mlp.experts." not in name or name.startswith("mtp."):
                mixed[name] = x
            continue
        of_all = [
            np.stack(
                [
                    tensors[f"{layer}.mlp.experts.{e}.{proj}.weight"]
                    for e in range(100)
                    if f"{layer}.mlp.experts.{e}.{proj}.weight" in tensors
                ]
            )
            for proj in ("gate_proj", "up_proj", "down_proj")
        ]
        mixed[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate(of_all[:2], axis=1)
        mixed[f"{layer}.mlp.experts.down_proj"] = of_all[2]
    one, other = (written(tmp_path / n, values, t) for n, t in (("a", tensors), ("b", mixed)))
    assert one.definition.config.mtp
    for path, value in by_path(one.parameters).items():
        np.testing.assert_array_equal(by_path(other.parameters)[path], value, err_msg=path)


@pytest.mark.slow  # by default its loss and drafts, in test_mtp
@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_module_computes_its_equations(name, tmp_path):
    values, names, tensors, model = given(name, tmp_path / "given")
    decoder, prefix = model.definition.bind(model.parameters), names["prefix"]
    rng = np.random.default_rng(1)
    ids = rng.integers(0, values["vocab_size"], LENGTH + 1)
    hidden = decoder.hidden(jnp.asarray(ids[None, :-1]))
    got = decoder.logits(decoder.predict(hidden, jnp.asarray(ids[None, 1:])).x)[0]

    kept = {"epsilon": values["rms_norm_eps"], "offset": names.get("offset", 0.0)}
    embedded = normed(
        tensors["model.embed_tokens.weight"][ids[1:]],
        tensors[f"{prefix}{names['embedding']}.weight"],
        **kept,
    )
    before = normed(np.asarray(hidden[0]), tensors[f"{prefix}{names['hidden']}.weight"], **kept)
    pair = [before, embedded] if names.get("hidden_first") else [embedded, before]
    joined = np.concatenate(pair, axis=-1) @ tensors[f"{prefix}{names['join']}.weight"].T

    once = values | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    once |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in values else {}
    for types in {"layer_types", "mlp_layer_types"} & values.keys():
        once[types] = values[types][-1:]
    if name == "qwen3_next":
        del once["num_nextn_predict_layers"]
        once["layer_types"] = ["full_attention"]
    block = drawn(once, rng, mtp=False)
    layer = "model.layers.0."
    for each in block:
        if each.startswith(layer):
            inside = names.get("block", "") + each.removeprefix(layer)
            block[each] = tensors[prefix + inside]
    table = np.zeros_like(tensors["model.embed_tokens.weight"])
    table[:LENGTH] = joined
    block["model.embed_tokens.weight"] = table
    block["model.norm.weight"] = tensors[f"{prefix}{names['final']}.weight"]
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    block["lm_head.weight"] = head
    once["tie_word_embeddings"] = False
    second = written(tmp_path / "once", once, block)
    want = second.definition.bind(second.parameters)(np.arange(LENGTH)[None])[0]
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
