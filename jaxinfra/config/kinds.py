"""Kinds of norms, of blocks, of feed-forward layers and of output heads."""

import enum


class NormKind(enum.StrEnum):
    """Kinds of normalization."""

    RMS = "rms"  # Zhang and Sennrich 2019
    LAYER = "layer"  # Ba et al. 2016


class NormPlacement(enum.StrEnum):
    """Positions of the norms in a block, relative to its two layers."""

    PRE = "pre"  # x + f(norm(x)): GPT-2, Llama
    SANDWICH = "sandwich"  # x + norm(f(norm(x))): Gemma-2
    POST = "post"  # x + norm(f(x)): OLMo 2


class Branches(enum.StrEnum):
    """Inputs of a block's two layers, whose outputs are both added to the residual stream."""

    SEQUENTIAL = "sequential"  # the feed-forward layer reads the sum of x and the mixer's output
    PARALLEL = "parallel"  # both read x, each by a norm of its own: GPT-NeoX
    SHARED_NORM = "shared_norm"  # both read one norm's output: GPT-J, Cohere


class QkNormOver(enum.StrEnum):
    """Elements that a norm of queries and keys takes together, and the shape of its scale."""

    HEAD = "head"  # one head; all heads share a scale [head_dim]: Qwen3
    EACH_HEAD = "each_head"  # one head; a scale [heads, head_dim]: Cohere
    ALL_HEADS = "all_heads"  # all heads of a token; a scale [heads, head_dim]: OLMo 2


class Head(enum.StrEnum):
    """Outputs of a model after each token."""

    LOGITS = "logits"  # one of each next token
    SCORE = "score"  # one number, of the text so far: a reward model


class MlpKind(enum.StrEnum):
    """Activations of a feed-forward layer, gated ones first (Shazeer 2020)."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"  # GELU by its tanh approximation: Gemma
    SWIGLU_CLAMPED = "swiglu_clamped"  # (up + 1) gate sigmoid(1.702 gate), both clamped: gpt-oss
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # GPT-2
    RELU = "relu"  # OPT
    RELU_SQUARED = "relu_squared"  # relu(x)^2 (So et al. 2021): Nemotron
    XIELU = "xielu"  # with two learned numbers per layer (Huang and Schlag 2024): Apertus

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate projection beside the up projection."""
        return self in _GATED


_GATED = (MlpKind.SWIGLU, MlpKind.GEGLU, MlpKind.GEGLU_TANH, MlpKind.SWIGLU_CLAMPED)
