"""Configs of Gemma 4's text models, both ways."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxinfra.config.kinds import NormPlacement
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    Stack,
)
from jaxinfra.config.rope import RopeConfig
from jaxinfra.config.routing import RoutingConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.gemma import GEMMA3
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import read_ropes_by_type
from jaxinfra.hf.shared import (
    FULL,
    SLIDING,
    decoder_config,
    decoder_keys,
    in_runs,
    typed_windows,
    with_ropes_by_type,
)
from jaxinfra.hf.weights import Family, fused_experts, gated, norm, rule

_ROPES = {
    SLIDING: RopeConfig(theta=10_000.0),
    FULL: RopeConfig(theta=1_000_000.0, turning=0.25),
}


def read_gemma4(keys: Keys) -> ModelConfig:
    """Reads Gemma 4 text: heads of other widths in global layers, norms of values, scaled streams;
    in E2B and E4B inputs per layer, and last layers that attend to others' keys; experts beside
    dense layers.
    """
    keys.require("head_dim", "num_key_value_heads", "hidden_size_per_layer_input")
    # "vision": tokens of one image attend to each other, and those of text as ever.
    keys.expect(
        "use_bidirectional_attention", (None, False, "vision"), "attention to text is causal here"
    )
    num_layers = keys.integer("num_hidden_layers")
    types = _types(keys, num_layers)
    window = keys.integer("sliding_window")
    windows = typed_windows(types, window, num_layers=num_layers)
    kind_of_norm = NormConfig(epsilon=keys.number("rms_norm_eps"))
    max_positions = keys.integer("max_position_embeddings")
    ropes = read_ropes_by_type(keys, (SLIDING, FULL), max_positions=max_positions) or _ROPES
    shared, heads = keys.flag("attention_k_eq_v", False), _global_heads(keys, types)
    fields = {FULL: heads | {"values_are_keys": shared}, SLIDING: {}}
    input_dim = keys.integer("hidden_size_per_layer_input")
    rows = keys.integer("vocab_size_per_layer_input", 262_144)
    config = decoder_config(
        keys,
        activation_key="hidden_activation",
        layers=[
            {"window": window, "rope": ropes[kind], **fields[kind]}
            for window, kind in zip(windows, types, strict=True)
        ],
        rope=ropes[FULL],
        norm=kind_of_norm,
        qk_norm=kind_of_norm,
        value_norm=dataclasses.replace(kind_of_norm, scale=False),
        attention_bias=keys.flag("attention_bias", False),
        scale=1.0,
        tied_by_default=True,
        block={
            "norm_placement": NormPlacement.SANDWICH,
            "stream_scale": True,
            "layer_input_dim": input_dim,
        },
        model={
            "layer_input_rows": rows if input_dim else 0,
            "embedding_scale": keys.integer("hidden_size") ** 0.5,
            "logit_soft_cap": keys.number("final_logit_softcapping", None),
        },
    )
    num_shared = keys.integer("num_kv_shared_layers", 0)
    widen = 2 if keys.flag("use_double_wide_mlp", False) else 1
    config = sharing(config, types, num_shared, widen=widen) if num_shared else config
    if not keys.flag("enable_moe_block", False):
        keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return config
    return _beside_experts(config, keys, kind_of_norm)


def _beside_experts(config: ModelConfig, keys: Keys, kind_of_norm: NormConfig) -> ModelConfig:
    """Reads the experts beside each dense layer, which is a shared expert here."""

    def routed(block: BlockConfig) -> BlockConfig:
        dense = block.feed_forward
        assert isinstance(dense, MlpConfig), "decoder_config"
        experts = ExpertsConfig(
            num_experts=keys.integer("num_experts"),
            top_k=keys.integer("top_k_experts"),
            hidden_dim=keys.integer("moe_intermediate_size"),
            kind=dense.kind,
            routing=RoutingConfig(expert_scales=True),
            shared_hidden_dim=dense.hidden_dim,
            norms=kind_of_norm,
        )
        return dataclasses.replace(block, feed_forward=experts)

    return config.with_blocks(routed)


def sharing(
    config: ModelConfig, types: Sequence[str], num_shared: int, *, widen: int = 1
) -> ModelConfig:
    """Returns the model whose last layers attend to the keys and values of earlier ones.

    Each takes them from the last layer before of its type, which is named by the type.

    Args:
        num_shared: number of those layers.
        widen: factor of their hidden widths.
    """
    first = config.num_layers - num_shared
    own = list(types[: max(first, 0)])
    if missing := {*types} - {*own}:
        raise ConfigError(
            f"num_kv_shared_layers={num_shared} of {config.num_layers} layers: none before them is "
            f"of the type {', '.join(sorted(missing))}, whose keys they would share"
        )
    givers = {first - 1 - own[::-1].index(kind): kind for kind in {*types[first:]}}
    blocks = []
    for i, (block, kind) in enumerate(zip(config.layers, types, strict=True)):
        mixer, mlp = block.mixer, block.feed_forward
        assert isinstance(mixer, GroupedAttentionConfig), "decoder_config"
        assert isinstance(mlp, MlpConfig), "decoder_config"
        if i >= first:
            mixer = dataclasses.replace(mixer, takes_keys=kind)
            mlp = dataclasses.replace(mlp, hidden_dim=widen * mlp.hidden_dim)
        mixer = dataclasses.replace(mixer, gives_keys=givers.get(i))
        blocks.append(dataclasses.replace(block, mixer=mixer, feed_forward=mlp))
    begin = min(givers)
    givers_alone = Stack(pattern=tuple(blocks[begin:first]), repeats=1)
    stacks = (*in_runs(blocks[:begin]), givers_alone, *in_runs(blocks[first:]))
    return dataclasses.replace(config, stacks=stacks)


def takes_keys(block: BlockConfig) -> bool:
    """Whether a layer attends to another one's keys and values."""
    return isinstance(block.mixer, GroupedAttentionConfig) and block.mixer.takes_keys is not None


