"""A normalization layer of a model."""

from jaxinfra.config.kinds import NormKind
from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


@record
class NormConfig:
    """A normalization layer.

    Examples:
        >>> norm = jaxinfra.NormConfig(kind="layer", bias=True)  # GPT-2's
    """

    kind: NormKind = NormKind.RMS  # root mean square, or layer norm
    epsilon: float = 1e-5  # added to the mean square or variance
    bias: bool = False  # a learned bias beside the scale
    scale: bool = True  # a learned scale; OLMo 1 and the norm of Llama 4's heads have none
    scale_offset: float = 0.0  # Gemma multiplies by (1 + scale): 1.0
    function: str | None = None  # your own norm by name (jaxinfra.part): (x, epsilon) -> x

    def __post_init__(self) -> None:
        if self.epsilon <= 0.0:
            raise ConfigError(f"norm epsilon={self.epsilon} must be positive: zeros divide by it")
        if not self.scale and self.bias:
            raise ConfigError("a norm with bias and without scale: no layer here has one")
