"""Settings of reinforcement learning: prompts, reward, algorithm and rollouts."""

import dataclasses
import enum
import math
import re

from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError, nearest


class Algorithm(enum.StrEnum):
    """Policy-gradient algorithms; each is a choice of advantages, ratio, clip range and mean.

    Examples:
        >>> [str(each) for each in jaxinfra.Algorithm]
        ['grpo', 'dr_grpo', 'dapo', 'gspo', 'rloo', 'reinforce++', 'ppo', 'distill']
    """

    GRPO = "grpo"  # Shao et al. 2024 (DeepSeekMath), section 4.1
    DR_GRPO = "dr_grpo"  # Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2
    DAPO = "dapo"  # Yu et al. 2025, equations 8 to 13, without its sampling of further prompts
    GSPO = "gspo"  # Zheng et al. 2025, equations 5 to 7
    RLOO = "rloo"  # Ahmadian et al. 2024, equation 8
    REINFORCE_PLUS_PLUS = "reinforce++"  # Hu 2025; global normalization of rewards
    PPO = "ppo"  # Schulman et al. 2017, with a linear value head
    # Gu et al. 2024 (the one-step part), Lu and Thinking Machines Lab 2025: on-policy distillation
    # by the reverse KL divergence to a teacher at each sampled token.
    DISTILL = "distill"


class Baseline(enum.StrEnum):
    """Rules that turn the rewards of groups into advantages."""

    GROUP_STANDARD = "group_standard"  # (r - mean of the group) / standard deviation of the group
    GROUP_MEAN = "group_mean"  # r - mean of the group
    LEAVE_ONE_OUT = "leave_one_out"  # r - mean of the group's others
    BATCH_STANDARD = "batch_standard"  # (r - mean of all) / standard deviation of all
    VALUE = "value"  # generalized advantage estimates of each token, standardized over all
    TEACHER = "teacher"  # log(teacher / policy) of each token


class Ratio(enum.StrEnum):
    """Units whose probability ratio between new and old policy is clipped."""

    TOKEN = "token"
    SEQUENCE = "sequence"  # geometric mean of a completion's token ratios


class Mean(enum.StrEnum):
    """Weights of tokens in the loss of a batch of completions."""

    SEQUENCE = "sequence"  # mean over completions of the mean over their tokens
    TOKEN = "token"  # mean over all tokens
    CONSTANT = "constant"  # sum over tokens / (completions x max_new_tokens x max_turns)
    SUM = "sum"  # mean over completions of the sum over their tokens


class Overlong(enum.StrEnum):
    """Ways to treat completions that ``max_new_tokens`` ended."""

    KEEP = "keep"  # their reward counts as it is
    MASK = "mask"  # their tokens do not count in the loss; their reward counts in the group
    PENALTY = "penalty"  # DAPO, equation 13: -1 at the limit, linear over the last overlong_tokens


class EngineDevices(enum.StrEnum):
    """Devices that completions are sampled on."""

    SHARED = "shared"  # those of training: both take turns
    OWN = "own"  # those that follow the mesh of training


class ZeroVariance(enum.StrEnum):
    """Ways to treat groups whose completions all have the same reward."""

    KEEP = "keep"  # their tokens count, with an advantage of 0 where the baseline is the group's
    DROP = "drop"  # their tokens do not count in the loss, nor in its mean


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    baseline: Baseline
    ratio: Ratio
    mean: Mean
    clip: tuple[float, float]


