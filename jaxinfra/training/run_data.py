"""A run's texts and batches, and the reference model's log probabilities of answers."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from jaxinfra.checkpoint import processes
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.data.batch import Batch
from jaxinfra.data.corpora import Corpora, open_corpora
from jaxinfra.data.pieces import DocumentPieces, piece_rows, piece_targets
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.data.whole_rows import pair_pieces
from jaxinfra.errors import DataError
from jaxinfra.model.definition import Parameters
from jaxinfra.parallel.zigzag import from_zigzag
from jaxinfra.training.job import Job
from jaxinfra.training.state import State


def _reference(job: Job, tree: Parameters, arrays: TokenArrays) -> np.ndarray:
    found = np.zeros(len(arrays.tokens), np.float32)
    for _, each_BT, pieces in pair_rows(job, tree, arrays):
        which, position, target = piece_targets(arrays, pieces)
        found[target] = each_BT[pieces.row[which], pieces.column[which] + position]
    return found


def pair_rows(
    job: Job, tree: Parameters, arrays: TokenArrays
) -> Iterator[tuple[Batch[np.ndarray], np.ndarray, DocumentPieces]]:
    """Iterates once over all answer pairs of a corpus, in batches, with the log probabilities of
    their targets. A collective; every process gets the rows of all processes.
    """
    training, (part, parts) = job.config.training, job.process_share()
    length, size = training.sequence_length, training.batch_size // training.accumulation
    pieces = pair_pieces(arrays, sequence_length=length)
    for first in range(0, int(pieces.row[-1]) + 1, size):
        inside = np.arange(*np.searchsorted(pieces.row, [first, first + size]))
        some = pieces.select(inside)
        some = dataclasses.replace(some, row=some.row - first)
        batch = piece_rows(arrays, some, num_rows=size, sequence_length=length)
        mine = slice(part * size // parts, (part + 1) * size // parts)
        local = jax.tree.map(lambda x, mine=mine: x[mine], batch)
        each = np.asarray(job.target_value_step(tree, job.put(local)))
        yield batch, from_zigzag(each, job.config.mesh.sequence_shards), some


def _read(file: Path, arrays: TokenArrays) -> np.ndarray:
    try:
        found = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: cannot be read ({error}); remove it to have it made") from error
    if found.shape != arrays.tokens.shape or found.dtype != np.float32:
        raise DataError(
            f"{file}: {found.dtype}{list(found.shape)} for {len(arrays.tokens)} tokens; remove it "
            "to have it made"
        )
    return found


def _write(file: Path, found: np.ndarray) -> None:
    file.parent.mkdir(exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as out:
        np.save(out, found)
    partial.rename(file)


def open_data(
    job: Job,
    *,
    cache_dir: Path,
    initial: Callable[[], State],
    run: RunDirectory | None = None,
    tokenizer: Tokenizer | None = None,
    heldout_tokens: int | None = None,
) -> Corpora:
    """Opens the corpora that a job's config names; a collective.

    Args:
        initial: returns the state of step 0, whose model is the reference of dpo and ipo. It is
            called only if the reference's log probabilities are needed and not yet computed.
        run: run directory with files of the start model and the reference's log probabilities.
        tokenizer: tokenizer of a checkpoint, if the run continues from one.
        heldout_tokens: most tokens of each held-out set; None: all.
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
    preferences = config.preferences
    if preferences is None or not preferences.has_reference:
        return open_it().with_heldout_tokens(heldout_tokens)
    tree = functools.cache(lambda: initial().evaluated)
    kept = None if run is None else run.reference
    corpora = open_it().with_heldout_tokens(heldout_tokens)
    return corpora.changed(lambda arrays: _with_reference(job, tree, kept, arrays))


def _with_reference(
    job: Job, tree: Callable[[], Parameters], kept: Path | None, arrays: TokenArrays
) -> TokenArrays:
    """Adds each token's log probability under the run's start model: one forward pass over all
    pairs, once, before the first step. A collective.

    Args:
        kept: directory of log probabilities that are computed already, and of new ones.
    """
    file = None if kept is None else kept / f"{arrays.fingerprint}.npy"
    if file is not None and processes.on_first(file.exists):
        return dataclasses.replace(arrays, reference=_read(file, arrays))
    found = _reference(job, tree(), arrays)
    if file is not None:
        processes.on_first(functools.partial(_write, file, found))
    return dataclasses.replace(arrays, reference=found)


def batches_of(job: Job, corpora: Corpora) -> TrainIterator:
    """Iterates without end over this process's rows of each step's batch, from step 0."""
    config, (part, parts) = job.config, job.process_share()
    return TrainIterator(
        corpora.train_source(config.training),
        sequence_length=config.training.sequence_length,
        batch_size=config.training.batch_size,
        seed=config.training.seed,
        process_index=part,
        process_count=parts,
        num_threads=config.data.num_prefetch_threads,
        prefetch=config.data.prefetch_batches,
    )
