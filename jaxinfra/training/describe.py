"""A run's set-up in two lines."""

import jax

from jaxinfra.data.arrays import TokenArrays
from jaxinfra.data.corpus import Corpus
from jaxinfra.training.job import Job


def describe_job(job: Job) -> str:
    """Size, precision, devices and length of a run."""
    config = job.config
    mesh = ", ".join(f"{a}={n}" for a, n in job.placement.mesh.shape.items() if n > 1)
    return (
        f"{job.model.num_parameters:,} parameters, {config.precision.policy} on "
        f"{jax.devices()[0].device_kind} ({mesh or 'one device'}); {config.training.steps} steps "
        f"of {config.training.batch_size} x {config.training.sequence_length} tokens"
    )


def describe_corpus(corpus: Corpus) -> str:
    """How much text is on each side of the split."""

    def side(arrays: TokenArrays) -> str:
        return (
            f"{arrays.num_documents:,} documents, {arrays.num_bytes / 1e6:.1f} MB, "
            f"{arrays.num_tokens / 1e6:.2f} M tokens"
        )

    return f"training text: {side(corpus.train)}; held out: {side(corpus.heldout)}"
