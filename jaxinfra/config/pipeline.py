"""Settings of pipeline parallelism: the schedule and its chunks."""

import enum

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


class PipelineSchedule(enum.StrEnum):
    """Orders of micro-batches over stages; ``jaxinfra.parallel.pipeline`` generates each."""

    GPIPE = "gpipe"  # all forwards, then all backwards (Huang et al. 2019)
    ONE_F_ONE_B = "1f1b"  # one forward, one backward (Narayanan et al. 2019)
    INTERLEAVED = (
        "interleaved"  # 1F1B with several chunks of layers per stage (Narayanan et al. 2021)
    )
    ZB_H1 = "zb_h1"  # weight gradients fill 1F1B's bubble (Qi et al. 2024)
    ZB_V = "zb_v"  # the same with two chunks per stage, laid out as a V (Qi et al. 2024)


@record
class PipelineConfig:
    """Settings of a mesh with a pipe axis. The number of micro-batches is
    ``training.accumulation``.
    """

    # The order of forward and backward passes.
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    chunks: int = 2  # chunks of layers per stage, in the interleaved schedule

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise ConfigError(
                f"pipeline chunks={self.chunks} must be at least 2; one chunk a stage is "
                "schedule=1f1b"
            )

    @property
    def chunks_per_stage(self) -> int:
        """Number of separate groups of consecutive layers per stage."""
        match self.schedule:
            case PipelineSchedule.INTERLEAVED:
                return self.chunks
            case PipelineSchedule.ZB_V:
                return 2
            case _:
                return 1

    @property
    def backward_ticks(self) -> int:
        """Duration of a backward pass that the schedule assumes, in forward passes.

        A backward pass that computes both gradients takes two forward passes. Only the interleaved
        order depends on this ratio: 1F1B and GPipe have one bubble for any ratio.
        """
        return 2 if self.schedule is PipelineSchedule.INTERLEAVED else 1
