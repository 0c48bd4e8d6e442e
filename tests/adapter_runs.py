"""A few training steps of adapters over a model of 64 ids, on one batch."""

import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.training.job import make_job
from jaxinfra.training.start import first_state, with_frozen


def batch():
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 64, (8, 33)).astype(np.int32)
    segments = np.repeat([[0, 1]], 16, axis=1).reshape(1, 32).repeat(8, axis=0)
    return Batch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        segment_ids=np.sort(segments, axis=1).astype(np.int32),
        positions=np.tile(np.arange(16, dtype=np.int32), (8, 2)),
        weights=rng.integers(0, 2, (8, 32)).astype(np.float32),
    )


def train(config, *, steps=3):
    job = with_frozen(make_job(config))
    state, losses = first_state(job), []
    placed = job.put(batch())
    for _ in range(steps):
        state, metrics = job.train_step(state, placed)
        losses.append(float(metrics.loss))
    return job, state, losses
