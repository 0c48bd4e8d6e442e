"""How large an exchange's buffers are, and what is sent in them.

Of n tokens on each of N devices, which have E/N of E experts each, of which a token chooses K:

| level | rows that a device has to send | a row is | sent |
|---|---|---|---|
| one, per device | n N p(N) | a token, once per device | (N-1)/N |
| one, per expert | n K | a choice | (N-1)/N |
| two: across O nodes | n O p(O) | a token, once per node | (O-1)/O |
| two: within a node of I | n N p(N), or n K | as in one level | (I-1)/I |

p(P) is the probability that a token chooses some of one of P equal shares of the experts
(``visits``). Buffers have ``room_factor`` times these rows, or room for all: n per destination, and
K or E/N times that per expert. Where a token chooses from M of G groups, and nodes are groups, it
crosses to M nodes at most: n O p(O) <= n M.
"""

import math
from typing import NamedTuple

from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm
from jaxinfra.config.model import ExpertsConfig


class Level(NamedTuple):
    """Rows that a device of ``members`` sends to each of them, and what a row is."""

    members: int
    slots: int
    form: ExchangeForm


class Room(NamedTuple):
    """Rows of one device's buffers."""

    levels: tuple[Level, ...]  # the one across nodes first
    choices: int  # that a device's experts compute


def room_for(
    num_tokens: int, *, num_devices: int, experts: ExpertsConfig, exchange: ExchangeConfig
) -> Room:
    """Room for the tokens of one device, if all choices are equally likely.

    Raises:
        ConfigError: the devices are not whole nodes.
    """
    own, top_k = experts.num_experts // num_devices, experts.top_k
    num_nodes = exchange.num_nodes(num_devices)

    def bounded(mean: float, most: int) -> int:
        factor = exchange.room_factor
        return most if factor is None else min(math.ceil(factor * mean), most)

    levels, rows = [], num_tokens
    if num_nodes > 1:
        slots = bounded(num_tokens * visits(experts, num_nodes), num_tokens)
        levels.append(Level(num_nodes, slots, ExchangeForm.PER_DEVICE))
        rows = num_nodes * slots
    # A device sends on what as many devices as there are nodes sent to it.
    if exchange.form is ExchangeForm.PER_EXPERT:
        slots = bounded(num_nodes * num_tokens * top_k / num_devices, rows * min(top_k, own))
    else:
        slots = bounded(num_nodes * num_tokens * visits(experts, num_devices), rows)
    levels.append(Level(num_devices // num_nodes, slots, exchange.form))
    most = num_devices * num_tokens * min(top_k, own)
    return Room(levels=tuple(levels), choices=bounded(num_tokens * top_k, most))


def visits(experts: ExpertsConfig, shares: int) -> float:
    """Probability that a token chooses some of one of so many equal shares of the experts, if it
    chooses M of G groups and then K of their experts, each of them equally likely.

    A share that has s experts in each of g groups of S is passed over with probability
    sum_j C(g, j) C(G - g, M - j) / C(G, M)  C(M S - j s, K) / C(M S, K). Shares that neither
    divide a group nor are whole ones are taken as if there were no groups.
    """
    share, top_k = experts.num_experts // shares, experts.top_k
    num_groups, top_groups = experts.routing.num_groups, experts.routing.top_groups
    group = experts.num_experts // num_groups
    if share % group and group % share:
        num_groups, top_groups, group = 1, 1, experts.num_experts
    groups = max(share // group, 1)
    eligible = top_groups * group
    passed_over = sum(
        math.comb(groups, j)
        * math.comb(num_groups - groups, top_groups - j)
        * math.comb(eligible - j * min(share, group), top_k)
        for j in range(min(groups, top_groups) + 1)
    )
    return 1.0 - passed_over / (math.comb(num_groups, top_groups) * math.comb(eligible, top_k))


def exchanged_bytes(level: Level, *, model_dim: int, itemsize: int, top_k: int) -> dict[str, int]:
    """Bytes of the buffers that one device gives to a level's all-to-alls in a layer's forward
    pass: rows out and back, the experts they are for, and in the form per device these experts'
    weights. Of them it sends (members - 1) / members.
    """
    rows = level.slots * level.members
    per_expert = level.form is ExchangeForm.PER_EXPERT
    return {
        "rows": 2 * rows * model_dim * itemsize,
        "experts": rows * 4 * (1 if per_expert else top_k),
        "weights": 0 if per_expert else rows * 4 * top_k,
    }
