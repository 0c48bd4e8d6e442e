"""Tiles of arrays whose length 8 does not divide: their copies, and that there are no others."""

import contextlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.flash_attention.hopper import forward
from pallas_kernels.flash_attention.hopper.config import ForwardConfig
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec
from pallas_kernels.hopper import odd_tiles

B, HEADS, COLUMNS = 2, 3, 64


class Copies:
    """What the copy engine does with an array, of what ``odd_tiles`` asks it for."""

    def __init__(self, array, tile, *, load: bool):
        self.array, self.tile, self.load, self.asked = array, tile, load, True

    def when(self, condition):
        """Python runs both branches of a condition: copies of one that does not hold are not."""

        @contextlib.contextmanager
        def branch():
            self.asked = condition
            yield
            self.asked = True

        return branch()

    def copy(self, part, window, how):
        """One copy, between rows of the array and a part of the tile in shared memory."""
        if not self.asked:
            return
        assert how["swizzle"] == COLUMNS * 2
        b, (row, rows), head = window
        length = self.array.shape[1]
        kinds = [type(each).__name__ for each in how["gmem_transform"]]
        if kinds == ["Tile"]:
            length, shape = length // 8 * 8, (-1, 8, self.array.shape[3] // COLUMNS, COLUMNS)
            order = (0, 2, 1, 3)
        else:
            assert kinds == ["Tile", "Transpose"]
            shape, order = (rows, -1, COLUMNS), (1, 0, 2)
        inside = max(0, min(length - row, rows))
        if self.load:
            found = np.zeros((rows, self.array.shape[3]))
            found[:inside] = self.array[b, row : row + inside, head]
            part.values[...] = found.reshape(shape).transpose(order)
        else:
            back = part.values.transpose(np.argsort(order)).reshape(rows, -1)
            self.array[b, row : row + inside, head] = back[:inside]


class Buffer:
    """A tile in shared memory, or groups of it."""

    def __init__(self, values):
        self.values = values
        self.type = types.SimpleNamespace(shape=values.shape, element_type=None)


def copied(monkeypatch, array, values, place, *, load: bool, described=None) -> None:
    """Has ``odd_tiles`` copy a tile; described: how many rows it takes the array to have."""
    engine = Copies(array, values, load=load)
    plain = types.SimpleNamespace
    tile = type("Tile", (), {"__init__": lambda self, *_, **__: None})
    turned = type("Transpose", (), {"__init__": lambda self, *_: None})
    compare = {"sle": lambda a, b: a <= b, "sgt": lambda a, b: a > b}
    monkeypatch.setattr(odd_tiles, "constant", int)
    monkeypatch.setattr(odd_tiles, "_index", int)
    monkeypatch.setattr(odd_tiles, "mgpu", plain(ds=lambda row, rows: (row, rows)))
    monkeypatch.setattr(
        odd_tiles,
        "copies",
        plain(TileTransform=tile, TransposeTransform=turned, Rounding=plain(DOWN=None)),
    )
    monkeypatch.setattr(
        odd_tiles,
        "arith",
        plain(
            addi=lambda a, b: a + b,
            cmpi=lambda how, a, b: compare[how](a, b),
            CmpIPredicate=plain(sle="sle", sgt="sgt"),
        ),
    )
    monkeypatch.setattr(
        odd_tiles,
        "mgpu_utils",
        plain(
            bytewidth=lambda _: 2,
            when=engine.when,
            memref_slice=lambda tile, at: Buffer(tile.values[at[0]]),
        ),
    )
    shape = (array.shape[0], described or array.shape[1], *array.shape[2:])
    source = types.SimpleNamespace(type=types.SimpleNamespace(shape=shape))
    numbers = [types.SimpleNamespace(registers=np.array([x])) for x in place]
    odd_tiles._copied(source, numbers, Buffer(values), engine.copy)


def padded(array, place, rows):
    """The rows of a tile, zeros behind the array's end."""
    b, row, head = place
    found = np.zeros((rows, array.shape[3]))
    part = array[b, row : row + rows, head]
    found[: len(part)] = part
    return found


def in_shared_memory(rows):
    """[rows, H] as [rows / 8, H / 64, 8, 64]."""
    return rows.reshape(-1, 8, rows.shape[1] // COLUMNS, COLUMNS).transpose(0, 2, 1, 3)


PLACES = [(0, 0, 0), (1, 64, 2), (1, 128, 1), (0, 192, 0)]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [5, 64, 72, 131, 189, 192])
def test_a_tile_is_loaded_with_zeros_behind_the_end(monkeypatch, length, width):
    array = np.random.default_rng(length).standard_normal((B, length, HEADS, width))
    for place in PLACES:
        tile = np.full((8, width // COLUMNS, 8, COLUMNS), np.nan)
        copied(monkeypatch, array, tile, place, load=True)
        np.testing.assert_array_equal(tile, in_shared_memory(padded(array, place, 64)))


@pytest.mark.parametrize("length", [5, 72, 131, 189])
def test_a_tile_is_stored_up_to_the_end(monkeypatch, length):
    rng = np.random.default_rng(length)
    for place in PLACES:
        before = rng.standard_normal((B, length, HEADS, 128))
        rows, after = rng.standard_normal((64, 128)), before.copy()
        copied(monkeypatch, after, in_shared_memory(rows).copy(), place, load=False)
        b, row, head = place
        want = before.copy()
        want[b, row : row + 64, head] = rows[: max(0, length - row)]
        np.testing.assert_array_equal(after, want)


def test_a_shorter_description_is_seen(monkeypatch):
    """The last group taken for a whole one: its last rows would be missing."""
    array = np.random.default_rng(0).standard_normal((B, 131, HEADS, 128))
    tile = np.full((8, 2, 8, COLUMNS), np.nan)
    copied(monkeypatch, array, tile, (0, 128, 0), load=True, described=192)
    assert not np.array_equal(tile, in_shared_memory(padded(array, (0, 128, 0), 64)))


def shapes(T: int, S: int, H: int) -> list[jax.ShapeDtypeStruct]:
    """Query, key and value."""
    heads = {"q": (T, 4), "k": (S, 2), "v": (S, 2)}
    return [jax.ShapeDtypeStruct((2, *each, H), jnp.bfloat16) for each in heads.values()]


@pytest.mark.slow  # lowers both passes; `test_hopper.py` lowers odd lengths
@pytest.mark.parametrize(
    ("T", "S", "H"),
    [(131, 77, 64), (77, 131, 128), (131, 131, 256)],
)
def test_arrays_of_odd_lengths_are_read_where_they_lie(T, S, H):
    def loss(*args):
        out = flash_attention(*args, implementation="hopper", is_causal=True)
        return out.astype(jnp.float32).sum()

    with device.compiling_for(device.H200):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes(T, S, H))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "attention_forward" in text
    assert "attention_backward" in text
    padding = re.findall(r"stablehlo\.pad .*-> tensor<(\S+)>", text)
    assert all(each.endswith("f32") for each in padding), padding  # of rows: no head is as wide
    assert all(each.count("x") == 3 for each in padding), padding


def test_persistent_blocks_refuse_odd_lengths():
    spec = AttentionSpec(scale=1.0)
    config = ForwardConfig(block_kv=64, persistent=True)
    with pytest.raises(UnsupportedError, match="persistent=True needs lengths that 8 divides"):
        jax.eval_shape(
            lambda q, k, v: forward(q, k, v, AttentionMasks(), spec=spec, config=config),
            *shapes(131, 131, 64),
        )
