"""Held-out loss of a saved run."""

import dataclasses
from pathlib import Path

import jax

from jaxinfra.checkpoint.restoring import load
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config import codec
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.data.baseline import CompressionBaseline, compressed_bits_per_byte
from jaxinfra.data.corpora import open_corpora
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError
from jaxinfra.training.evaluation import Evaluation, evaluate_sets
from jaxinfra.training.initialize import first_state, with_frozen
from jaxinfra.training.job import keep_compiled_programs, make_job
from jaxinfra.training.pairs import with_reference


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunEvaluation:
    """A model's loss on a text, and what compressors make of the same text."""

    step: int | None  # None: the model is of no run
    evaluation: Evaluation  # of what the run is judged by
    sets: dict[str, Evaluation]  # of each text by name, where there are several
    baseline: CompressionBaseline


def evaluate_run(
    directory: Path, *, mesh: MeshConfig, cache_dir: Path, source: str | None, step: int | None
) -> RunEvaluation:
    """Evaluates a checkpoint over every held-out token, once.

    Args:
        source: text to use instead of the run's own held-out documents, all of it.
        step: of the checkpoint; the newest good one where None.
    """
    run = RunDirectory(directory)
    as_it_is = run.read_config()
    config = dataclasses.replace(as_it_is, mesh=mesh)
    if not run.tokenizer_file.exists():
        raise ConfigError(f"{directory} has no tokenizer.json: the run was stopped before it began")
    keep_compiled_programs(cache_dir)
    data = config.data
    if source is not None:
        # As both sides: the run's own training text, which may be gone, is not needed.
        data = dataclasses.replace(
            data, source=source, heldout_source=source, mixture=(), validation=(), best_by=None
        )
    job = with_frozen(make_job(config))
    corpora = open_corpora(
        data,
        vocab_size=config.model.vocab_size,
        cache_dir=cache_dir,
        tokenizer=Tokenizer.load(run.tokenizer_file),
        template_directory=run.path,
    )
    state = job.abstract_state()
    weights = "average" if state.average else "parameters"
    restored = load(
        run.checkpoints,
        dataclasses.replace(
            jax.tree.map(lambda _: None, state),
            model_state=state.model_state,
            **{weights: getattr(state, weights)},
        ),
        step=step,
        identity=identity(run, config),
        settings=codec.to_dict(as_it_is),
    )
    corpora = with_reference(
        job, corpora, initial=lambda: first_state(job).evaluated, kept=run.reference
    )
    result = evaluate_sets(job, restored.state.evaluated, corpora)
    return RunEvaluation(
        step=restored.step,
        evaluation=result.judged,
        sets=result.sets if len(result.sets) > 1 else {},
        baseline=compressed_bits_per_byte(corpora.judged_documents()),
    )
