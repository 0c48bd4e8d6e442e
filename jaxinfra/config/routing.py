"""Routing of tokens to experts, and balancing of the experts' loads."""

import enum

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


class Scoring(enum.StrEnum):
    """Functions from a router's logits to the scores that weigh experts."""

    # Over all experts. Renormalized, it equals a softmax over the chosen ones: Mixtral, gpt-oss.
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # each expert by itself: DeepSeek-V3
    # Over the experts that are left and within ``tolerance`` of the best: SparseMixer, Phi-3.5-MoE.
    SPARSE_MIXER = "sparse_mixer"


class GroupScore(enum.StrEnum):
    """Scores of a group of experts, by which the best groups are chosen."""

    MAX = "max"  # of the group's scores: DeepSeek-V2 (arXiv 2405.04434, section 2.2.2)
    TOP2_SUM = "top2_sum"  # sum of the two highest: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)


@record
class RoutingConfig:
    """Routing from a router's logits to a token's experts and their weights, all in fp32."""

    scoring: Scoring = Scoring.SOFTMAX  # of the router's logits
    renormalize: bool = True  # the chosen experts' weights sum to ``scale``
    scale: float = 1.0  # multiplies the weights
    # Experts form num_groups equal groups; a token's experts are in its top_groups best groups.
    num_groups: int = 1
    top_groups: int = 1  # groups that a token chooses from
    group_score: GroupScore = GroupScore.MAX  # how a group is rated
    logit_bias: bool = False  # learned, of each expert: gpt-oss
    # A bias per expert, added to scores only to choose experts, not to weigh them. Each step moves
    # it by balance.bias_rate towards even loads (arXiv 2408.15664).
    correction_bias: bool = False
    tolerance: float = 0.02  # of sparse_mixer: relative distance to the best logit
    expert_scales: bool = False  # a learned number multiplies each expert's weight: Gemma 4
    scales_inputs: bool = False  # weights multiply an expert's input, not its output: Llama 4

    def __post_init__(self) -> None:
        if self.tolerance < 0.0:
            raise ConfigError(f"routing tolerance={self.tolerance} must not be negative")
        if self.scale <= 0.0:
            raise ConfigError(f"routing scale={self.scale} must be positive")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(
                f"top_groups={self.top_groups} must be between 1 and num_groups={self.num_groups}"
            )


@record
class BalanceConfig:
    """Settings that balance the experts' loads; loss weights multiply means over tokens."""

    # E sum_e f_e mean(p_e): f_e the fraction of tokens, p_e the score (arXiv 2101.03961, eq. 4).
    switch_loss: float = 0.0
    sequence_loss: float = 0.0  # the same within each sequence (arXiv 2412.19437, eq. 17 to 20)
    z_loss: float = 0.0  # logsumexp(logits)^2 (arXiv 2202.08906, eq. 5)
    bias_rate: float = 0.001  # by which a step moves each correction bias (arXiv 2408.15664)
    # Limit on an expert's tokens per sequence, over the mean per expert. Later tokens are dropped
    # for that expert, and counted. None: none are dropped.
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("switch_loss", "sequence_loss", "z_loss", "bias_rate"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"balance {name}={getattr(self, name)} must not be negative")
        if self.capacity_factor is not None and self.capacity_factor <= 0.0:
            raise ConfigError(
                f"capacity_factor={self.capacity_factor} must be positive, or none to drop nothing"
            )


def check_choice(routing: RoutingConfig, *, num_experts: int, top_k: int) -> None:
    """Raises ConfigError where ``top_k`` experts cannot be chosen from the config's groups."""
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"top_k={top_k} must be between 1 and num_experts={num_experts}")
    if routing.scales_inputs and top_k > 1:
        raise ConfigError(
            f"scales_inputs with top_k={top_k}: an input scaled for each of its experts is not "
            "implemented; such models have one expert per token"
        )
    if num_experts % routing.num_groups:
        raise ConfigError(
            f"num_experts={num_experts} is not a multiple of num_groups={routing.num_groups}; "
            "groups of experts are equal"
        )
    size = num_experts // routing.num_groups
    if top_k > size * routing.top_groups:
        raise ConfigError(
            f"top_k={top_k} exceeds the {size * routing.top_groups} experts of "
            f"top_groups={routing.top_groups} groups; choose among more groups"
        )
    if routing.num_groups > 1 and routing.group_score == GroupScore.TOP2_SUM and size < 2:
        raise ConfigError(
            "group_score=top2_sum adds the two best of a group, and groups of num_experts="
            f"{num_experts} / num_groups={routing.num_groups} have one; choose max"
        )