def _types(keys: Keys, num_layers: int) -> list[str]:
    default = [SLIDING if (i + 1) % 6 else FULL for i in range(num_layers)]
    types = list(keys.sequence("layer_types", default))
    return [*types[:-1], FULL]  # as the reference forces it


def _global_heads(keys: Keys, types: list[str]) -> dict[str, int]:
    """Reads the heads of global layers, by keys of their own or as each layer's settings."""
    each_layer = keys.mapping("per_layer_config")
    if each_layer is None:
        heads = {"head_dim": keys.integer("global_head_dim", 512)}
        key_heads = keys.integer("num_global_key_value_heads", None)
        is_used = key_heads is not None and keys.flag("attention_k_eq_v", False)
        return heads | ({"num_kv_heads": key_heads} if is_used else {})
    if not each_layer:
        return {}  # as in other layers
    wanted = {str(i) for i, kind in enumerate(types) if kind == FULL}
    first, *others = [dict(each_layer[name]) for name in sorted(each_layer)]
    if {*each_layer} != wanted or any(each != first for each in others):
        raise ConfigError(
            f"per_layer_config of layers {', '.join(sorted(each_layer))}: the settings of all "
            f"global layers alike, and of no others, are read here ({', '.join(sorted(wanted))})"
        )
    known = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if unknown := {*first} - {*known}:
        raise ConfigError(f"per_layer_config: {', '.join(sorted(unknown))} is not supported")
    return {known[name]: value for name, value in first.items()}


def write_gemma4(config: ModelConfig) -> dict[str, Any]:
    """Writes Gemma 4 text; inverse of ``read_gemma4``."""
    mixers = [block.mixer for block in config.layers]
    types = [FULL if each.window is None else SLIDING for each in mixers]
    whole = mixers[-1]
    local = next((each for each in mixers if each.window is not None), whole)
    if not isinstance(whole, GroupedAttentionConfig):
        raise ConfigError(f"{type(whole).__name__}: grouped attention is what this writes")
    takers = [each for each in config.layers if takes_keys(each)]
    first = config.layers[0]
    fed, experts = first.feed_forward, {}
    if isinstance(fed, ExpertsConfig):
        experts = {
            "num_experts": fed.num_experts,
            "top_k_experts": fed.top_k,
            "moe_intermediate_size": fed.hidden_dim,
        }
        fed = MlpConfig(hidden_dim=fed.shared_hidden_dim, kind=fed.kind)
    if not isinstance(fed, MlpConfig):
        raise ConfigError(f"{type(fed).__name__}: dense layers are what this writes")
    keys = with_ropes_by_type(decoder_keys(config, mlp=fed), config)
    return keys | {
        "hidden_activation": keys.pop("hidden_act"),
        "head_dim": local.head_dim,
        "num_key_value_heads": local.num_kv_heads,
        "per_layer_config": {
            str(i): {"head_dim": whole.head_dim, "num_key_value_heads": whole.num_kv_heads}
            for i, kind in enumerate(types)
            if kind == FULL
        },
        "layer_types": types,
        # The reference makes a mask of windows whether a layer has one or not.
        "sliding_window": local.window or config.max_positions,
        "attention_k_eq_v": whole.values_are_keys,
        "attention_bias": whole.out_bias,
        "final_logit_softcapping": config.logit_soft_cap,
        "enable_moe_block": bool(experts),
        **experts,
        "hidden_size_per_layer_input": first.layer_input_dim,
        "vocab_size_per_layer_input": config.layer_input_rows or config.vocab_size,
        "num_kv_shared_layers": len(takers),
        "use_double_wide_mlp": any(each.feed_forward != first.feed_forward for each in takers),
    }


TAKERS_HAVE = r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
LAYER_INPUT = (
    rule("per_layer_input_gate.weight", "layer_input/gate/weight", "F D -> D F"),
    rule("per_layer_projection.weight", "layer_input/out/weight", "D F -> F D"),
    *norm("post_per_layer_input_norm", "layer_input/norm"),
)
LAYER_INPUTS = (
    rule("model.embed_tokens_per_layer.weight", "layer_inputs/table/table", "V F -> V F"),
    rule("model.per_layer_model_projection.weight", "layer_inputs/projection/weight", "F D -> D F"),
    *norm("model.per_layer_projection_norm", "layer_inputs/norm", "F -> F"),
)
_EXPERTS = (
    *norm("pre_feedforward_layernorm", "mlp/shared_norm"),
    *norm("post_feedforward_layernorm_1", "mlp/shared_post_norm"),
    *norm("pre_feedforward_layernorm_2", "mlp/routed_norm"),
    *norm("post_feedforward_layernorm_2", "mlp/routed_post_norm"),
    *gated("mlp", "mlp/shared_"),
    rule("router.scale", "mlp/router_norm/scale", "D -> D"),
    rule("router.proj.weight", "mlp/router/weight", "E D -> D E"),
    rule("router.per_expert_scale", "mlp/expert_scale", "E -> E"),
    *fused_experts("experts"),
)
GEMMA4 = dataclasses.replace(
    GEMMA3,
    layer=(
        *(*GEMMA3.layer, rule("layer_scalar", "stream_scale", "R -> R")),
        *(*LAYER_INPUT, *_EXPERTS),
    ),
    outside=(*GEMMA3.outside, *LAYER_INPUTS),
    takers_have=TAKERS_HAVE,
)

FAMILIES = {
    "gemma4_text": Family("Gemma4ForCausalLM", read_gemma4, write_gemma4, GEMMA4),
}
