"""What a run has read of each source of its mixture, from its config and what it recorded."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.run import RunConfig
from jaxinfra.data.corpora import schedule_of
from jaxinfra.runtime.json_lines import read_log


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SourceRead:
    """What is read of one source of a mixture: an element of what ``read_mixture`` returns.

    Examples:
        >>> for each in jaxinfra.read_mixture("runs/mixed"):
        ...     print(each.name, each.sequences)
        cats 2
        dogs 6
    """

    name: str  # of the source
    wanted: float  # part of all sequences so far, by the weights
    read: float  # part of all sequences so far
    sequences: int  # rows of batches
    tokens: int  # with a separator for each document
    epochs: float  # times that the source was read whole


def read_mixture(run: str | Path) -> tuple[SourceRead, ...]:
    """What a run has read of each source so far, or until its end; of a single source nothing.

    Args:
        run: its directory.

    Raises:
        ConfigError: the directory is no run.

    Examples:
        >>> [each.name for each in jaxinfra.read_mixture("runs/mixed")]
        ['cats', 'dogs']
    """
    directory = RunDirectory(Path(run))
    config = directory.read_config()
    records, _ = read_log(directory.metrics_file, holds=dict[str, Any])
    return mixture_read(config, records)


def mixture_read(config: RunConfig, records: Iterable[Mapping[str, Any]]) -> tuple[SourceRead, ...]:
    """The same from a config and the records of ``metrics.jsonl``."""
    names = [each.name for each in config.data.mixture]
    of_steps = [each for each in records if all(f"mixture/{n}/epochs" in each for n in names)]
    if not names or not of_steps:
        return ()
    last = of_steps[-1]
    total = last["step"] * config.training.batch_size
    wanted = schedule_of(config.data, config.training).mean_shares(last["step"])
    return tuple(
        SourceRead(
            name=name,
            wanted=float(share),
            read=last[f"mixture/{name}/sequences"] / total,
            sequences=last[f"mixture/{name}/sequences"],
            tokens=last[f"mixture/{name}/tokens"],
            epochs=last[f"mixture/{name}/epochs"],
        )
        for name, share in zip(names, wanted, strict=True)
    )


def describe_mixture(rows: Sequence[SourceRead]) -> str:
    """The table in plain text."""
    cells = mixture_cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *figures in cells:
        shown = (each.rjust(width) for each, width in zip(figures, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *shown]))
    return "\n".join(lines)


def mixture_cells(rows: Sequence[SourceRead]) -> list[list[str]]:
    """A table of them, its head first."""
    return [
        ["source", "wanted", "read", "sequences", "tokens", "epochs"],
        *(
            [
                each.name,
                f"{each.wanted:.2%}",
                f"{each.read:.2%}",
                f"{each.sequences:,}",
                f"{each.tokens:,}",
                f"{each.epochs:.3g}",
            ]
            for each in rows
        ),
    ]
