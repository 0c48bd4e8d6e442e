"""Episodes of rollouts by their number: with the weights of now, or sampled while steps go on."""

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Mapping
from typing import Any, final

from jaxinfra.config.run import RunConfig
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.model.definition import Parameters
from jaxinfra.reinforcement.prompts import Prompt, prompts_of, read_prompts
from jaxinfra.reinforcement.rewards import Failure, Scored
from jaxinfra.reinforcement.turns import Player, Trajectory
from jaxinfra.training.job import Job

_HELD_OUT = 2**31  # in place of a rollout's number, for the draws of held-out prompts
_REMEMBERED = 2  # rollouts sampled ahead, which a checkpoint between two rollouts keeps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """The episodes of a rollout."""

    episodes: list[Trajectory]
    sampled_s: float = 0.0
    rewarded_s: float = 0.0  # beyond sampling, which rewards are computed beside

    def as_json(self) -> list[dict[str, Any]]:
        """Returns all but prompts and times."""
        fields = ("ids", "log_probabilities", "is_sampled", "texts", "is_cut")
        return [
            {name: getattr(each, name) for name in fields}
            | ({} if each.scored is None else dataclasses.asdict(each.scored))
            for each in self.episodes
        ]

    @classmethod
    def of_json(cls, values: list[dict[str, Any]], prompts: list[Prompt]) -> "Played":
        """Reverses ``as_json``."""
        found = []
        for each, prompt in zip(values, prompts, strict=True):
            names = [field.name for field in dataclasses.fields(Scored)]
            scored = {name: each.pop(name) for name in names}
            failure = scored.pop("failure")
            scored["failure"] = None if failure is None else Failure(failure)
            found.append(Trajectory(prompt=prompt, scored=Scored(**scored), **each))
        return cls(episodes=found)


@final
class Episodes:
    """Makes the episodes of rollouts.

    With ``rl.overlap`` the next rollout is sampled in a thread, with a copy of the weights that a
    rollout's steps begin with. So all but the first rollout are of weights that are one rollout
    old. What is sampled depends on numbers and weights alone, not on when the thread runs.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer):
        config = job.config
        assert config.rl is not None
        self._job, self._config, self._rl = job, config, config.rl
        self._prompts = read_prompts(config.rl.prompts, config, tokenizer)
        held = config.rl.heldout_prompts
        self._heldout = () if held is None else read_prompts(held, config, tokenizer)
        self._is_closed = False
        self._player = Player(config, tokenizer, is_over=lambda: self._is_closed)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._ahead: collections.OrderedDict[int, concurrent.futures.Future[Played]] = (
            collections.OrderedDict()
        )

    def play(self, number: int, tree: Parameters) -> Played:
        """Returns the episodes of a rollout.

        Args:
            tree: parameters and state that the trainer has now.
        """
        ahead = self._ahead.get(number)
        return self._played(number, tree) if ahead is None else ahead.result()

    def begin(self, number: int, tree: Parameters) -> None:
        """Starts to sample a rollout beside training, if that is wanted and it has not begun."""
        if not self._rl.overlap or number in self._ahead:
            return
        own = self._player.copied(tree)
        self._ahead[number] = self._thread.submit(self._played, number, own)
        while len(self._ahead) > _REMEMBERED:
            self._ahead.popitem(last=False)

    def _played(self, number: int, tree: Parameters) -> Played:
        seed = self._config.training.seed
        self._player.renew(self._job.model.frozen, tree)
        began = time.perf_counter()
        episodes = self._player.play(self._prompts_of(number), seed=seed, number=number)
        rewarded_s = self._player.waited_s
        sampled_s = time.perf_counter() - began - rewarded_s
        return Played(episodes=episodes, sampled_s=sampled_s, rewarded_s=rewarded_s)

    def heldout(self, number: int, tree: Parameters) -> list[Trajectory]:
        """Returns episodes of held-out prompts if it is their turn; their draws are always equal.

        They are sampled with the weights of now, before ``begin`` of the next rollout.
        """
        if not self._heldout or number % self._rl.heldout_every:
            return []
        prompts = [each for each in self._heldout for _ in range(self._rl.heldout_samples)]
        self._player.renew(self._job.model.frozen, tree)
        return self._player.play(prompts, seed=self._config.training.seed, number=_HELD_OUT)

    def _prompts_of(self, number: int) -> list[Prompt]:
        groups, size = _num_rows(self._config) // self._rl.group_size, self._rl.group_size
        seed = self._config.training.seed
        asked = prompts_of(self._prompts, first=number * groups, count=groups, seed=seed)
        return [each for each in asked for _ in range(size)]

    def state(self, number: int) -> dict[str, Any]:
        """Returns what a checkpoint keeps of a rollout that was sampled ahead; waits for it."""
        ahead = self._ahead.get(number)
        return {} if ahead is None else {"ahead": [number, ahead.result().as_json()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``."""
        concurrent.futures.wait(self._ahead.values())
        self._ahead.clear()
        if "ahead" in state:
            number, values = state["ahead"]
            self._ahead[number] = concurrent.futures.Future()
            self._ahead[number].set_result(Played.of_json(values, self._prompts_of(number)))

    def close(self) -> None:
        """Ends sampling, and the processes that compute rewards."""
        self._is_closed = True
        self._player.close()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _num_rows(config: RunConfig) -> int:
    assert config.rl is not None
    return config.training.batch_size * config.rl.steps_per_rollout
