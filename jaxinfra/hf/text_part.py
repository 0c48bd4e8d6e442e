"""Text models inside models of images and text: their configs, and their tensors' names.

The images' part is left out. Where a model rotates by positions on image axes, a token of text has
one position on all of them, which is the plain rotary embedding.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxinfra.errors import ConfigError

# By ``model_type`` of the whole: that of its text part, where its text_config names another.
_TEXT_TYPES = {
    "gemma3": None,
    "gemma3n": None,
    "gemma4": None,
    "mistral3": None,
    "llama4": None,
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": None,
    "qwen3_5_moe": None,
    "kimi_k25": None,
    "lfm2_vl": None,
    "exaone4_5": "exaone4",
}
# Of text_configs that are published without them; all releases of the reference have these.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    }
}
_OWN_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "exaone4_5_text": "exaone4",
}
_OTHERS = (
    "visual|vision_tower|vision_model|multi_modal_projector|mm_projector|embed_vision|audio_tower"
    "|embed_audio"
)
_OF_IMAGES = re.compile(rf"(model\.)?({_OTHERS})\..*")
_TEXT = re.compile(r"(?P<root>model\.)?language_model\.(?P<rest>.*)")
# Of the whole, where it has no text_config of its own.
_WHOLE_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id")
_WHOLE_KEYS += ("vision_end_token_id", "vision_token_id", "architectures")


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of a model's text part; of a model without images the same object."""
    kind = values.get("model_type")
    if not isinstance(kind, str):  # the family's look-up says what is wrong
        return values
    if kind in _OWN_TYPES:
        return _plain(values, _OWN_TYPES[kind])
    if kind not in _TEXT_TYPES:
        return values
    inner = values.get("text_config")
    if inner is None:
        inner = {name: value for name, value in values.items() if name not in _WHOLE_KEYS}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{kind} config: text_config={inner!r} is no object of settings")
    found = _DEFAULTS.get(kind, {}) | dict(inner)
    for name in ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype"):
        if name in values:
            found[name] = values[name]
    return _plain(found, _TEXT_TYPES[kind] or str(found.get("model_type")))


def _plain(values: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    found = {name: value for name, value in values.items() if name != "architectures"}
    for name in ("rope_scaling", "rope_parameters"):
        rope = found.get(name)
        if isinstance(rope, Mapping) and "mrope_section" in rope:
            kept = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
            named = {k: "default" for k, v in kept.items() if v == "mrope"}
            found[name] = kept | named
    return found | {"model_type": model_type}


def text_name(name: str) -> str | None:
    """Returns a tensor's name in the text model; None for one of the images' part."""
    if _OF_IMAGES.fullmatch(name):
        return None
    found = _TEXT.fullmatch(name)
    return name if found is None else (found["root"] or "") + found["rest"]
