"""Translation of Hugging Face configs to ours and back, by a table of architectures."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class Family(NamedTuple):
    """One architecture: its name, the reader and writer of its configs, its weights."""

    architecture: str
    read: Callable[[Keys], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    weights: weights.WeightTable | Callable[[ModelConfig], weights.WeightTable]

    @property
    def classifier(self) -> str:
        """Architecture of the same layers with a score of each text."""
        stem = self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        return f"{stem}ForSequenceClassification"


FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama.read_llama, llama.write_llama, weights.LLAMA),
    "mistral": Family("MistralForCausalLM", llama.read_mistral, llama.write_mistral, weights.LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", llama.read_qwen2, llama.write_qwen2, weights.LLAMA),
    "mimo": Family("MiMoForCausalLM", llama.read_mimo, llama.write_mimo, llama.MIMO),
    "qwen3": Family("Qwen3ForCausalLM", llama.read_qwen3, llama.write_qwen3, weights.LLAMA),
    "gemma2": Family("Gemma2ForCausalLM", gemma.read_gemma2, gemma.write_gemma2, weights.GEMMA2),
    "phi3": Family("Phi3ForCausalLM", llama.read_phi3, llama.write_phi3, weights.PHI3),
    "gpt2": Family("GPT2LMHeadModel", gpt.read_gpt2, gpt.write_gpt2, weights.GPT2),
    "mixtral": Family(
        "MixtralForCausalLM", sparse.read_mixtral, sparse.write_mixtral, weights.MIXTRAL
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", sparse.read_qwen2_moe, sparse.write_qwen2_moe, weights.QWEN_MOE
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", sparse.read_qwen3_moe, sparse.write_qwen3_moe, weights.QWEN_MOE
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", sparse.read_gpt_oss, sparse.write_gpt_oss, weights.GPT_OSS
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        deepseek.read_deepseek_v2,
        deepseek.write_deepseek_v2,
        weights.DEEPSEEK,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        deepseek.read_deepseek_v3,
        deepseek.write_deepseek_v3,
        weights.DEEPSEEK,
    ),
    "kimi_k2": Family(
        "DeepseekV3ForCausalLM",
        deepseek.read_deepseek_v3,
        deepseek.write_deepseek_v3,
        weights.DEEPSEEK,
    ),
    "gemma": Family("GemmaForCausalLM", gemma.read_gemma, gemma.write_gemma, weights.LLAMA),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma.read_gemma3, gemma.write_gemma3, gemma.GEMMA3),
    "gemma3n_text": Family(
        "Gemma3nForCausalLM", gemma3n.read_gemma3n, gemma3n.write_gemma3n, gemma3n.gemma3n
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", gemma4.read_gemma4, gemma4.write_gemma4, gemma4.GEMMA4
    ),
    "olmo": Family("OlmoForCausalLM", olmo.read_olmo, olmo.write_olmo, weights.LLAMA),
    "olmo2": Family("Olmo2ForCausalLM", olmo.read_olmo2, olmo.write_olmo2, olmo.OLMO2),
    "olmo3": Family("Olmo3ForCausalLM", olmo.read_olmo3, olmo.write_olmo3, olmo.OLMO2),
    "olmoe": Family("OlmoeForCausalLM", olmo.read_olmoe, olmo.write_olmoe, olmo.OLMOE),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        llama_variants.read_smollm3,
        llama_variants.write_smollm3,
        weights.LLAMA,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        llama_variants.read_seed_oss,
        llama_variants.write_seed_oss,
        weights.LLAMA,
    ),
    "helium": Family(
        "HeliumForCausalLM", llama_variants.read_helium, llama_variants.write_helium, weights.LLAMA
    ),
    "arcee": Family(
        "ArceeForCausalLM", llama_variants.read_arcee, llama_variants.write_biased, weights.LLAMA
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        llama_variants.read_apertus,
        llama_variants.write_biased,
        llama_variants.APERTUS,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        llama_variants.read_exaone4,
        llama_variants.write_exaone4,
        llama_variants.EXAONE4,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM", llama_variants.read_ernie, llama_variants.write_ernie, weights.LLAMA
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        llama_variants.read_hunyuan,
        llama_variants.write_hunyuan,
        llama_variants.HUNYUAN,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        llama_variants.read_ministral,
        llama_variants.write_ministral,
        weights.LLAMA,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        llama_variants.read_ministral3,
        llama_variants.write_ministral3,
        weights.LLAMA,
    ),
    "cwm": Family(
        "CwmForCausalLM", llama_variants.read_cwm, llama_variants.write_cwm, weights.LLAMA
    ),
    "glm": Family("GlmForCausalLM", glm.read_glm, glm.write_glm, glm.GLM),
    "glm4": Family("Glm4ForCausalLM", glm.read_glm4, glm.write_glm, glm.GLM4),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", glm.read_glm4_moe, glm.write_glm4_moe, glm.SIGMOID_EXPERTS
    ),
    "granite": Family(
        "GraniteForCausalLM", granite.read_granite, granite.write_granite, weights.LLAMA
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        granite.read_granitemoe,
        granite.write_granitemoe,
        granite.GRANITE_MOE,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        granite.read_granitemoeshared,
        granite.write_granitemoeshared,
        granite.GRANITE_MOE,
    ),
    "cohere": Family("CohereForCausalLM", cohere.read_cohere, cohere.write_cohere, cohere.COHERE),
    "cohere2": Family(
        "Cohere2ForCausalLM", cohere.read_cohere2, cohere.write_cohere2, cohere.COHERE
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        layer_norm_models.read_starcoder2,
        layer_norm_models.write_starcoder2,
        layer_norm_models.STARCODER2,
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        layer_norm_models.read_stablelm,
        layer_norm_models.write_stablelm,
        layer_norm_models.STABLELM,
    ),
    "phi": Family(
        "PhiForCausalLM",
        layer_norm_models.read_phi,
        layer_norm_models.write_phi,
        layer_norm_models.PHI,
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        layer_norm_models.read_nemotron,
        layer_norm_models.write_nemotron,
        layer_norm_models.NEMOTRON,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        sparse_variants.read_dots1,
        sparse_variants.write_dots1,
        glm.SIGMOID_EXPERTS,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        sparse_variants.read_minimax_m2,
        sparse_variants.write_minimax_m2,
        sparse_variants.MINIMAX_M2,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        sparse_variants.read_ernie_moe,
        sparse_variants.write_ernie_moe,
        sparse_variants.ERNIE_MOE,
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        sparse_variants.read_hunyuan_moe,
        sparse_variants.write_hunyuan_moe,
        sparse_variants.HUNYUAN_MOE,
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        sparse_variants.read_phimoe,
        sparse_variants.write_phimoe,
        sparse_variants.PHIMOE,
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM", llama4.read_llama4, llama4.write_llama4, llama4.LLAMA4
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", gpt.read_gpt_neox, gpt.write_gpt_neox, gpt.GPT_NEOX),
    "gptj": Family("GPTJForCausalLM", gpt.read_gptj, gpt.write_gptj, gpt.GPTJ),
    "gpt_neo": Family("GPTNeoForCausalLM", gpt.read_gpt_neo, gpt.write_gpt_neo, gpt.GPT_NEO),
    "opt": Family("OPTForCausalLM", gpt.read_opt, gpt.write_opt, gpt.OPT),
    "bloom": Family("BloomForCausalLM", alibi.read_bloom, alibi.write_bloom, alibi.BLOOM),
    "mpt": Family("MptForCausalLM", alibi.read_mpt, alibi.write_mpt, alibi.MPT),
    "falcon": Family(
        "FalconForCausalLM", alibi.read_falcon, alibi.write_falcon, alibi.falcon_weights
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        qwen_next.read_qwen3_next,
        qwen_next.write_qwen3_next,
        qwen_next.qwen3_next_weights,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", qwen_next.read_qwen3_5, qwen_next.write_qwen3_5, qwen_next.QWEN3_5
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        qwen_next.read_qwen3_5_moe,
        qwen_next.write_qwen3_5_moe,
        qwen_next.QWEN3_5_MOE,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        granite.read_granitemoehybrid,
        granite.write_granitemoehybrid,
        granite.GRANITE_HYBRID,
    ),
    "bamba": Family("BambaForCausalLM", bamba.read_bamba, bamba.write_bamba, bamba.BAMBA),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        falcon_h1.read_falcon_h1,
        falcon_h1.write_falcon_h1,
        falcon_h1.FALCON_H1,
    ),
    "lfm2": Family("Lfm2ForCausalLM", lfm2.read_lfm2, lfm2.write_lfm2, lfm2.LFM2),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", lfm2.read_lfm2_moe, lfm2.write_lfm2_moe, lfm2.LFM2),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        kimi_linear.read_kimi_linear,
        kimi_linear.write_kimi_linear,
        kimi_linear.KIMI_LINEAR,
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        nemotron_h.read_nemotron_h,
        nemotron_h.write_nemotron_h,
        nemotron_h.NEMOTRON_H,
    ),
    "mamba2": Family("Mamba2ForCausalLM", mamba.read_mamba2, mamba.write_mamba2, mamba.MAMBA2),
    "mamba": Family(
        "MambaForCausalLM", selective.read_mamba, selective.write_mamba, selective.MAMBA
    ),
    "falcon_mamba": Family(
        "FalconMambaForCausalLM",
        selective.read_falcon_mamba,
        selective.write_falcon_mamba,
        selective.MAMBA,
    ),
    "jamba": Family(
        "JambaForCausalLM", selective.read_jamba, selective.write_jamba, selective.JAMBA
    ),
}
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
    is_scored = family.classifier in (architectures or ())
    if architectures and family.architecture not in architectures and not is_scored:
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
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"model_type={model_type!r} is not supported{nearest(str(model_type), FAMILIES)}"
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

    return dataclasses.replace(
        config,
        stacks=tuple(
            dataclasses.replace(stack, pattern=tuple(map(block, stack.pattern)))
            for stack in config.stacks
        ),
        mtp_weight=_MTP_WEIGHT,
    )


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
        except ConfigError as error:
            reasons.append(f"{name}: {error}")
            continue
        if same:
            return written
    raise ConfigError(
        f"no Hugging Face architecture among {', '.join(candidates)} can express this model; "
        "it combines features that none of them has together"
        + "".join(f" ({reason})" for reason in reasons[:1])
    )
