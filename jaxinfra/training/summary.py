"""A finished run's outcome, from what it recorded."""

import dataclasses
import math
from typing import Any

from jaxinfra.data.baseline import compressed_bits_per_byte
from jaxinfra.data.corpora import Corpora
from jaxinfra.runtime.goodput import goodput
from jaxinfra.training.clock import Clock, median_step_s, peak_bytes
from jaxinfra.training.job import Job
from jaxinfra.training.metrics import MetricsLog, finite
from jaxinfra.training.mixture_read import mixture_read


def summarize(
    job: Job,
    corpora: Corpora,
    log: MetricsLog,
    clock: Clock,
    *,
    causes: dict[str, float],
    stall_s: float,
) -> dict[str, Any]:
    """What ``summary.json`` holds; a figure that is not known, or not finite, is None.

    Of several sets to evaluate on it has ``heldout_sets``, of a mixture ``mixture``, of pairs of
    answers ``heldout_preferences/...``.

    Args:
        causes: seconds of wall time by cause (``jaxinfra.runtime.goodput``).
        stall_s: seconds of saves after the last step recorded, in which nothing was trained.
    """
    steps = job.config.training.steps
    last, heldout = log.find("loss"), log.find("heldout_loss", step=steps)
    assert last is not None, "a run has at least one step"
    assert heldout is not None, "a run is evaluated at its end"
    loss = heldout["heldout_loss"]
    baseline = compressed_bits_per_byte(corpora.judged_documents())
    step_s = median_step_s(log.records)
    several: dict[str, Any] = {
        name: value for name, value in heldout.items() if name.startswith("heldout_preferences/")
    }
    if len(corpora.heldout) > 1:
        several["heldout_sets"] = {
            name: finite(
                {
                    "loss": heldout.get(f"heldout/{name}/loss"),
                    "bits_per_byte": heldout.get(f"heldout/{name}/bits_per_byte"),
                    "bytes": arrays.num_bytes,
                }
            )
            for name, arrays in corpora.heldout.items()
        }
    if read := mixture_read(job.config, log.records):
        several["mixture"] = [dataclasses.asdict(each) for each in read]
    return finite(
        {
            "final_loss": last["loss"],
            "heldout_loss": loss,
            "heldout_perplexity": None if loss is None else math.exp(min(loss, 700.0)),
            "heldout_bits_per_byte": heldout["heldout_bits_per_byte"],
            "heldout_bytes": sum(corpora.heldout[name].num_bytes for name in corpora.judged),
            "gzip_bits_per_byte": baseline.gzip_each,
            "xz_bits_per_byte": baseline.xz_all,
            "tokens_per_s": clock.tokens_per_s(step_s),
            "mfu": clock.mfu(step_s),
            "steps": steps,
            "skipped": last["skipped"],
            "stall_s": stall_s + sum(record.get("stall_s", 0.0) for record in log.records),
            "wall_s": clock.elapsed_s,
            "peak_bytes": peak_bytes(),
            "goodput": goodput(causes),
            "wall_s_by_cause": causes,
            "num_parameters": job.model.num_parameters,
            **several,
        }
    )
