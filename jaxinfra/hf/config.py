"""Translation of Hugging Face configs to ours and back, by a table of architectures."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfra.config.kinds import Head
from jaxinfra.config.model import BlockConfig, ExpertsConfig, ModelConfig
from jaxinfra.config.routing import BalanceConfig
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.hf import (
    alibi,
    bamba,
    cohere,
    deepseek,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    granite,
    kimi_linear,
    layer_norm_models,
    lfm2,
    llama,
    llama4,
    llama_variants,
    mamba,
    nemotron_h,
    olmo,
    qwen_next,
    selective,
    sparse,
    sparse_variants,
    weights,
)
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.quantization import Quantization, read_quantization
from jaxinfra.hf.text_part import text_part
from jaxinfra.runtime.files import is_of_type

_READERS = (
    llama,
    gemma,
    gpt,
    sparse,
    deepseek,
    gemma3n,
    gemma4,
    olmo,
    llama_variants,
    glm,
    granite,
    cohere,
    layer_norm_models,
    sparse_variants,
    llama4,
    alibi,
    qwen_next,
    bamba,
    falcon_h1,
    lfm2,
    kimi_linear,
    nemotron_h,
    mamba,
    selective,
)
FAMILIES = {name: family for each in _READERS for name, family in each.FAMILIES.items()}
"""Readers by ``model_type``, in the order in which an export looks for one that says the model."""


def from_hf_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads the model that a Hugging Face ``config.json`` describes, of images only the text part.

    Raises:
        ConfigError: an architecture, key or value is not supported and would change the result; the
            message names it.
    """
    values = text_part(values)
    model_type = model_type_of(values)
    family = FAMILIES[model_type]
    architectures = values.get("architectures")
    if not is_of_type(architectures, list[str] | None):
        raise ConfigError(
            f"{model_type} config: architectures={architectures!r} is no list of names"
        )
    named = {_plain_name(each) for each in architectures or ()}
    is_scored = _plain_name(family.classifier) in named
    models = {_plain_name(each) for each in (family.architecture, family.saved_as or "")}
    if named and not models & named and not is_scored:
        raise ConfigError(
            f"{model_type} config: architectures={architectures}: a language model, "
            f"{family.architecture}, or a reward model, {family.classifier}, is needed"
        )
    if is_scored:
        _require_one_label(values, model_type)
    keys = Keys(values, what=f"{model_type} config")
    read_quantization(keys)
    try:
        config = family.read(keys)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Sizes are divided by each other on the way to a config, which then says what is wrong.
        raise ConfigError(
            f"{model_type} config: its numbers do not fit together ({error}); restore it"
        ) from error
    keys.finish()
    return dataclasses.replace(config, head=Head.SCORE, mtp=False) if is_scored else config


def _plain_name(architecture: str) -> str:
    """Returns a name without capitals and underscores, in which makers and the reference differ."""
    return architecture.lower().replace("_", "")


def _require_one_label(values: Mapping[str, Any], model_type: str) -> None:
    labels = values.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
    if num_labels != 1:
        raise ConfigError(
            f"{model_type} config: num_labels={num_labels}: a language model, "
            f"{FAMILIES[model_type].architecture}, or a reward model of one label is needed"
        )


def model_type_of(values: Mapping[str, Any]) -> str:
    """Returns the ``model_type``; raises ConfigError for one that is not supported."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            f"model_type={model_type!r}: the config does not name its architecture; is it a "
            'config.json of Hugging Face? Add "model_type", such as "llama"'
        )
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type={model_type!r} is not supported{nearest(model_type, FAMILIES)}"
        )
    return model_type


def quantization_of(values: Mapping[str, Any]) -> Quantization | None:
    """Returns the storage format of the weights beside a Hugging Face config."""
    return read_quantization(Keys(values, what="config"))


def plain_hf_config(values: Mapping[str, Any], *, mtp: bool) -> dict[str, Any]:
    """Returns the config of the same model without quantization and without left-out layers.

    Args:
        mtp: whether the model has its multi-token prediction.
    """
    plain = {name: value for name, value in values.items() if name != "quantization_config"}
    if plain.get("num_nextn_predict_layers"):
        plain["num_nextn_predict_layers"] = int(mtp)
    return plain


def prediction_prefix(values: Mapping[str, Any], config: ModelConfig) -> str | None:
    """Returns what names of a multi-token prediction module's tensors begin with; None where the
    architecture has none that is read.
    """
    found = FAMILIES[model_type_of(values)].weights
    table = found if isinstance(found, weights.WeightTable) else found(config)
    module = table.prediction
    return None if module is None else module.prefix.format(config.num_layers)


_MTP_WEIGHT: float = ModelConfig.__dataclass_fields__["mtp_weight"].default


def computed(config: ModelConfig) -> ModelConfig:
    """Returns the model config without training settings, such as dropout, which Hugging Face
    configs do not have.
    """

    def block(each: BlockConfig) -> BlockConfig:
        experts = each.feed_forward
        if not isinstance(experts, ExpertsConfig):
            return each
        plain = dataclasses.replace(experts, balance=BalanceConfig())
        return dataclasses.replace(each, feed_forward=plain)

    return dataclasses.replace(config.with_blocks(block), mtp_weight=_MTP_WEIGHT)


def _scored_keys(name: str) -> dict[str, Any]:
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [FAMILIES[name].classifier], **labels}


def to_hf_config(config: ModelConfig, *, model_type: str | None = None) -> dict[str, Any]:
    """Writes a Hugging Face ``config.json`` that reads back as exactly this model.

    Args:
        model_type: the architecture to write; None: the first that can describe this model.

    Raises:
        ConfigError: no supported architecture can describe this model.
    """
    if model_type is not None:
        model_type_of({"model_type": model_type})
    candidates = [model_type] if model_type is not None else list(FAMILIES)
    wanted, reasons = computed(config), []
    for name in candidates:
        try:
            written = {
                "architectures": [FAMILIES[name].architecture],
                "model_type": name,
                **({} if wanted.head is Head.LOGITS else _scored_keys(name)),
                # Named, because their defaults are ids of the published models.
                **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
                **FAMILIES[name].write(wanted),
            }
            same = from_hf_config(written) == wanted
        except (ConfigError, ArithmeticError) as error:  # writers divide by factors that may be 0
            reasons.append(f"{name}: {error}")
            continue
        if same:
            return written
    raise ConfigError(
        f"no Hugging Face architecture among {', '.join(candidates)} can express this model; "
        "it combines features that none of them has together"
        + "".join(f" ({reason})" for reason in reasons[:1])
    )
