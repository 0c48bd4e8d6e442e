"""Names and layouts of the weights of each architecture: data, read by ``mapping.py``.

A rule names a tensor of theirs and the parameters of ours that lie in it, one or several fused
along a dim. A rule applies where the model has these parameters, so biases and norms that only
some models have need no conditions. Letters of layouts are explained in ``layout.py``.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One of their tensors, or one for each expert: "{}" stands for the expert's number."""

    name: str
    parts: tuple[tuple[str, str], ...]  # our path and layout, in the order they are fused
    fused_dim: int = 0  # of their tensor
    interleaved: bool = False  # along that dim elements of the parts take turns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightTable:
    """All tensors of an architecture."""

    layer_prefix: str  # "{}" stands for the layer's number
    layer: tuple[Rule, ...]
    outside: tuple[Rule, ...]
    root: str  # of all names, and missing in files of the bare model
    ignored: str | None = None  # a pattern of tensors that are no weights
    # Layers after the model's last may be there: multi-token prediction, which is left out.
    extra_layers: bool = False


def rule(name: str, path: str, layout: str) -> Rule:
    """A tensor that is one parameter of ours."""
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
}
"""Weight tables by ``model_type``."""
