"""A run's texts, and the batches of them that its steps read."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax

from jaxinfra.checkpoint import processes
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.data.corpora import Corpora, open_corpora
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.train_iterator import TrainIterator, train_batches
from jaxinfra.training.job import Job
from jaxinfra.training.pairs import with_reference
from jaxinfra.training.state import State


def open_data(
    job: Job,
    *,
    cache_dir: Path,
    initial: Callable[[], State],
    run: RunDirectory | None = None,
    tokenizer: Tokenizer | None = None,
) -> Corpora:
    """The corpora that a job's config names; a collective.

    Args:
        initial: the state of step 0, for what a loss of pairs compares with.
        run: where what came with the model is kept, and what is computed of it.
        tokenizer: a checkpoint's.
    """
    config = job.config
    open_it = functools.partial(
        open_corpora,
        config.data,
        vocab_size=config.model.vocab_size,
        cache_dir=cache_dir,
        tokenizer=tokenizer,
        template_directory=None if run is None else run.path,
    )
    if jax.process_count() > 1:  # the others find in the cache what the first has tokenized
        processes.on_first(lambda: open_it() and None)
    return with_reference(
        job,
        open_it(),
        initial=lambda: initial().evaluated,
        kept=None if run is None else run.reference,
    )


def batches_of(job: Job, corpora: Corpora) -> TrainIterator:
    """This process's rows of the batches of a job's steps, from the first on, without end."""
    config, (part, parts) = job.config, job.process_share()
    return train_batches(
        corpora.train_source(config.training),
        sequence_length=config.training.sequence_length,
        batch_size=config.training.batch_size,
        seed=config.training.seed,
        process_index=part,
        process_count=parts,
        num_threads=config.data.num_prefetch_threads,
        prefetch=config.data.prefetch_batches,
    )
