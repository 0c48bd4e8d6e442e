"""Settings of the exchange that sends tokens to experts on other devices."""

import dataclasses
import enum

from jaxinfra.errors import ConfigError


class ExchangeForm(enum.StrEnum):
    """Forms of the exchange between a token's device and its experts' devices."""

    PER_EXPERT = "per_expert"  # a copy for each chosen expert
    PER_DEVICE = "per_device"  # one copy to each device that has some of them; their sum comes back


class ExchangeImplementation(enum.StrEnum):
    """The collective that carries the exchange."""

    AUTO = "auto"  # equal buffers
    EQUAL = "equal"  # all_to_all of equal buffers, filled up with nothing
    RAGGED = "ragged"  # ragged_all_to_all of what there is: CUDA alone has it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeConfig:
    """Form and buffer sizes of the exchange.

    Buffers hold ``room_factor`` times the load of evenly spread tokens; choices beyond it are
    dropped, counted and reported. With None, buffers hold any load.

    With ``node_size`` the exchange has two levels: a token is sent once to each node that has some
    of its experts, then within the node, by ``form``. A node sums its experts' outputs for a token
    before it returns them.
    """

    form: ExchangeForm = ExchangeForm.PER_DEVICE  # what travels: a token per device or per expert
    implementation: ExchangeImplementation = ExchangeImplementation.AUTO  # the collective
    room_factor: float | None = None  # rows of a buffer over their mean; None: room for all
    # Neighbours among the devices that share experts that are one node: with tensor=2, 4 of a node
    # of 8. None: one level. No level is made for one node, or for nodes of one device.
    node_size: int | None = None

    def __post_init__(self) -> None:
        if self.node_size is not None and self.node_size < 1:
            raise ConfigError(
                f"exchange node_size={self.node_size} must be at least 1, or none for one level"
            )
        if self.room_factor is not None and self.room_factor < 1.0:
            raise ConfigError(
                f"exchange room_factor={self.room_factor} must be at least 1: less is too little "
                "for even loads; none leaves room for any"
            )

    def num_nodes(self, expert: int) -> int:
        """Number of nodes that a token is sent to before it is sent within one; 1 means one level.

        Args:
            expert: number of devices that share a layer's experts.

        Raises:
            ConfigError: these devices do not make up whole nodes.
        """
        size = self.node_size
        if size is None or size == 1 or size >= expert:
            return 1
        if expert % size:
            raise ConfigError(
                f"expert={expert} is no multiple of exchange.node_size={size}: nodes have equally "
                "many of the devices that share experts; choose a node_size that divides it, or "
                "none for one level"
            )
        return expert // size
