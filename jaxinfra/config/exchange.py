"""How tokens reach experts on other devices, where the mesh has an expert axis."""

import dataclasses
import enum

from jaxinfra.core.errors import ConfigError


class ExchangeForm(enum.StrEnum):
    """What travels from a token's device to its experts', and back."""

    PER_EXPERT = "per_expert"  # a copy for each chosen expert
    PER_DEVICE = "per_device"  # one copy to each device that has some of them; their sum comes back


class ExchangeImplementation(enum.StrEnum):
    """The collective that carries it."""

    AUTO = "auto"  # equal buffers
    EQUAL = "equal"  # all_to_all of equal buffers, filled up with nothing
    RAGGED = "ragged"  # ragged_all_to_all of what there is: CUDA alone has it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeConfig:
    """Form and room of the exchange.

    Buffers have a size, loads do not. ``room_factor`` times an even load is what a device sends to
    another, receives, and computes; what exceeds it is left out, counted and shown. None: room
    for whatever comes.
    """

    form: ExchangeForm = ExchangeForm.PER_DEVICE  # what travels: a token per device or per expert
    implementation: ExchangeImplementation = ExchangeImplementation.AUTO  # the collective
    room_factor: float | None = None  # rows of a buffer over their mean; None: room for all

    def __post_init__(self) -> None:
        if self.room_factor is not None and self.room_factor < 1.0:
            raise ConfigError(
                f"exchange room_factor={self.room_factor} must be at least 1: less is too little "
                "for even loads; none leaves room for any"
            )
