"""Conversion of text to token ids and back without loss."""

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxinfra.data.special_tokens import SETTINGS, add_listed_tokens, read_special_tokens
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json, read_bytes

# Encoding uses all cores. Unset, the library would print a warning whenever the process forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

SEPARATOR = "<|endoftext|>"
REPLACEMENT = "\ufffd"
GUARD = "\ufdd2"
"""Character inserted into a special token's spelling, which makes it plain text. Unicode reserves
it for such uses."""

# What a token may span. Words with the mark before them (" x", ".x", "(x", "_x"), digits by three,
# runs of punctuation with the line break and indentation that follow, other white space less the
# last space. Standard library, bytes per held-out token at 4,096 / 8,192 tokens: 3.77 / 4.25;
# GPT-2's pattern 3.57 / 3.91, cl100k's 3.60 / 3.99.
BPE_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*[ \t]*|\s+(?!\S)|\s+"
_PIECE_CHARS = 1 << 18
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")  # of a byte in vocabularies that fall back to them
_VISIBLE = re.compile(r"\S")
_BEFORE, _MOST_BEFORE = 8, 256  # tokens before a text that its first characters may depend on
_MOST_PARTS = 3  # tokens of a character that is not complete
_MOST_HELD = 3 * _MOST_PARTS


@final
class Tokenizer:
    """A tokenizer: byte-level BPE, plain bytes, or any ``tokenizer.json``.

    ``bos_id`` precedes each document, so that its first token is predicted too; ``eos_id`` ends
    it. Both are the same token where the vocabulary has only one, as for tokenizers made here.
    ``prefix_ids`` are what the tokenizer itself puts before a text, ``end_ids`` what ends a text
    that a model writes.

    Args:
        directory: directory of files that name special tokens; None: usual names are used.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, directory: Path | None = None):
        # A document that spells out a special token must not become that token.
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._json = tokenizer.to_str()
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str] = {}
        self.vocab_size: int = num_ids(tokenizer)
        with Panics():
            special = read_special_tokens(tokenizer, directory)
        if special.eos_id is None:
            raise DataError(
                "no file says which of the tokenizer's tokens ends a document; name it as eos_token"
                " in a tokenizer_config.json beside it"
            )
        self.eos_id: int = special.eos_id
        self.bos_id: int = special.eos_id if special.bos_id is None else special.bos_id
        self.prefix_ids, self.end_ids = special.prefix_ids, special.end_ids
        self._is_bytes = self.vocab_size == 257 and self._json == _byte_level().to_str()
        # A tokenizer that marks the start of its input (a prefix space, say) must see it whole.
        decoder = json.loads(self._json)["decoder"] or {}
        self._decoders = [each["type"] for each in decoder.get("decoders", [decoder]) if each]
        self.is_byte_level = self._decoders == ["ByteLevel"]
        self._needs_before = not {"BPEDecoder", "CTC"}.isdisjoint(self._decoders)
        self._anchor = [] if self._needs_before else self._ids("a")[-1:]
        self._splits_at_lines = self._ids("a\nb") == [*self._ids("a\n"), *self._ids("b")]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's vocabulary, merges and rules."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def encode(self, text: str) -> Int32[np.ndarray, "T"]:
        """Returns the token ids of a text, int32, without separators."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """Returns the token ids of each text, computed on all cores.

        A text of more than 262,144 characters is cut after a line break where the tokenizer
        allows it, which bounds memory.
        """
        if self._is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
        pieces: list[str] = []
        ends: list[int] = []
        for text in texts:
            pieces += split_at_lines(text) if self._splits_at_lines else [text]
            ends.append(len(pieces))
        with Panics():
            encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        ids = [np.array(piece.ids, np.int32) for piece in encoded]
        starts = [0, *ends[:-1]]
        return [np.concatenate(ids[a:b]) for a, b in zip(starts, ends, strict=True)]

    def encode_rendered(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """Returns the token ids of texts in which templates have spelled out special tokens.

        A special token that ``guard`` has marked is encoded as plain text.
        """
        encode, own = self._spelled_out.encode_batch_fast, {}
        if any(GUARD in text for text in texts):
            # Under other names, special tokens are told from their spelling.
            encode, own = self._renamed[0].encode_batch_fast, self._renamed[1]
            texts = [
                self._spellings.sub(lambda found: _renamed(found[0]), text).replace(GUARD, "")
                for text in texts
            ]
        with Panics():
            encoded = encode(list(texts), add_special_tokens=False)
        return [np.array([own.get(i, i) for i in each.ids], np.int32) for each in encoded]

    def guard(self, text: str) -> str:
        """Marks special tokens spelled out in a text, so that they are encoded as plain text."""
        marked = self._starts.sub(lambda found: found[0] + GUARD, text)
        if marked == text and self._folds_case:  # it may have them in another case
            return _VISIBLE.sub(lambda found: found[0] + GUARD, text, count=1)
        return marked

    def id_of(self, name: str) -> int | None:
        """Returns the id of the token with this name; None if there is none."""
        return self._tokenizer.token_to_id(name)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which are no text of a document."""
        ids = map(self._tokenizer.token_to_id, self._special)
        return frozenset(each for each in ids if each is not None)

    @functools.cached_property
    def _spelled_out(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._json)

    @functools.cached_property
    def _special(self) -> list[str]:
        """Special tokens as they are spelled, the longest first."""
        added: list[dict[str, Any]] = json.loads(self._json)["added_tokens"]
        names: list[str] = [each["content"] for each in added if each["special"]]
        return sorted(names, key=len, reverse=True)

    @functools.cached_property
    def _spellings(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special)) or "(?!)")

    @functools.cached_property
    def _starts(self) -> re.Pattern[str]:
        """First characters of special tokens, also of one that begins within another."""
        return re.compile(f"(?={self._spellings.pattern}).", re.DOTALL)

    @functools.cached_property
    def _folds_case(self) -> bool:
        """Whether special tokens are found in texts of other case too, as both are normalized."""
        names = [
            each["content"]
            for each in json.loads(self._json)["added_tokens"]
            if each["special"] and each["normalized"]
        ]
        cases = [(x.upper(), x.lower()) for x in names if x.upper() != x.lower()]
        return any(self._normalized(a) == self._normalized(b) for a, b in cases)

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    @functools.cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The tokenizer with other names for special tokens, and the ids that theirs stand for."""
        values = json.loads(self._json) | {"post_processor": None}
        for each in values["added_tokens"]:
            if each["special"]:
                each["content"] = name = _renamed(each["content"])
                each["normalized"] &= name in self._normalized(name)  # BertNormalizer drops it
        renamed = tokenizers.Tokenizer.from_str(json.dumps(values))
        own: dict[int, int] = {}
        for name in self._special:
            theirs, ours = renamed.token_to_id(_renamed(name)), self._tokenizer.token_to_id(name)
            assert theirs is not None
            assert ours is not None
            own[theirs] = ours
        return renamed, own

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; separators appear as their names."""
        with Panics():
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self, token: int, before: int | None = None) -> bytes:
        """Returns the UTF-8 bytes that a token adds to a text, maybe part of a character.

        Args:
            before: the token before it, which BPEDecoder's and CTC's texts depend on; None: none.
        """
        if before is not None and self._needs_before:
            return self._added([before], token).encode()
        if (data := self._bytes.get(token)) is None:
            data = self._bytes[token] = self._bytes_of(token)
        return data

    def whole_text(self, token: int) -> str:
        """Returns the whole characters that a token adds to every text; "" if they are not."""
        if (text := self._whole.get(token)) is None:
            text = self.spelled(token) if self.is_byte_level else ""
            is_part = text.startswith("bytes:") or text.endswith(REPLACEMENT)
            text = self._whole[token] = "" if is_part else text
        return text

    def spelled(self, token: int, before: int | None = None) -> str:
        """Returns the text that a token adds to a text; part of a character is shown as bytes.

        Args:
            before: as in ``token_bytes``.
        """
        data = self.token_bytes(token, before)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token) or ""
        if self.is_byte_level:
            values = [_BYTES.get(character) for character in name]
            return name.encode() if None in values else bytes(values)  # pyrefly: ignore
        if "ByteFallback" in self._decoders and (found := _BYTE_NAME.fullmatch(name)):
            return bytes.fromhex(found[1])
        # After another token, as decoders treat the first one of a text differently.
        return self._added(self._anchor, token).encode()

    def _added(self, before: Sequence[int], token: int) -> str:
        """Returns the text that a token adds to that of tokens before it."""
        shown, text = self.decode(before), self.decode([*before, token])
        return text[len(shown) :] if text.startswith(shown) else self.decode([token])

    def save(self, path: Path) -> None:
        """Writes a ``tokenizer.json`` that this and other libraries load.

        A ``tokenizer_config.json`` that names the separators is written if there is none.
        """
        path.write_text(self._json, encoding="utf-8")
        alone, settings = read_special_tokens(self._spelled_out, None), path.with_name(SETTINGS)
        bos_id = alone.eos_id if alone.bos_id is None else alone.bos_id
        if (bos_id, alone.eos_id) != (self.bos_id, self.eos_id) and not settings.exists():
            settings.write_text(json.dumps(self.separators(), indent=2) + "\n")

    def separators(self) -> dict[str, str]:
        """Names of the tokens that documents begin and end with, as config files have them."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        return {role: str(self._tokenizer.id_to_token(each)) for role, each in ids.items()}

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """Reads a ``tokenizer.json``; raises DataError if it is not one."""
        try:
            with Panics():
                tokenizer = read_tokenizer(path)
                add_listed_tokens(tokenizer, path.parent)
                return Tokenizer(tokenizer, directory=path.parent)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


@final
class StreamDecoder:
    """Decodes tokens to text as they come, and never emits half a UTF-8 character.

    The concatenated results of all ``push`` and the final ``flush`` are the text that the tokens
    add to the text before them.

    Args:
        before: tokens of the text that the new tokens continue.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # Tokens already shown that the decoder still needs before the new ones: some decoders
        # treat the first token of a text differently.
        self._shown: list[int] = []
        self._held: list[int] = []
        self._before = ""  # the text of those shown
        for token in self._end_of(before):
            self.push(token)
        # What is held counts as said, incomplete as it may be.
        self._before += self._pending()
        self._shown, self._held = [*self._shown, *self._held], []

    def push(self, token: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""
        if not self._held and (text := self._tokenizer.whole_text(token)):
            self._shown, self._before = [token], text
            return text
        self._held.append(token)
        text = self._pending()
        if not text or text.endswith(REPLACEMENT):
            return "" if len(self._held) < _MOST_HELD else self._release(text)
        # A character that others began is decoded with them.
        begun = self._shown if self._before.endswith(REPLACEMENT) else []
        self._shown, self._held = [*begun, *self._held], []
        self._before = self._tokenizer.decode(self._shown)
        return text

    def flush(self, last: Sequence[int] = ()) -> str:
        """Returns the remaining text at the end, that of the last tokens with it; an incomplete
        character becomes U+FFFD.
        """
        self._held += last
        text = self._pending() if self._held else ""
        self._shown, self._held, self._before = [], [], ""
        return text

    def _end_of(self, tokens: Sequence[int]) -> Sequence[int]:
        """The last tokens of a text, from one on with which a character begins."""
        num = _BEFORE
        while num < min(len(tokens), _MOST_BEFORE):
            if not self._tokenizer.decode(tokens[-num:]).startswith(REPLACEMENT):
                break
            num *= 2
        return tokens[-num:]

    def _release(self, text: str) -> str:
        """Returns the text of tokens that complete no character, without the last of them."""
        last = self._held[-_MOST_PARTS:]
        self._held = self._held[:-_MOST_PARTS]
        pairs = zip(self._pending(), text, strict=False)
        certain = text[
            : sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        ]
        self._shown, self._held = self._held, last
        whole = self._tokenizer.decode([*self._shown, *last])
        self._before = whole[: len(whole) - (len(text) - len(certain))]
        return certain

    def _pending(self) -> str:
        decode = self._tokenizer.decode
        text = decode([*self._shown, *self._held])
        if text.startswith(self._before):
            return text[len(self._before) :]
        # What was incomplete has become a character, or has spoilt what decodes with it.
        for before in (decode(self._shown), self._before.rstrip(REPLACEMENT)):
            if text.startswith(before):
                return text[len(before) :]
        return decode(self._held)


def num_ids(tokenizer: tokenizers.Tokenizer) -> int:
    """Returns a tokenizer's largest id plus one; raises DataError if two tokens share an id."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError("the tokenizer has no tokens at all; copy it again from its source")
    seen: dict[int, str] = {}
    for token, number in vocabulary.items():
        if number in seen:
            raise DataError(
                f"the tokenizer has two tokens of id {number}, {seen[number]!r} and {token!r}; "
                "each needs one of its own"
            )
        seen[number] = token
    return 1 + max(vocabulary.values())


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Parses a ``tokenizer.json`` for the tokenizers library; raises DataError if it is not one."""
    data = read_bytes(path, error=DataError)
    parse_json(data, where=f"tokenizer {path}", error=DataError)
    try:
        with Panics():
            return tokenizers.Tokenizer.from_str(data.decode())
    except DataError as error:  # a malformed file, or what makes the library panic
        raise DataError(
            f"tokenizer {path}: not a tokenizer.json of the tokenizers library "
            f"({' '.join(str(error.__cause__).split())[:200]})"
        ) from error


@final
class Panics:
    """Context that raises any error or panic of the tokenizers library as a DataError.

    It is a class because a generator-based context would take as long as decoding a token.
    """

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise DataError(
                f"the tokenizer's rules fail on this text ({' '.join(str(error).split())[:200]}); "
                "a pattern that backtracks without end, or an empty one, does so: use another "
                "tokenizer"
            ) from error


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE; the same texts always give the same tokenizer.

    Id 0 is the separator, 1 to 256 the bytes. A small corpus may yield fewer tokens than asked
    for; ids the tokenizer never produces are harmless to a model.
    """
    if vocab_size < 257:
        raise DataError(
            f"vocab_size={vocab_size} is too small for byte-level BPE, which needs 256 bytes and "
            "a separator: raise it to at least 257"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(BPE_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer)


def bytes_tokenizer() -> Tokenizer:
    """Makes a tokenizer whose tokens 0 to 255 are the bytes, and token 256 the separator."""
    return Tokenizer(_byte_level())


def split_at_lines(text: str, *, limit: int = _PIECE_CHARS) -> Iterator[str]:
    """Cuts a text after line breaks into pieces of at most ``limit`` characters."""
    start = 0
    while len(text) - start > limit:
        # A line longer than a piece is cut anywhere.
        end = text.rfind("\n", start, start + limit) + 1 or start + limit
        yield text[start:end]
        start = end
    yield text[start:]


def _byte_level() -> tokenizers.Tokenizer:
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([SEPARATOR])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


_BYTES = {character: byte for byte, character in enumerate(_byte_characters())}


def _renamed(name: str) -> str:
    """A name of a special token that no text has, of characters for private use."""
    return "\U000ff000" + "".join(chr(0xFF000 + byte) for byte in name.encode())
