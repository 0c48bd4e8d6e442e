"""Several residual streams beside one another: alternating updates (AltUp), of Gemma 3n."""

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


@record
class StreamsConfig:
    """Streams of which each block's layers read and write one, and update the others from it.

    AltUp (Baykal et al. 2023), with a learned augmented residual (Laurel) beside the mixer.
    """

    num_streams: int = 4  # streams of the model's width
    active: int = 0  # number of the one that layers read
    residual_rank: int = 64  # rank of the learned residual beside the mixer
    scales_output: bool = True  # a learned scale between the layers and the layer's own input

    def __post_init__(self) -> None:
        if self.num_streams < 2 or not 0 <= self.active < self.num_streams:
            raise ConfigError(
                f"num_streams={self.num_streams} with active={self.active}: at least 2 streams, of "
                "which one is active"
            )
        if self.residual_rank < 1:
            raise ConfigError(f"residual_rank={self.residual_rank} must be at least 1")
