"""Samples completions of prompts with the weights that a run has at a step."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import jax
import numpy as np

from jaxinfra.config.run import RunConfig
from jaxinfra.data.tokenizer import StreamDecoder, Tokenizer
from jaxinfra.errors import CheckpointError
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged
from jaxinfra.model.serving_form import serving_parameters
from jaxinfra.numerics.policy import POLICIES, Policy, as_kept, stored_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.reinforcement.handover import Handover, engine_placement
from jaxinfra.serving.engine.engine import NOT_FINITE, Engine
from jaxinfra.serving.engine.options import EngineOptions, options_on
from jaxinfra.serving.engine.plan import SchedulerLimits
from jaxinfra.serving.engine.program_set import COPY, EMPTY, ProgramKey
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestProgress
from jaxinfra.serving.generate import bucket
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A sampled completion, as the engine returned it."""

    place: int  # among those of its rollout
    ids: tuple[int, ...]  # with the end token, if there is one
    log_probabilities: tuple[float, ...]  # of each of them, by the engine, in nats
    text: str
    is_cut: bool  # ended by its length


def engine_policy(config: RunConfig) -> Policy:
    """Returns the numeric formats of a run's engine: those that training evaluates with."""
    numbers = as_kept(POLICIES[config.precision.policy], config.precision)
    numbers = dataclasses.replace(numbers, numerics=config.precision.numerics)
    return numbers if config.lora is None else stored_as_computed(numbers)


def engine_options(config: RunConfig) -> EngineOptions:
    """Returns the options of a run's engine, whose requests are the completions of a rollout."""
    rl, defaults = config.rl, options_on(jax.default_backend())
    assert rl is not None
    num_rows = config.training.batch_size * rl.steps_per_rollout
    length = config.training.sequence_length + 1
    return dataclasses.replace(
        defaults,
        max_running=min(num_rows, rl.max_running or defaults.max_running),
        max_context=bucket(length, limit=config.model.max_positions),
        memory_fraction=rl.memory_share,
        share_prefixes=True,  # the completions of a group share their prompt's pages
    )


def sampling_programs(limits: SchedulerLimits, lengths: Sequence[int]) -> list[ProgramKey]:
    """Returns the programs that completions of contexts of these lengths, in tokens, may need."""
    rows = limits.rows(min(len(lengths), limits.max_running))
    fitting = [size for size in limits.chunk_sizes if size >= max(lengths)]
    longest = min([*fitting, limits.chunk_sizes[-1]])
    decodes = [
        ProgramKey(name="step", rows=size, is_scored=True)
        for size in limits.row_sizes
        if size <= rows
    ]
    chunks = [
        ProgramKey(name="step", rows=size, length=length, is_fresh=is_fresh, is_full=True)
        for size, length in limits.chunk_shapes
        if length <= longest and size <= rows
        for is_fresh in (True, False)
    ]
    return [EMPTY, COPY, *decodes, *chunks]


@final
class Sampler:
    """An engine whose weights follow the trainer's; compiled programs are kept.

    Args:
        tokenizer: of the run.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer):
        assert config.rl is not None
        self._rl, self._tokenizer = config.rl, tokenizer
        self._placement = engine_placement(config)
        execution = execution_on(self._placement, policy=engine_policy(config))
        self.definition = define_model(config.model, execution, lora=config.lora)
        self._options = engine_options(config)
        self._engine: Engine | None = None
        self._form: ModelDefinition | None = None  # that the engine runs
        self._handover = Handover(config, self._placement, self.definition)

    def copied(self, trained: Parameters) -> Parameters:
        """Returns a copy of trained parameters and state for ``renew``, which the next step does
        not free.
        """
        return self._handover.trained(trained, copied=True)

    def renew(self, frozen: Parameters, trained: Parameters) -> None:
        """Gives the engine other weights; what it samples then depends on no request before.

        Args:
            frozen, trained: parameters and state of the model.
        """
        self.release()
        tree = merged(self._handover.frozen(frozen), self._handover.trained(trained))
        if self._form is None:
            self._form = LoadedModel(
                definition=self.definition,
                parameters=tree,
                tokenizer=self._tokenizer,
                config=None,
                step=None,
                placement=self._placement,
            ).serving_definition()
        if self._form is not self.definition:
            tree = serving_parameters(self._form, tree)
        if self._engine is None:
            # Without a tokenizer: text is of whole completions. All ids may be sampled, those that
            # the tokenizer does not know too: the trainer's probabilities are over all of them.
            self._engine = Engine(self._form.bind(tree), options=self._options)
        else:
            self._engine.renew(tree)

    def release(self) -> None:
        """Frees the engine's weights and pages until ``renew``."""
        if self._engine is not None:
            self._engine.release()

    def sample(
        self, contexts: Mapping[int, Sequence[int]], *, seed: int, is_over: Callable[[], bool]
    ) -> Iterator[Completion]:
        """Yields completions as they end, each sampled at temperature 1.

        The order of requests depends on the arguments alone, so after ``renew`` equal arguments
        give equal completions, to the bit.

        Args:
            contexts: token ids that a completion follows, by its place in the rollout.
            seed: of the draws; each place has its own.
            is_over: asked before each step; sampling ends if it returns True.

        Raises:
            CheckpointError: logits are not finite.
        """
        engine, sampling = self._engine, SamplingConfig(temperature=1.0, logprobs=0)
        assert engine is not None, "renew comes first"
        if engine.runner.device.platform != "cpu":  # where one compilation takes all cores
            lengths = [len(ids) for ids in contexts.values()]
            engine.runner.programs.make(sampling_programs(engine.limits, lengths))
        growing: dict[int, _Growing] = {}
        for place, ids in contexts.items():
            request = GenerationRequest(
                prompt_ids=tuple(ids),
                max_new_tokens=self._rl.max_new_tokens,
                sampling=sampling,
                seed=seed,
                choice=place,
                eos_ids=frozenset(self._tokenizer.end_ids),
            )
            growing[engine.submit(request)] = _Growing(place=place, before=ids)
        while engine.is_busy and not is_over():
            for progress in engine.step():
                each = growing[progress.request]
                each.add(progress)
                if progress.end is EndReason.ERROR:
                    raise CheckpointError(f"completion {each.place} of a rollout: {NOT_FINITE}")
                if progress.end is not None:
                    yield each.ended(progress.end, self._tokenizer)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Growing:
    """A completion whose tokens are still coming."""

    place: int
    before: Sequence[int]  # tokens that it follows
    ids: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)

    def add(self, progress: RequestProgress) -> None:
        self.ids += progress.tokens
        self.log_probabilities += [each.logprob for each in progress.scores]

    def ended(self, end: EndReason, tokenizer: Tokenizer) -> Completion:
        assert len(self.ids) == len(self.log_probabilities), "one log probability for each token"
        said = self.ids[:-1] if end is EndReason.EOS else self.ids  # an end token has no text
        return Completion(
            place=self.place,
            ids=tuple(self.ids),
            log_probabilities=tuple(self.log_probabilities),
            text=StreamDecoder(tokenizer, self.before).flush(said),
            is_cut=end is not EndReason.EOS,
        )


def draw_seed(seed: int, rollout: int, turn: int) -> int:
    """Returns the seed of a turn's draws: a function of the run's seed and the two numbers."""
    return int(np.random.SeedSequence([seed, rollout, turn]).generate_state(1)[0])
