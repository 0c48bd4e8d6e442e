"""EAGLE-3 draft heads in published form: their configs, and the names of their tensors.

Two forms are known. The paper's authors, SGLang and SpecForge write a Llama config with
``draft_vocab_size`` and tensors ``midlayer.*``. In that of ``speculators``, such a config is its
``transformer_layer_config``, and the layer is ``layers.0.*``.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfra.config.drafted import EagleConfig
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.llama import read_llama, read_qwen3
from jaxinfra.hf.mapping import WeightMap, head_weight_map
from jaxinfra.hf.weights import MLP, OUT, QK_NORM, QKV, Rule, norm, rule
from jaxinfra.model.definition import Parameters

_FORM, _LAYER, _IDS = "speculators_model_type", "transformer_layer_config", "d2t"
_READERS = {"llama": read_llama, "qwen3": read_qwen3}
_EMBEDDING, _LAYERS = "embed_tokens.weight", "eagle_aux_hidden_state_layer_ids"
_OUTSIDE = (
    rule("fc.weight", "fusion/weight", "F D -> D F"),
    *norm("norm", "final_norm"),
    rule("lm_head.weight", "unembedding/table", "V D -> V D"),
    rule(_EMBEDDING, "embedding/table", "V D -> V D"),
    rule(_IDS, "offsets", "V -> V"),
)
_OF_LAYER = (
    *norm("input_layernorm", "embedding_norm"),
    *norm("hidden_norm", "hidden_norm"),
    *norm("post_attention_layernorm", "mlp_norm"),
    *(*QKV, *OUT, *QK_NORM, *MLP),
)
# Keys of eagle_config by which heads differ, with the values of the paper's heads.
_EXPECTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}


def is_draft_head(values: Mapping[str, Any]) -> bool:
    """Tells whether a config describes a draft head of any kind, instead of a model."""
    names = str(values.get("architectures")).lower()
    return _FORM in values or "draft_vocab_size" in values or "eagle" in names


def read_eagle(values: Mapping[str, Any], *, stored: Collection[str]) -> EagleConfig:
    """Reads an EAGLE-3 head's config.

    Args:
        stored: names of its tensors.

    Raises:
        UnsupportedError: another kind of head.
        ConfigError: a key or value would change what the head computes, or is missing.
    """
    form, inner = values.get(_FORM), values.get(_LAYER)
    if form not in (None, "eagle3") or not {"fc.weight", "norm.weight"} <= {*stored}:
        raise UnsupportedError(
            f"the draft head is of kind {form or values.get('architectures')}; only EAGLE-3 heads "
            "are read, which have tensors fc.weight and norm.weight: take such a head, or leave "
            "--draft out"
        )
    if form is not None:
        values = {**values, **(inner if isinstance(inner, dict) else {})}
        values = {name: each for name, each in values.items() if name not in (_LAYER, _FORM)}
    keys = Keys(values, what="draft head's config")
    if form is not None:  # readers of this form disagree on its default
        keys.require("norm_before_residual")
    keys.ignore("speculators_config", "speculators_version", "has_no_defaults_at_init")
    keys.ignore("embed_requires_grad", "enable_sp_ulysses", "target_model_type")
    for name in ("norm_before_fc", "bias"):
        keys.expect(name, (False, None), "hidden states are projected without norm and bias here")
    keys.expect("num_hidden_layers", (1,), "a head of one layer is read")
    model = keys.choice("model_type", _READERS, "llama")(keys)
    size = keys.integer("draft_vocab_size", model.vocab_size)
    read = EagleConfig(
        part=dataclasses.replace(model, vocab_size=size, tie_embeddings=False),
        vocab_size=model.vocab_size,
        target_dim=keys.integer("target_hidden_size", model.model_dim),
        layers=_read_layers(keys),
        norm_before_residual=keys.flag("norm_before_residual", False),
        has_embedding=_EMBEDDING in stored,
        has_offsets=_IDS in stored,
    )
    keys.finish()
    return read


def _read_layers(keys: Keys) -> tuple[int, ...]:
    """Reads the numbers of layers after which the head reads the model; empty for the default.

    ``eagle_config`` counts the layer whose output it is from 0; the key beside it, as in configs of
    ``speculators``, the layer whose input it is.
    """
    found, nested = keys.sequence(_LAYERS, ()), keys.mapping("eagle_config")
    if nested is not None:
        inner = Keys(nested, what="eagle_config")
        for name, value in _EXPECTED.items():
            inner.expect(name, (value, None), "heads as of EAGLE-3's paper are read")
        counted = inner.sequence(_LAYERS, ())
        inner.finish(neutral=())
        found = found or tuple(each + 1 if type(each) is int else each for each in counted)
    if not all(type(each) is int for each in found):
        raise ConfigError(
            f"{_LAYERS}={list(found)} must be three whole numbers, of layers; copy the head's "
            "config.json again from its source"
        )
    return found


def eagle_weights(eagle: EagleConfig, shapes: Parameters, *, stored: Collection[str]) -> WeightMap:
    """Returns the map of an EAGLE-3 head's tensors.

    Args:
        shapes: the head's parameters and ids, in a tree of their whole paths.
        stored: names of the head's tensors.
    """
    layer = "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."
    named = [dataclasses.replace(each, name=layer + each.name) for each in _OF_LAYER]

    def placed(each: Rule) -> Rule:
        return dataclasses.replace(each, parts=tuple((f"mtp/{p}", to) for p, to in each.parts))

    rules = map(placed, (*_OUTSIDE, *named))
    return head_weight_map(tuple(rules), eagle.part, shapes, r"t2d|.*rotary_emb\.inv_freq")
