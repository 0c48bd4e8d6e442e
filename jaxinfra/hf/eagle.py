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
from jaxinfra.hf.mapping import WeightMap, rules_map
from jaxinfra.hf.weights import MLP, OUT, QK_NORM, QKV, norm, rule
from jaxinfra.model.definition import Parameters

IDS = "d2t"
"""Tensor of the draft vocabulary: what is added to each of its ids, for the model's id."""
UNREAD = (IDS, "t2d")
"""Tensors of vocabularies, which are no weights; the second follows from the first."""

_FORM, _LAYER = "speculators_model_type", "transformer_layer_config"
_READERS = {"llama": read_llama, "qwen3": read_qwen3}
_EMBEDDING = "embed_tokens.weight"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OUTSIDE = (
    rule("fc.weight", "fusion/weight", "F D -> D F"),
    *norm("norm", "final_norm"),
    rule("lm_head.weight", "unembedding/table", "V D -> V D"),
    rule(_EMBEDDING, "embedding/table", "V D -> V D"),
)
_OF_LAYER = (
    *norm("input_layernorm", "embedding_norm"),
    *norm("hidden_norm", "hidden_norm"),
    *norm("post_attention_layernorm", "mlp_norm"),
    *(*QKV, *OUT, *QK_NORM, *MLP),
)


def is_draft_head(values: Mapping[str, Any]) -> bool:
    """Tells whether a config is of a draft head, of whatever kind, and not of a model."""
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
            f"the draft head is of kind {form or values.get('architectures')}, and EAGLE-3 is what "
            "is read: a layer of two inputs with fc.weight and norm.weight; take such a head, or "
            "leave --draft out"
        )
    if form is not None:
        values = {**values, **(inner if isinstance(inner, dict) else {})}
        values = {name: each for name, each in values.items() if name not in (_LAYER, _FORM)}
    keys = Keys(values, what="draft head's config")
    if form is not None:  # its readers do not agree on what a config without it says
        keys.require("norm_before_residual")
    keys.ignore("speculators_config", "speculators_version", "has_no_defaults_at_init")
    keys.ignore("embed_requires_grad", "enable_sp_ulysses", "target_model_type")
    keys.ignore("draft_vocab_size")
    for name in ("norm_before_fc", "bias"):
        keys.expect(name, (False, None), "hidden states are projected without norm and bias here")
    kind = keys.choice("model_type", _READERS, "llama")
    keys.expect("num_hidden_layers", (1,), "a head of one layer is read")
    model = kind(keys)
    read = EagleConfig(
        part=dataclasses.replace(
            model, vocab_size=keys.integer("draft_vocab_size", model.vocab_size)
        ),
        vocab_size=model.vocab_size,
        target_dim=keys.integer("target_hidden_size", model.model_dim),
        layers=_read_layers(keys),
        norm_before_residual=keys.flag("norm_before_residual", False),
        has_embedding=_EMBEDDING in stored,
    )
    keys.finish()
    if IDS not in stored and read.part.vocab_size != read.vocab_size:
        raise ConfigError(
            f"draft_vocab_size={read.part.vocab_size} of {read.vocab_size} ids, and no tensor "
            f"{IDS!r} says which; copy all files of the head"
        )
    return read


def _read_layers(keys: Keys) -> tuple[int, ...]:
    """Reads the numbers of layers after which the head reads the model; empty for the default.

    ``eagle_config`` counts the layer whose output it is from 0; the key beside it, as in configs of
    ``speculators``, the layer whose input it is.
    """
    given = keys.sequence(_LAYERS, ())
    nested = keys.mapping("eagle_config")
    if nested is not None:
        inner = Keys(nested, what="eagle_config")
        inner.expect("use_aux_hidden_state", (True, None), "EAGLE-3 reads three hidden states")
        given = given or tuple(
            each + 1 if isinstance(each, int) else each for each in inner.sequence(_LAYERS, ())
        )
        inner.finish(neutral=())
    if not all(type(each) is int for each in given):
        raise ConfigError(f"{_LAYERS}={list(given)}: three numbers of layers are what it holds")
    return tuple(given)


def eagle_weights(shapes: Parameters, *, stored: Collection[str]) -> WeightMap:
    """Returns the map of an EAGLE-3 head's tensors.

    Args:
        shapes: ``ModelDefinition.shapes`` of the model with the head.
        stored: names of the head's tensors.
    """
    layer = "midlayer." if any(name.startswith("midlayer.") for name in stored) else "layers.0."
    rules = [dataclasses.replace(each, name=layer + each.name) for each in _OF_LAYER]
    return rules_map(
        (*_OUTSIDE, *rules), {"mtp": shapes["mtp"]}, "mtp/", ignored=r".*rotary_emb\.inv_freq"
    )
