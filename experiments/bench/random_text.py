"""Random tokens as a corpus, with a tokenizer that knows as many words."""

from pathlib import Path

import numpy as np
import tokenizers

from jaxinfra.data.token_arrays import write_token_arrays


def random_tokenizer(directory: Path, vocab: int) -> Path:
    """Writes tokenizer.json: a word per id; returns the file."""
    words = {"<|end_of_text|>": 0, **{f"w{number}": number for number in range(1, vocab)}}
    file = directory / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1")).save(str(file))
    return file


def write_random_text(directory: Path, vocab: int, *, documents: int, length: int) -> None:
    """Token arrays of uniformly random tokens, and their tokenizer beside them."""
    rng = np.random.default_rng(0)
    write_token_arrays(
        directory,
        ((rng.integers(1, vocab, length), 4 * length) for _ in range(documents)),
        vocab_size=vocab,
        bos_id=0,
        eos_id=0,
    )
    random_tokenizer(directory, vocab)
