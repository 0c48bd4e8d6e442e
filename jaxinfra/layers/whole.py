"""What a block must be for a decode step to compute it in one launch."""

from jaxinfra.config.kinds import MlpKind, NormKind, NormPlacement
from jaxinfra.config.model import BlockConfig, GroupedAttentionConfig, MlpConfig
from jaxinfra.config.rope import RopePairs
from jaxinfra.core.errors import UnsupportedError


def check_whole(config: BlockConfig) -> None:
    """Raises UnsupportedError for a block that cannot be one launch."""
    mixer, fed, norm = config.mixer, config.feed_forward, config.norm
    wrong = None
    if not isinstance(mixer, GroupedAttentionConfig) or not isinstance(fed, MlpConfig):
        wrong = f"{type(mixer).__name__} and {type(fed).__name__}"
    elif mixer.rope is None or mixer.rope.pairs is not RopePairs.HALVES:
        wrong = f"rope={mixer.rope}"
    elif mixer.window or mixer.logit_soft_cap or mixer.sinks or mixer.function:
        wrong = "attention with a window, a soft cap, sinks or a function of its own"
    elif mixer.qk_norm or mixer.qkv_bias or mixer.out_bias:
        wrong = "attention with norms of heads, or biases"
    elif fed.kind is not MlpKind.SWIGLU or fed.bias:
        wrong = f"{fed}"
    elif norm.kind is not NormKind.RMS or norm.bias or norm.function:
        wrong = f"{norm}"
    elif config.norm_placement is not NormPlacement.PRE:
        wrong = f"norm_placement={config.norm_placement}"
    if wrong is not None:
        raise UnsupportedError(
            f"whole layers with {wrong}: the kernel takes grouped attention to all earlier tokens, "
            "rotary in halves, SwiGLU, RMS norms before both, and no biases; leave "
            "whole_layers=False"
        )
