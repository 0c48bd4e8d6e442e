"""A corpus of token arrays that another program tokenized."""

from pathlib import Path

import numpy as np

from jaxinfra.config.data import DataConfig, TokenizerKind
from jaxinfra.data.split import name_hash, require_both_sides
from jaxinfra.data.token_arrays import TokenArrays, is_token_arrays, open_token_arrays
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.errors import DataError


def open_pretokenized(
    config: DataConfig, *, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[Tokenizer, TokenArrays, TokenArrays, tuple[str, ...]]:
    """Opens the tokenizer, the training side, the held-out side, and held-out documents' names.

    A document's name is its number. The tokenizer is the one given, the configured one, or the
    ``tokenizer.json`` beside the arrays.
    """
    directory = Path(config.source).expanduser()
    arrays = open_token_arrays(directory, vocab_size=vocab_size)
    tokenizer = tokenizer or tokenizer_of_arrays(config, directory)
    if config.heldout_source is not None:
        heldout_directory = Path(config.heldout_source).expanduser()
        if not is_token_arrays(heldout_directory):
            raise DataError(
                f"source {config.source!r} holds token arrays and heldout_source "
                f"{config.heldout_source!r} does not; both must be text, or both token arrays"
            )
        train = arrays
        heldout = open_token_arrays(heldout_directory, vocab_size=vocab_size)
        names = [str(i) for i in range(heldout.num_documents)]
    else:
        numbers = np.arange(arrays.num_documents)
        out = np.array([name_hash(str(i)) for i in numbers]) < config.heldout_fraction
        require_both_sides(config, num_train=int((~out).sum()), num_heldout=int(out.sum()))
        train, heldout = arrays.select(numbers[~out]), arrays.select(numbers[out])
        names = [str(i) for i in numbers[out]]
    for side in (train, heldout):
        _require_same_vocabulary(tokenizer, side, config)
    return tokenizer, train, heldout, tuple(names)


def tokenizer_of_arrays(config: DataConfig, directory: Path) -> Tokenizer:
    """Returns the configured tokenizer, or the ``tokenizer.json`` beside the arrays."""
    if config.tokenizer.kind is TokenizerKind.BYTES:
        return bytes_tokenizer()
    if config.tokenizer.path is not None:
        return Tokenizer.load(Path(config.tokenizer.path).expanduser())
    if (directory / "tokenizer.json").is_file():
        return Tokenizer.load(directory / "tokenizer.json")
    raise DataError(
        f"{directory}: token arrays without tokenizer.json; put the tokenizer that made them "
        "there, or name it with tokenizer kind=file and its path"
    )


def _require_same_vocabulary(tokenizer: Tokenizer, side: TokenArrays, config: DataConfig) -> None:
    theirs = (side.vocab_size, side.bos_id, side.eos_id)
    ours = (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    if theirs != ours:
        raise DataError(
            f"token arrays of {config.source!r} have (vocab_size, bos_id, eos_id)={theirs}, the "
            f"tokenizer has {ours}; use the tokenizer they were made with"
        )
    if not side.num_tokens:
        raise DataError(
            f"token arrays of {config.source!r}: a side of the split has no token; name a "
            "separate heldout_source"
        )