_RECIPES = {
    Algorithm.GRPO: _Recipe(
        baseline=Baseline.GROUP_STANDARD, ratio=Ratio.TOKEN, mean=Mean.SEQUENCE, clip=(0.2, 0.2)
    ),
    Algorithm.DR_GRPO: _Recipe(
        baseline=Baseline.GROUP_MEAN, ratio=Ratio.TOKEN, mean=Mean.CONSTANT, clip=(0.2, 0.2)
    ),
    Algorithm.DAPO: _Recipe(
        baseline=Baseline.GROUP_STANDARD, ratio=Ratio.TOKEN, mean=Mean.TOKEN, clip=(0.2, 0.28)
    ),
    Algorithm.GSPO: _Recipe(
        baseline=Baseline.GROUP_STANDARD,
        ratio=Ratio.SEQUENCE,
        mean=Mean.SEQUENCE,
        clip=(3e-4, 4e-4),
    ),
    Algorithm.RLOO: _Recipe(
        baseline=Baseline.LEAVE_ONE_OUT, ratio=Ratio.TOKEN, mean=Mean.SUM, clip=(0.2, 0.2)
    ),
    Algorithm.REINFORCE_PLUS_PLUS: _Recipe(
        baseline=Baseline.BATCH_STANDARD, ratio=Ratio.TOKEN, mean=Mean.TOKEN, clip=(0.2, 0.2)
    ),
    Algorithm.PPO: _Recipe(
        baseline=Baseline.VALUE, ratio=Ratio.TOKEN, mean=Mean.TOKEN, clip=(0.2, 0.2)
    ),
    Algorithm.DISTILL: _Recipe(
        baseline=Baseline.TEACHER, ratio=Ratio.TOKEN, mean=Mean.TOKEN, clip=(0.2, 0.2)
    ),
}


@record
class JudgeConfig:
    """A model behind an OpenAI-compatible URL that scores completions, for ``reward="judge"``.

    Raises:
        ConfigError: the URL is none, or the question names an unknown field.

    Examples:
        >>> judge = jaxinfra.JudgeConfig(url="http://localhost:8000/v1", model="mine")
        >>> judge.asked(prompt="2+2=", completion="4", answer="4").splitlines()[0]
        'Question: 2+2='
    """

    url: str  # such as http://localhost:8000/v1; /chat/completions is added
    model: str  # name of the model there
    # What the judge is asked; {prompt}, {completion} and {answer} (of the row) are replaced.
    question: str = (
        "Question: {prompt}\nReference: {answer}\nAnswer: {completion}\n\n"
        "How good is the answer, from 0 to 1? End with a line such as SCORE: 0.5"
    )
    score_pattern: str = r"SCORE: *(-?[0-9.]+)"  # regular expression; its last match is the reward
    max_new_tokens: int = 1024  # most tokens that the judge writes
    api_key_env: str | None = None  # environment variable with the key, if one is needed

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"rl.judge.url={self.url!r} must begin with http:// or https://")
        try:
            self.asked(prompt="", completion="", answer="")
            groups = re.compile(self.score_pattern).groups
        except (KeyError, IndexError, ValueError, re.error) as error:
            raise ConfigError(
                f"rl.judge.question has the fields prompt, completion and answer (other braces are "
                f"doubled), and score_pattern is a regular expression: {error!r}"
            ) from error
        if groups != 1:
            raise ConfigError(
                f"rl.judge.score_pattern={self.score_pattern!r} has {groups} groups; put the "
                "number alone in parentheses"
            )

    def asked(self, *, prompt: str, completion: str, answer: str) -> str:
        """Returns the question about a completion."""
        return self.question.format(prompt=prompt, completion=completion, answer=answer)


