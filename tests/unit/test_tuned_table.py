"""Benchmarks' rows in tables under ``tuned/``."""

from experiments.bench import tuned_table
from experiments.bench.tuned_table import add_rows
from pallas_kernels.common import device, tables


def row(size: int, ms: float, tiles: int = 1) -> tables.Row:
    return tables.Row.of(case={"rows": size}, choice={"tiles": tiles}, ms=ms)


def test_rows_join_those_that_a_table_has_and_so_do_commands(tmp_path):
    path = tmp_path / f"tiles-{device.H200.slug}.json"
    older = tuned_table.Table(
        op="op",
        question="tiles",
        device_kind=device.H200.kind,
        environment={"command": "python -m before"},
        rows=(row(1, 1.0), row(2, 2.0)),
    )
    tuned_table.save(older, path)
    with device.compiling_for(device.H200):
        add_rows(tmp_path, [row(2, 3.0)], op="op", question="tiles")
        table = tuned_table.load(path)
        assert set(table.rows) == {row(1, 1.0), row(2, 3.0)}
        assert table.environment["command"].startswith("python -m before && python ")
        new = row(1, 0.5, tiles=2)
        add_rows(tmp_path, [new], op="op", question="tiles", without=[new.case])
    assert set(tuned_table.load(path).rows) == {new, row(2, 3.0)}
