"""Names and layouts of each architecture's weights: data, read by ``mapping.py``.

A rule names a Hugging Face tensor and the parameters of ours that it holds, one or several fused
along a dim. A rule applies where the model has these parameters, so biases and norms that only some
models have need no conditions. Letters of layouts are explained in ``tensor_layout.py``.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxinfra.config.model import ModelConfig
from jaxinfra.hf.keys import Keys


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One Hugging Face tensor, or one per expert: "{}" stands for the expert's number."""

    name: str
    parts: tuple[tuple[str, str], ...]  # our path and layout, in the order they are fused
    fused_dim: int = 0  # of their tensor
    # Number of groups that their dim is cut into, or a dim of the parts that has this size; each
    # group has rows of every part.
    groups: str | int | None = None
    beside: str | None = None  # another parameter that a layer with this tensor has
    without: str | None = None  # a parameter that a layer with this tensor does not have


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PredictionTable:
    """Tensors of a multi-token prediction module; those of its block are as a layer's."""

    prefix: str  # of all of them; "{}" stands for the number of the model's layers
    outside: tuple[Rule, ...]
    block: str = ""  # what tensors of the block have between the prefix and their names
    # Copies of the model's tensors, which files may have: their names, and the model's.
    copies: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightTable:
    """All tensors of an architecture."""

    layer_prefix: str  # "{}" stands for the layer's number
    layer: tuple[Rule, ...]
    outside: tuple[Rule, ...]
    root: str  # prefix of all names; files of a model without its head lack it
    ignored: str | None = None  # pattern of tensors that are not weights
    # Pattern, behind the layer's prefix, of tensors that layers with others' keys do not read.
    takers_have: str | None = None
    # Files may have layers after the model's last: further modules of multi-token prediction, or
    # all of them, which are left out.
    extra_layers: bool = False
    prediction: PredictionTable | None = None  # None: such a module is left out
    # Tables of other files of the same models: of their makers, or of other releases of the
    # reference implementation. They are read; the table itself is what is written.
    others: tuple["WeightTable", ...] = ()


