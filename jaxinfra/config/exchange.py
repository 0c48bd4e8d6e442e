"""Settings of the exchange that sends tokens to experts on other devices."""

import enum

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


class ExchangeForm(enum.StrEnum):
    """Forms of the exchange between a token's device and its experts' devices."""

    PER_EXPERT = "per_expert"  # a copy for each chosen expert
    # One copy to each device that has some of the chosen experts; it returns the outputs' sum.
    PER_DEVICE = "per_device"


class ExchangeImplementation(enum.StrEnum):
    """The collective that carries the exchange."""

    AUTO = "auto"  # equal buffers
    EQUAL = "equal"  # all_to_all of equal, padded buffers
    RAGGED = "ragged"  # ragged_all_to_all without padding; on CUDA only


@record
class ExchangeConfig:
    """Form and buffer sizes of the exchange.

    Buffers hold ``room_factor`` times the load that a device has if tokens are spread evenly over
    devices. Tokens beyond it are dropped, counted and reported. With None, buffers hold any load.

    With ``node_size`` the exchange has two levels: a token is sent once to each node that has some
    of its experts, then within the node, by ``form``. A node sums its experts' outputs for a token
    before it returns them.
    """

    form: ExchangeForm = ExchangeForm.PER_DEVICE  # whether a token is sent per device or per expert
    implementation: ExchangeImplementation = ExchangeImplementation.AUTO  # the collective
    room_factor: float | None = None  # buffer size over its mean load; None: nothing is dropped
    # Number of consecutive devices along the expert axis that are in one node: 4 for a node of 8
    # GPUs with tensor=2. None, one node, or nodes of one device: the exchange has one level.
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
        """Returns the number of nodes that a layer's experts are spread over; 1 means that the
        exchange has one level.

        Args:
            expert: size of the expert axis.

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
