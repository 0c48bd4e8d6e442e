"""Kinds of norms and of feed-forward layers."""

import enum


class NormKind(enum.StrEnum):
    """Kinds of normalization."""

    RMS = "rms"  # Zhang and Sennrich 2019
    LAYER = "layer"  # Ba et al. 2016


class NormPlacement(enum.StrEnum):
    """Positions of the norms in a block, relative to its two layers."""

    PRE = "pre"  # x + f(norm(x)): GPT-2, Llama
    SANDWICH = "sandwich"  # x + norm(f(norm(x))): Gemma-2


class MlpKind(enum.StrEnum):
    """Activations of a feed-forward layer, gated ones first (Shazeer 2020)."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"  # GELU by its tanh approximation: Gemma
    SWIGLU_CLAMPED = "swiglu_clamped"  # (up + 1) gate sigmoid(1.702 gate), both clamped: gpt-oss
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # GPT-2

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate projection beside the up projection."""
        return self not in (MlpKind.GELU, MlpKind.GELU_TANH)
