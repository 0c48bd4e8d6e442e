"""Held-out loss of a model that was trained elsewhere."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.config.data import DataConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.data.baseline import compressed_bits_per_byte
from jaxinfra.data.batch import Batch
from jaxinfra.data.corpus import open_corpus
from jaxinfra.data.heldout import heldout_batches
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.training.evaluate_run import RunEvaluation
from jaxinfra.training.evaluation import evaluate
from jaxinfra.training.gradients import make_evaluation_step
from jaxinfra.training.job import keep_compiled_programs

_SEQUENCE_LENGTH = 2048  # at most, in tokens
_TOKENS_A_SHARD = 4096  # of a batch, on each data shard


def evaluate_pretrained(
    directory: Path, *, mesh: MeshConfig, cache_dir: Path, source: str | None
) -> RunEvaluation:
    """Evaluates a model directory over every token of a text, once.

    Documents are separated as the tokenizer's own separators say.

    Args:
        source: a text, all of it; None: the held-out part of the standard library's source.
    """
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer.json; text needs one to become tokens")
    keep_compiled_programs(cache_dir)
    data = DataConfig()
    if source is not None:
        data = dataclasses.replace(data, source=source, heldout_source=source)
    placement = Placement(mesh=make_mesh(mesh, devices=jax.local_devices()))
    model = load_pretrained(directory, placement=placement, keep_packed=True)
    corpus = open_corpus(
        data,
        vocab_size=model.definition.config.vocab_size,
        cache_dir=cache_dir,
        tokenizer=Tokenizer.load(directory / "tokenizer.json"),
    )
    length = min(_SEQUENCE_LENGTH, model.definition.config.max_positions)
    batches = heldout_batches(
        corpus.heldout,
        sequence_length=length,
        batch_size=mesh.num_data_shards * max(1, _TOKENS_A_SHARD // length),
    )
    rows = model.placement.batch

    def put(batch: Batch) -> Batch:
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(rows, np.asarray(x)), batch
        )

    result = evaluate(
        jax.jit(make_evaluation_step(model.definition)),
        model.parameters,
        batches,
        corpus.heldout,
        put=put,
    )
    return RunEvaluation(
        step=None,
        evaluation=result,
        sets={},
        baseline=compressed_bits_per_byte(corpus.heldout_documents()),
    )