@record
class RlConfig:
    """Reinforcement learning from a reward function.

    A rollout has ``training.batch_size x steps_per_rollout`` completions, ``group_size`` of each
    prompt, sampled at temperature 1.

    Raises:
        ConfigError: a number is out of range, or a setting belongs to another choice.

    Examples:
        >>> rl = jaxinfra.RlConfig(prompts="prompts.jsonl", reward="exact_match", algorithm="dapo")
        >>> rl.clip_range, str(rl.loss_mean)
        ((0.2, 0.28), 'token')
    """

    prompts: str  # file, directory or glob of rows with "prompt": a text, or a list of messages
    # exact_match, pattern, math_equal, unit_tests, judge, zero (for distill), or your own function
    # by name (jaxinfra.part).
    reward: str
    judge: JudgeConfig | None = None  # settings of reward=judge
    algorithm: Algorithm = Algorithm.GRPO  # advantages, ratio, clip range and mean of the loss
    teacher: str | None = None  # model's or run's directory that algorithm=distill learns from
    group_size: int = 8  # completions per prompt
    max_new_tokens: int = 256  # most tokens per completion
    # Most completions per prompt. Over 1, the reward gets all turns so far, and may return a reply
    # in place of a number: the model reads it, and writes again.
    max_turns: int = 1
    steps_per_rollout: int = 1  # optimizer steps on the completions of one state of the weights
    clip_low: float | None = None  # the ratio is clipped at 1 - clip_low; None: the algorithm's
    clip_high: float | None = None  # and at 1 + clip_high; None: the algorithm's
    mean: Mean | None = None  # weights of tokens in the loss; None: the algorithm's
    advantage: str | None = None  # your own function by name: rewards to advantages
    loss: str | None = None  # your own function by name: each token's loss
    gae_lambda: float | None = None  # of ppo's advantage estimates, in [0, 1]; None: 0.95
    kl: float = 0.0  # weight of the KL divergence to the start model; 0: there is no reference
    # Cap of the ratio between the probabilities of trainer and engine, by which losses are weighed.
    importance_cap: float = 2.0
    importance: Ratio = (
        Ratio.TOKEN
    )  # unit of that ratio; a sequence's is the product of its tokens'
    # Sample the next rollout while steps train on this one, with weights that are one rollout old.
    overlap: bool = False
    overlong: Overlong = Overlong.KEEP  # completions that max_new_tokens ended
    overlong_tokens: int = 0  # length of the ramp of overlong=penalty
    zero_variance: ZeroVariance = ZeroVariance.KEEP  # groups of equal rewards
    reward_workers: int = 2  # processes that compute rewards
    reward_timeout_s: float = 10.0  # longest time of one reward
    reward_memory_gib: float = 4.0  # address space of a process that computes rewards
    heldout_prompts: str | None = None  # rows to measure rewards on, which are not trained on
    heldout_every: int = 100  # rollouts between measurements
    heldout_samples: int = 1  # completions of each of these prompts
    max_running: int | None = None  # most completions sampled at once; None: the engine's default
    # Share of a device's memory that training's state and the engine may fill while completions are
    # sampled; while training takes steps, the engine holds nothing. None: 0.9, 0.5 with overlap.
    memory_fraction: float | None = None
    engine_mesh: str | None = None  # mesh of the engine, such as "tensor=4"; None: as of training
    # Whether the engine has devices of its own: with overlap, these sample while others train.
    engine_devices: EngineDevices = EngineDevices.SHARED

    def __post_init__(self) -> None:
        if self.algorithm not in _RECIPES:
            raise ConfigError(
                f"unknown rl.algorithm={self.algorithm!r}{nearest(self.algorithm, _RECIPES)}"
            )
        least = {"group_size": 1, "max_new_tokens": 1, "steps_per_rollout": 1, "reward_workers": 1}
        least |= {"max_turns": 1, "heldout_every": 1, "heldout_samples": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"rl.{name}={getattr(self, name)} must be at least {bound}")
        if self.max_running is not None and self.max_running < 1:
            raise ConfigError(f"rl.max_running={self.max_running} must be at least 1, or none")
        for name in ("reward_timeout_s", "reward_memory_gib", "importance_cap"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"rl.{name}={getattr(self, name)} must be positive and finite")
        if not 0.0 <= self.kl < math.inf:
            raise ConfigError(f"rl.kl={self.kl} must be 0 or more, and finite")
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(f"rl.memory_fraction={self.memory_fraction} must be in (0, 1]")
        parse_mesh(self.engine_mesh or "")
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"rl.{name}={value} must be positive and finite, or none")
            if value is not None and self.loss is not None:
                raise ConfigError(
                    f"rl.{name}={value} with rl.loss={self.loss!r}: your own loss clips by itself; "
                    "leave it out"
                )
        if self.clip_range[0] > 1.0:
            raise ConfigError(
                f"rl.clip_low={self.clip_low} must be at most 1: ratios are not negative"
            )

        if (self.reward == "judge") != (self.judge is not None):
            raise ConfigError(
                f"rl.reward={self.reward!r} with rl.judge={self.judge}: reward=judge and settings "
                "of a judge go together"
            )
        self._check_group()

    def _check_group(self) -> None:
        alone = (Baseline.BATCH_STANDARD, Baseline.VALUE, Baseline.TEACHER)
        if self.advantage is None and self.baseline not in alone and self.group_size < 2:
            raise ConfigError(
                f"rl.group_size={self.group_size} with algorithm={self.algorithm}: it compares "
                "completions of one prompt; take at least 2, reinforce++ or ppo"
            )
        if self.baseline in (Baseline.VALUE, Baseline.TEACHER) and self.advantage is not None:
            raise ConfigError(
                f"rl.advantage={self.advantage!r} with algorithm={self.algorithm}, whose value "
                "head or teacher gives advantages; take another algorithm, or leave it out"
            )
        self._check_teacher()
        given = self.gae_lambda
        if given is not None and not (self.algorithm == Algorithm.PPO and 0.0 <= given <= 1.0):
            raise ConfigError(
                f"rl.gae_lambda={given} with algorithm={self.algorithm}: it is a number in [0, 1] "
                "of ppo"
            )
        is_penalty = self.overlong == Overlong.PENALTY
        if is_penalty != (self.overlong_tokens > 0) or self.overlong_tokens > self.max_new_tokens:
            raise ConfigError(
                f"rl.overlong_tokens={self.overlong_tokens} with overlong={self.overlong}: a ramp "
                f"of 1 to max_new_tokens={self.max_new_tokens} tokens goes with overlong=penalty, "
                "and only with it"
            )
        if is_penalty and self.max_turns > 1:
            raise ConfigError(
                f"rl.max_turns={self.max_turns} with overlong=penalty, which is of one completion; "
                "take overlong=mask, or give less in the reward"
            )

    def _check_teacher(self) -> None:
        is_distilled = self.baseline is Baseline.TEACHER
        if is_distilled != (self.teacher is not None):
            raise ConfigError(
                f"rl.teacher={self.teacher!r} with algorithm={self.algorithm}: a teacher and "
                "algorithm=distill go together"
            )
        if is_distilled and self.zero_variance is ZeroVariance.DROP:
            raise ConfigError(
                "rl.zero_variance=drop with algorithm=distill, which learns from every completion "
                "whatever its reward; leave it out"
            )

    @property
    def baseline(self) -> Baseline:
        """The algorithm's rule for advantages."""
        return _RECIPES[self.algorithm].baseline

    @property
    def memory_share(self) -> float:
        """Share of a device's memory that may be filled while completions are sampled."""
        if self.memory_fraction is not None:
            return self.memory_fraction
        return 0.5 if self.overlap else 0.9

    def mesh_of_engine(self, training: MeshConfig) -> MeshConfig:
        """Returns the engine's mesh.

        Args:
            training: mesh of training, which is the engine's by default.
        """
        return training if self.engine_mesh is None else parse_mesh(self.engine_mesh)

    @property
    def gae_lambda_or_default(self) -> float:
        """Lambda of ppo's advantage estimates: the given one, or 0.95."""
        return 0.95 if self.gae_lambda is None else self.gae_lambda

    @property
    def ratio(self) -> Ratio:
        """The unit whose ratio the algorithm clips."""
        return _RECIPES[self.algorithm].ratio

    @property
    def loss_mean(self) -> Mean:
        """The weights of tokens in the loss: the given ones, or the algorithm's."""
        return _RECIPES[self.algorithm].mean if self.mean is None else self.mean

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances of the clipped ratio below and above 1: the given ones, or the algorithm's."""
        low, high = _RECIPES[self.algorithm].clip
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )
