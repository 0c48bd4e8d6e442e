"""Names and layouts of each architecture's weights: data, read by ``mapping.py``.

A rule names a Hugging Face tensor and the parameters of ours that it holds, one or several fused
along a dim. A rule applies where the model has these parameters, so biases and norms that only some
models have need no conditions. Letters of layouts are explained in ``tensor_layout.py``.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One Hugging Face tensor, or one per expert: "{}" stands for the expert's number."""

    name: str
    parts: tuple[tuple[str, str], ...]  # our path and layout, in the order they are fused
    fused_dim: int = 0  # of their tensor
    interleaved: bool = False  # elements of the parts alternate along that dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightTable:
    """All tensors of an architecture."""

    layer_prefix: str  # "{}" stands for the layer's number
    layer: tuple[Rule, ...]
    outside: tuple[Rule, ...]
    root: str  # prefix of all names; files of a model without its head lack it
    ignored: str | None = None  # pattern of tensors that are not weights
    # Files may have layers after the model's last: multi-token prediction, which is left out.
    extra_layers: bool = False


def rule(name: str, path: str, layout: str) -> Rule:
    """Makes the rule of a tensor that is one parameter of ours."""
    return Rule(name=name, parts=((path, layout),))


def _linear(theirs: str, ours: str, layout: str, bias: str) -> tuple[Rule, Rule]:
    return (
        rule(f"{theirs}.weight", f"{ours}/weight", layout),
        rule(f"{theirs}.bias", f"{ours}/bias", bias),
    )


def _norm(theirs: str, ours: str, letter: str = "D") -> tuple[Rule, Rule]:
    same = f"{letter} -> {letter}"
    return rule(f"{theirs}.weight", f"{ours}/scale", same), rule(
        f"{theirs}.bias", f"{ours}/bias", same
    )


_QKV = (
    *_linear("self_attn.q_proj", "attention/query", "(N H) D -> D N H", "(N H) -> N H"),
    *_linear("self_attn.k_proj", "attention/key", "(K H) D -> D K H", "(K H) -> K H"),
    *_linear("self_attn.v_proj", "attention/value", "(K H) D -> D K H", "(K H) -> K H"),
)
_OUT = _linear("self_attn.o_proj", "attention/out", "D (N H) -> N H D", "D -> D")
_QK_NORM = (
    *_norm("self_attn.q_norm", "attention/query_norm", "H"),
    *_norm("self_attn.k_norm", "attention/key_norm", "H"),
)
_GATE_UP = (
    *_linear("mlp.gate_proj", "mlp/gate", "F D -> D F", "F -> F"),
    *_linear("mlp.up_proj", "mlp/up", "F D -> D F", "F -> F"),
)
_DOWN = _linear("mlp.down_proj", "mlp/down", "D F -> F D", "D -> D")
_PRE_NORMS = (
    *_norm("input_layernorm", "attention_norm"),
    *_norm("post_attention_layernorm", "mlp_norm"),
)
_OUTSIDE = (
    rule("model.embed_tokens.weight", "embedding/table", "V D -> V D"),
    *_norm("model.norm", "final_norm"),
    rule("lm_head.weight", "unembedding/table", "V D -> V D"),
)

_LLAMA = WeightTable(
    layer_prefix="model.layers.{}.",
    layer=(*_PRE_NORMS, *_QKV, *_OUT, *_QK_NORM, *_GATE_UP, *_DOWN),
    outside=_OUTSIDE,
    root="model.",
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
_GEMMA2 = dataclasses.replace(
    _LLAMA,
    layer=(
        *_norm("input_layernorm", "attention_norm"),
        *_norm("post_attention_layernorm", "attention_post_norm"),
        *_norm("pre_feedforward_layernorm", "mlp_norm"),
        *_norm("post_feedforward_layernorm", "mlp_post_norm"),
        *(*_QKV, *_OUT, *_GATE_UP, *_DOWN),
    ),
)
_PHI3 = dataclasses.replace(
    _LLAMA,
    layer=(
        *_PRE_NORMS,
        Rule(
            name="self_attn.qkv_proj.weight",
            parts=(
                ("attention/query/weight", "(N H) D -> D N H"),
                ("attention/key/weight", "(K H) D -> D K H"),
                ("attention/value/weight", "(K H) D -> D K H"),
            ),
        ),
        *_OUT,
        Rule(
            name="mlp.gate_up_proj.weight",
            parts=(("mlp/gate/weight", "F D -> D F"), ("mlp/up/weight", "F D -> D F")),
        ),
        *_DOWN,
    ),
)


def _experts(
    layer: str, gate: str, up: str, down: str, *, shared: str | None = None
) -> tuple[Rule, ...]:
    """Router and experts with tensors of their own; a shared expert beside them."""
    own = (
        rule(f"{layer}.gate.weight", "mlp/router/weight", "E D -> D E"),
        rule(f"{layer}.gate.e_score_correction_bias", "mlp/router_correction", "E -> E"),
        rule(f"{layer}.experts.{{}}.{gate}.weight", "mlp/gate", "F D -> D F"),
        rule(f"{layer}.experts.{{}}.{up}.weight", "mlp/up", "F D -> D F"),
        rule(f"{layer}.experts.{{}}.{down}.weight", "mlp/down", "D F -> F D"),
    )
    if shared is None:
        return own
    return (
        *own,
        rule(f"{layer}.{shared}.gate_proj.weight", "mlp/shared_gate/weight", "F D -> D F"),
        rule(f"{layer}.{shared}.up_proj.weight", "mlp/shared_up/weight", "F D -> D F"),
        rule(f"{layer}.{shared}.down_proj.weight", "mlp/shared_down/weight", "D F -> F D"),
        rule(f"{layer}.{shared}_gate.weight", "mlp/shared_scale/weight", "E D -> D E"),
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = dataclasses.replace(
    _LLAMA, layer=(*_PRE_NORMS, *_QKV, *_OUT, *_experts("block_sparse_moe", "w1", "w3", "w2"))
)
_QWEN_MOE = dataclasses.replace(
    _LLAMA, layer=(*_LLAMA.layer, *_experts("mlp", *_PROJECTIONS, shared="shared_expert"))
)
_LATENT = (
    *_linear("self_attn.q_proj", "attention/query", "(N H) D -> D N H", "(N H) -> N H"),
    *_linear("self_attn.q_a_proj", "attention/query_down", "R D -> D R", "R -> R"),
    *_norm("self_attn.q_a_layernorm", "attention/query_norm", "R"),
    *_linear("self_attn.q_b_proj", "attention/query_up", "(N H) R -> R N H", "(N H) -> N H"),
    *_linear("self_attn.kv_a_proj_with_mqa", "attention/kv_down", "R D -> D R", "R -> R"),
    *_norm("self_attn.kv_a_layernorm", "attention/kv_norm", "R"),
    *_linear("self_attn.kv_b_proj", "attention/kv_up", "(N H) R -> R N H", "(N H) -> N H"),
)
_DEEPSEEK = dataclasses.replace(
    _LLAMA,
    layer=(
        *(*_PRE_NORMS, *_LATENT, *_OUT, *_GATE_UP, *_DOWN),
        *_experts("mlp", *_PROJECTIONS, shared="shared_experts"),
    ),
    extra_layers=True,
)
_GPT_OSS = dataclasses.replace(
    _LLAMA,
    layer=(
        *(*_PRE_NORMS, *_QKV, *_OUT),
        rule("self_attn.sinks", "attention/sinks", "N -> N"),
        *_linear("mlp.router", "mlp/router", "E D -> D E", "E -> E"),
        Rule(
            name="mlp.experts.gate_up_proj",
            parts=(("mlp/gate", "E D F -> E D F"), ("mlp/up", "E D F -> E D F")),
            fused_dim=2,
            interleaved=True,
        ),
        Rule(
            name="mlp.experts.gate_up_proj_bias",
            parts=(("mlp/gate_bias", "E F -> E F"), ("mlp/up_bias", "E F -> E F")),
            fused_dim=1,
            interleaved=True,
        ),
        rule("mlp.experts.down_proj", "mlp/down", "E F D -> E F D"),
        rule("mlp.experts.down_proj_bias", "mlp/down_bias", "E D -> E D"),
    ),
)
_GPT2 = WeightTable(
    layer_prefix="transformer.h.{}.",
    layer=(
        *_norm("ln_1", "attention_norm"),
        # Its matrices have the input first, as ours do.
        Rule(
            name="attn.c_attn.weight",
            parts=(
                ("attention/query/weight", "D (N H) -> D N H"),
                ("attention/key/weight", "D (K H) -> D K H"),
                ("attention/value/weight", "D (K H) -> D K H"),
            ),
            fused_dim=1,
        ),
        Rule(
            name="attn.c_attn.bias",
            parts=(
                ("attention/query/bias", "(N H) -> N H"),
                ("attention/key/bias", "(K H) -> K H"),
                ("attention/value/bias", "(K H) -> K H"),
            ),
        ),
        *_linear("attn.c_proj", "attention/out", "(N H) D -> N H D", "D -> D"),
        *_norm("ln_2", "mlp_norm"),
        *_linear("mlp.c_fc", "mlp/up", "D F -> D F", "F -> F"),
        *_linear("mlp.c_proj", "mlp/down", "F D -> F D", "D -> D"),
    ),
    outside=(
        rule("transformer.wte.weight", "embedding/table", "V D -> V D"),
        rule("transformer.wpe.weight", "positions/table", "P D -> P D"),
        *_norm("transformer.ln_f", "final_norm"),
        rule("lm_head.weight", "unembedding/table", "V D -> V D"),
    ),
    root="transformer.",
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",  # causal masks
)

WEIGHTS: dict[str, WeightTable] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA2,
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "gpt_oss": _GPT_OSS,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
"""Weight tables by ``model_type``."""
