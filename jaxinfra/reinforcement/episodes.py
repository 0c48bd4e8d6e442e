"""Episodes of a rollout: completions of prompts and what the reward function answers to them.

An episode has one turn or several. Rollouts have numbers, and are sampled with the weights of now,
or while steps go on.
"""

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from jaxinfra.config.run import RunConfig
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError
from jaxinfra.model.definition import Parameters
from jaxinfra.reinforcement.prompts import Prompt, checksum, prompts_of, read_prompts
from jaxinfra.reinforcement.rewards import Failure, RewardPool, Scored
from jaxinfra.reinforcement.sampler import Completion, Sampler, draw_seed
from jaxinfra.training.job import Job

_HELD_OUT = 2**31  # in place of a rollout's number, for the draws of held-out prompts
_REMEMBERED = 2  # rollouts sampled ahead, which a checkpoint between two rollouts keeps

type Observation = str | Sequence[Mapping[str, Any]]
"""A text, or messages, that the model reads after its completion."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Trajectory:
    """Completions of a prompt, with the replies between them."""

    prompt: Prompt
    ids: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)  # 0 of replies' tokens
    is_sampled: list[bool] = dataclasses.field(default_factory=list)  # by the model, token by token
    texts: list[str] = dataclasses.field(default_factory=list)  # completions and replies in turn
    is_cut: bool = False  # the last completion ended by its length
    scored: Scored | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.is_sampled)

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens of the prompt and of all that follows it so far."""
        return (*self.prompt.ids, *self.ids)

    def add(self, completion: Completion) -> None:
        """Appends a completion."""
        self.ids += completion.ids
        self.log_probabilities += completion.log_probabilities
        self.is_sampled += [True] * len(completion.ids)
        self.texts.append(completion.text)
        self.is_cut = completion.is_cut

    def reply_ids(self, reply: Observation, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens of a reply, as ``Prompt.reply_ids`` does."""
        ids = self.prompt.reply_ids(reply, tokenizer)
        # The model has written the end of its message, with which the template begins.
        is_twice = ids and self.ids[-1] in tokenizer.end_ids and ids[0] in tokenizer.end_ids
        return ids[1:] if is_twice else ids

    def add_reply(self, reply: Observation, ids: Sequence[int]) -> None:
        """Appends a reply, whose tokens do not count in the loss."""
        self.ids += ids
        self.log_probabilities += [0.0] * len(ids)
        self.is_sampled += [False] * len(ids)
        is_text = isinstance(reply, str)
        self.texts.append(reply if is_text else "\n".join(str(m.get("content")) for m in reply))


@final
class Player:
    """Samples completions of prompts, and asks the reward function after each of them.

    All completions of a turn end before the next turn begins, so that what the engine computes
    does not depend on the time that rewards take.

    Args:
        is_over: asked often; sampling ends with a DataError if it returns True.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, *, is_over: Callable[[], bool]):
        assert config.rl is not None
        self._rl, self._config, self._tokenizer = config.rl, config, tokenizer
        self._sampler = Sampler(config, tokenizer)
        self._pool, self._is_over = RewardPool(config.rl), is_over
        self.waited_s = 0.0  # for rewards, after all completions of a turn had ended

    def renew(self, frozen: Any, trained: Any) -> None:
        """Gives the engine the weights that the next rollouts are sampled with."""
        self._sampler.renew(frozen, trained)
        self.waited_s = 0.0

    def copied(self, trained: Any) -> Any:
        """Returns a copy of the weights for ``renew``, which the trainer's next step does not
        free.
        """
        return self._sampler.copied(trained)

    def play(self, prompts: Sequence[Prompt], *, seed: int, number: int) -> list[Trajectory]:
        """Returns a trajectory of each prompt, with its reward or the reason why it has none.

        Args:
            seed, number: of the run, and of the rollout; equal ones give equal draws.
        """
        played = [Trajectory(prompt=each) for each in prompts]
        current = dict(enumerate(played))
        for turn in range(self._rl.max_turns):
            asked: dict[int, concurrent.futures.Future[Scored]] = {}
            contexts = {place: each.context for place, each in current.items()}
            draws = draw_seed(seed, number, turn)
            for found in self._sampler.sample(contexts, seed=draws, is_over=self._is_over):
                current[found.place].add(found)
                asked[found.place] = self._ask(current[found.place])
            if self._is_over():
                raise DataError("the run has ended")
            began = time.perf_counter()
            for place, each in current.items():
                each.scored = asked[place].result()
            self.waited_s += time.perf_counter() - began
            is_last = turn + 1 == self._rl.max_turns
            current = dict(self._continued(current, is_last=is_last))
            if not current:
                break
        self._sampler.release()  # training has the memory
        return played

    def _ask(self, each: Trajectory) -> concurrent.futures.Future[Scored]:
        written = each.texts[-1] if self._rl.max_turns == 1 else each.texts
        return self._pool.submit(written, prompt=each.prompt.text, row=each.prompt.row)

    def _continued(
        self, current: Mapping[int, Trajectory], *, is_last: bool
    ) -> Iterator[tuple[int, Trajectory]]:
        """The trajectories that go on after a reply."""
        room = self._config.training.sequence_length + 1 - self._rl.max_new_tokens
        for place, each in current.items():
            assert each.scored is not None
            if each.scored.reply is None:
                continue
            reply = each.scored.reply
            try:
                ids = each.reply_ids(reply, self._tokenizer)
            except DataError as error:
                each.scored = Scored(reward=None, failure=Failure.RAISED, text=str(error))
                continue
            if is_last or len(each.context) + len(ids) > room:
                each.scored = Scored(reward=None, failure=Failure.UNFINISHED)
            else:
                each.add_reply(reply, ids)
                yield place, each

    def close(self) -> None:
        """Ends the processes that compute rewards."""
        self._pool.close()


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
        self._checksum = checksum(self._prompts)
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
        """Returns a checksum of the prompts, and what a checkpoint keeps of a rollout that was
        sampled ahead; waits for it.
        """
        ahead, found = self._ahead.get(number), {"prompts": self._checksum}
        return found if ahead is None else found | {"ahead": [number, ahead.result().as_json()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``.

        Raises:
            DataError: it is of other prompts.
        """
        if state.get("prompts", self._checksum) != self._checksum:
            raise DataError(
                f"rl.prompts={self._rl.prompts!r} has other rows than the run's checkpoint was "
                "written with; put those back, or begin a run from its model with --init"
            )
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