class Family(NamedTuple):
    """One architecture: its name, the reader and writer of its configs, its weights."""

    architecture: str
    read: Callable[[Keys], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    weights: WeightTable | Callable[[ModelConfig], WeightTable]
    saved_as: str | None = None  # the architecture that the reference implementation writes for it

    @property
    def classifier(self) -> str:
        """Architecture of the same layers with a score of each text."""
        stem = self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        return f"{stem}ForSequenceClassification"


def rule(name: str, path: str, layout: str) -> Rule:
    """Makes the rule of a tensor that is one parameter of ours."""
    return Rule(name=name, parts=((path, layout),))


def beside(path: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns rules that apply only to layers with this parameter."""
    return tuple(dataclasses.replace(each, beside=path) for each in rules)


def without(path: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns rules that apply only to layers without this parameter."""
    return tuple(dataclasses.replace(each, without=path) for each in rules)


def linear(theirs: str, ours: str, layout: str, bias: str) -> tuple[Rule, Rule]:
    """Makes the rules of a projection's weight and bias."""
    return (
        rule(f"{theirs}.weight", f"{ours}/weight", layout),
        rule(f"{theirs}.bias", f"{ours}/bias", bias),
    )


def norm(theirs: str, ours: str, layout: str = "D -> D") -> tuple[Rule, Rule]:
    """Makes the rules of a norm's scale and bias."""
    return (
        rule(f"{theirs}.weight", f"{ours}/scale", layout),
        rule(f"{theirs}.bias", f"{ours}/bias", layout),
    )


def inward(theirs: str) -> tuple[Rule, ...]:
    """Makes the rules of the projections to queries, keys and values."""
    return (
        *linear(f"{theirs}.q_proj", "attention/query", "(N H) D -> D N H", "(N H) -> N H"),
        *linear(f"{theirs}.k_proj", "attention/key", "(K H) D -> D K H", "(K H) -> K H"),
        *linear(f"{theirs}.v_proj", "attention/value", "(K H) D -> D K H", "(K H) -> K H"),
    )


def outward(theirs: str) -> tuple[Rule, ...]:
    """Makes the rules of attention's output projection."""
    return linear(theirs, "attention/out", "D (N H) -> N H D", "D -> D")


def fused_qkv(theirs: str) -> Rule:
    """Makes the rule of one weight of queries, keys and values, one after another."""
    return Rule(
        name=theirs,
        parts=(
            ("attention/query/weight", "(N H) D -> D N H"),
            ("attention/key/weight", "(K H) D -> D K H"),
            ("attention/value/weight", "(K H) D -> D K H"),
        ),
    )


def head_norms(query: str, key: str, *, over_all: bool = False) -> tuple[Rule, ...]:
    """Makes the rules of norms of queries and keys, by head or over all heads."""
    return (
        *norm(query, "attention/query_norm", "(N H) -> N H" if over_all else "H -> H"),
        *norm(key, "attention/key_norm", "(K H) -> K H" if over_all else "H -> H"),
    )


def ungated(up: str, down: str) -> tuple[Rule, ...]:
    """Makes the rules of a feed-forward layer without a gate."""
    return (
        *linear(up, "mlp/up", "F D -> D F", "F -> F"),
        *linear(down, "mlp/down", "D F -> F D", "D -> D"),
    )


def gated(theirs: str, ours: str = "mlp/") -> tuple[Rule, ...]:
    """Makes the rules of a feed-forward layer with a gate."""
    return (
        *linear(f"{theirs}.gate_proj", f"{ours}gate", "F D -> D F", "F -> F"),
        *linear(f"{theirs}.up_proj", f"{ours}up", "F D -> D F", "F -> F"),
        *linear(f"{theirs}.down_proj", f"{ours}down", "D F -> F D", "D -> D"),
    )


def fused_experts(theirs: str) -> tuple[Rule, ...]:
    """Makes the rules of all experts of a layer, stored as one tensor of gates and ups."""
    return (
        Rule(
            name=f"{theirs}.gate_up_proj",
            parts=(("mlp/gate", "E F D -> E D F"), ("mlp/up", "E F D -> E D F")),
            fused_dim=1,
        ),
        rule(f"{theirs}.down_proj", "mlp/down", "E D F -> E F D"),
    )


def outside(
    embedding: str, final_norm: str, head: str = "lm_head", *, positions: str | None = None
) -> tuple[Rule, ...]:
    """Makes the rules of the tables of tokens and positions, the last norm and the output head."""
    learned = () if positions is None else (rule(positions, "positions/table", "P D -> P D"),)
    return (
        rule(embedding, "embedding/table", "V D -> V D"),
        *learned,
        *norm(final_norm, "final_norm"),
        rule(f"{head}.weight", "unembedding/table", "V D -> V D"),
    )


QKV, OUT = inward("self_attn"), outward("self_attn.o_proj")
QK_NORM = head_norms("self_attn.q_norm", "self_attn.k_norm")
MLP = gated("mlp")
DOWN = MLP[-2:]
FUSED_GATE_UP = Rule(
    name="mlp.gate_up_proj.weight",
    parts=(("mlp/gate/weight", "F D -> D F"), ("mlp/up/weight", "F D -> D F")),
)
PRE_NORMS = (
    *norm("input_layernorm", "attention_norm"),
    *norm("post_attention_layernorm", "mlp_norm"),
)
OUTSIDE = outside("model.embed_tokens.weight", "model.norm")

ATTENDS = without("attention/value_conv/weight", (*QKV, *OUT))
"""Grouped attention in models some of whose layers have a state."""

LLAMA = WeightTable(
    layer_prefix="model.layers.{}.",
    layer=(*PRE_NORMS, *QKV, *OUT, *QK_NORM, *MLP),
    outside=OUTSIDE,
    root="model.",
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
GEMMA2 = dataclasses.replace(
    LLAMA,
    layer=(
        *norm("input_layernorm", "attention_norm"),
        *norm("post_attention_layernorm", "attention_post_norm"),
        *norm("pre_feedforward_layernorm", "mlp_norm"),
        *norm("post_feedforward_layernorm", "mlp_post_norm"),
        *(*QKV, *OUT, *MLP),
    ),
)
PHI3 = dataclasses.replace(
    LLAMA,
    layer=(
        *PRE_NORMS,
        fused_qkv("self_attn.qkv_proj.weight"),
        *OUT,
        FUSED_GATE_UP,
        *DOWN,
    ),
)


def experts(
    layer: str,
    gate: str,
    up: str,
    down: str,
    *,
    shared: str | None = None,
    router: str = "gate.weight",
    correction: str = "gate.e_score_correction_bias",
    correction_layout: str = "E -> E",
) -> tuple[Rule, ...]:
    """Router and experts with tensors of their own; a shared expert beside them."""
    own = (
        rule(f"{layer}.{router}", "mlp/router/weight", "E D -> D E"),
        rule(f"{layer}.{correction}", "mlp/router_correction", correction_layout),
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


def joined_inputs(name: str, *ours: str) -> Rule:
    """Makes the rule of a projection of several inputs side by side, each with a weight of ours."""
    parts = tuple((f"{each}/weight", "F D -> D F") for each in ours)
    return Rule(name=name, parts=parts, fused_dim=1)


NEXT_LAYER = PredictionTable(
    prefix="model.layers.{}.",
    outside=(
        *norm("enorm", "embedding_norm"),
        *norm("hnorm", "hidden_norm"),
        joined_inputs("eh_proj.weight", "embedding_projection", "hidden_projection"),
        *norm("shared_head.norm", "final_norm"),
    ),
    copies=(
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ),
)
"""Multi-token prediction as the layer after the last: DeepSeek-V3, GLM 4.5."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = dataclasses.replace(
    LLAMA, layer=(*PRE_NORMS, *QKV, *OUT, *experts("block_sparse_moe", "w1", "w3", "w2"))
)
_QWEN_MOE = dataclasses.replace(
    LLAMA, layer=(*LLAMA.layer, *experts("mlp", *PROJECTIONS, shared="shared_expert"))
)
QWEN_MOE = dataclasses.replace(
    _QWEN_MOE,
    others=(
        dataclasses.replace(
            _QWEN_MOE,
            layer=(
                *(each for each in _QWEN_MOE.layer if ".experts." not in each.name),
                Rule(
                    name="mlp.experts.gate_up_proj",
                    parts=(("mlp/gate", "E D F -> E D F"), ("mlp/up", "E D F -> E D F")),
                    fused_dim=2,
                ),
                rule("mlp.experts.down_proj", "mlp/down", "E F D -> E F D"),
            ),
        ),
    ),
)
"""Qwen's experts; files of Qwen3-VL have all experts of a layer in one, inputs first."""
LATENT = (
    *linear("self_attn.q_proj", "attention/query", "(N H) D -> D N H", "(N H) -> N H"),
    *linear("self_attn.q_a_proj", "attention/query_down", "R D -> D R", "R -> R"),
    *norm("self_attn.q_a_layernorm", "attention/query_norm", "R -> R"),
    *linear("self_attn.q_b_proj", "attention/query_up", "(N H) R -> R N H", "(N H) -> N H"),
    *linear("self_attn.kv_a_proj_with_mqa", "attention/kv_down", "R D -> D R", "R -> R"),
    *norm("self_attn.kv_a_layernorm", "attention/kv_norm", "R -> R"),
    *linear("self_attn.kv_b_proj", "attention/kv_up", "(N H) R -> R N H", "(N H) -> N H"),
    rule("self_attn.indexer.wq_b.weight", "attention/indexer/query/weight", "(I J) R -> R I J"),
    rule("self_attn.indexer.wk.weight", "attention/indexer/key/weight", "J D -> D J"),
    *norm("self_attn.indexer.k_norm", "attention/indexer/key_norm", "J -> J"),
    rule(
        "self_attn.indexer.weights_proj.weight",
        "attention/indexer/head_weight/weight",
        "I D -> D I",
    ),
)
"""Latent attention and its indexer, but its output projection."""
DEEPSEEK = dataclasses.replace(
    LLAMA,
    layer=(
        *(*PRE_NORMS, *LATENT, *OUT, *MLP),
        *experts("mlp", *PROJECTIONS, shared="shared_experts"),
    ),
    extra_layers=True,
    prediction=NEXT_LAYER,
)
GPT_OSS = dataclasses.replace(
    LLAMA,
    layer=(
        *(*PRE_NORMS, *QKV, *OUT),
        rule("self_attn.sinks", "attention/sinks", "N -> N"),
        *linear("mlp.router", "mlp/router", "E D -> D E", "E -> E"),
        Rule(
            name="mlp.experts.gate_up_proj",
            parts=(("mlp/gate", "E D F -> E D F"), ("mlp/up", "E D F -> E D F")),
            fused_dim=2,
            groups="F",
        ),
        Rule(
            name="mlp.experts.gate_up_proj_bias",
            parts=(("mlp/gate_bias", "E F -> E F"), ("mlp/up_bias", "E F -> E F")),
            fused_dim=1,
            groups="F",
        ),
        rule("mlp.experts.down_proj", "mlp/down", "E F D -> E F D"),
        rule("mlp.experts.down_proj_bias", "mlp/down_bias", "E D -> E D"),
    ),
)
GPT2 = WeightTable(
    layer_prefix="transformer.h.{}.",
    layer=(
        *norm("ln_1", "attention_norm"),
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
        *linear("attn.c_proj", "attention/out", "(N H) D -> N H D", "D -> D"),
        *norm("ln_2", "mlp_norm"),
        *linear("mlp.c_fc", "mlp/up", "D F -> D F", "F -> F"),
        *linear("mlp.c_proj", "mlp/down", "F D -> F D", "D -> D"),
    ),
    outside=outside(
        *("transformer.wte.weight", "transformer.ln_f"), positions="transformer.wpe.weight"
    ),
    root="transformer.",
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",  # causal masks
)
