"""Tokens as text by ``tokenizers`` called directly: four kinds of decoders, random texts."""

import random
import time

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.serving.engine.requests import TokenScore
from jaxinfra.serving.engine.text import TextStream
from jaxinfra.serving.http.answers import ChoicePart, CompletionForm
from jaxinfra.serving.http.bodies import ChatBody, CompletionBody
from jaxinfra.serving.http.chat import ChatTurn
from jaxinfra.serving.http.chat_answers import ChatForm

LETTERS = "abé日🙂 \n.,'"
TEXTS = st.text(LETTERS, min_size=1, max_size=24) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\u2581\0"), min_size=1
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "</s>"]


def corpus(seed):
    draw = random.Random(seed)
    return ["".join(draw.choice(LETTERS[:-3]) for _ in range(12)) for _ in range(60)]


def byte_level(seed):
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=seed % 2 == 0, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(corpus(seed), trainer)
    return made


def byte_fallback(seed):
    letters = ["▁", *"abcdefgh."]
    pairs = [("▁", "a"), ("a", "b")][: 1 + seed % 2]
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *BYTES, *letters])}
    for pair in pairs:
        vocab["".join(pair)] = len(vocab)
    model = models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(SPECIAL)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    words, ends = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([words, decoders.ByteFallback(), decoders.Fuse(), ends])
    return made


def unigram(seed):
    draw = random.Random(seed)
    pieces = ["▁", *"ab.é", "▁a", "ab", "▁b"]
    vocab = [(piece, 0.0) for piece in SPECIAL] + [(byte, -9.0) for byte in BYTES]
    vocab += [(piece, -draw.random() - 1) for piece in pieces]
    made = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def word_piece(seed):
    pieces = [*SPECIAL, "a", "##a", "b", "##b", "##ab", "é", "##é", "日", ".", "'", ",", "🙂"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=seed % 2 == 0)
    return made


def word_ends(seed):
    pieces = [*SPECIAL, *"abé日.'", *(f"{each}</w>" for each in ("a", "b", "ab", "é", "日", "."))]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("a", "b</w>")],
        unk_token="<unk>",
        end_of_word_suffix="</w>",
    )
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    return made


def ctc(seed):
    pieces = [*SPECIAL, "|", *"abé日.'", "<pad>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.add_special_tokens(SPECIAL)
    made.normalizer = normalizers.Replace(" ", "|")
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = decoders.CTC(cleanup=seed % 2 == 0)
    return made


KINDS = {
    f"{make.__name__} {seed}": make(seed)
    for make in (byte_level, byte_fallback, unigram, word_piece, word_ends, ctc)
    for seed in range(2)
}


def bytes_of(tokenizer, ids):
    """The bytes of tokens, each after the one before it."""
    return b"".join(map(tokenizer.token_bytes, ids, [None, *ids[:-1]]))


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(text=TEXTS, cut=st.floats(0, 1), stops=st.booleans())
@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
def test_tokens_are_text_as_the_library_has_it(kind, text, cut, stops):
    library, ours = KINDS[kind], Tokenizer(tokenizers.Tokenizer.from_str(KINDS[kind].to_str()))
    ids = library.encode(text, add_special_tokens=False).ids
    whole = library.decode(ids, skip_special_tokens=False)
    assert ours.encode(text).tolist() == ids
    assert ours.decode(ids) == whole
    data = bytes_of(ours, ids)
    assert data.decode().lstrip(" ") == whole.lstrip(" ")
    num = int(cut * len(ids))
    stream = TextStream(ours, ids[:num], ["stop that does not come"] if stops else [])
    pieces = [stream.push(token) for token in ids[num:]]
    streamed = "".join(pieces) + stream.flush()
    # What the prompt has of a character that it breaks off in is not said again.
    said = bytes_of(ours, ids[:num]).decode(errors="ignore")
    assert streamed == (data.decode()[len(said) :] if num else whole)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_makes_no_character_costs_as_any_other(kind):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(KINDS[kind].to_str()))
    part = next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe6"), 0)
    stream = TextStream(tokenizer, [1], [])
    began, num = time.perf_counter(), 4000
    pieces = [stream.push(part) for _ in range(num)]
    text = "".join(pieces) + stream.flush()
    assert time.perf_counter() - began < 5.0  # quadratic, it takes minutes
    if tokenizer.token_bytes(part) == b"\xe6":
        assert text == "\ufffd" * num
        assert max(map(len, pieces)) < 16


def test_prompts_that_break_off_are_not_repeated():
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(KINDS["byte_fallback 0"].to_str()))
    smile = [tokenizer._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    a = tokenizer._tokenizer.token_to_id("▁a")

    def said(prompt, *new):
        stream = TextStream(tokenizer, prompt, [])
        return "".join(stream.push(token) for token in new) + stream.flush()

    assert said([a, *smile, smile[0]], a, a) == " a a"
    assert said([a, *smile, *smile[:2]], *smile[2:], a) == "🙂 a"
    assert said(smile * 20, *smile) == "🙂"
    assert said([*smile[1:], *smile * 3], *smile, smile[0]) == "🙂\ufffd"
    assert said([smile[2]] * 40, a) == " a"


def part_of(tokens, tops, prompt=()):
    scores = [TokenScore(logprob=-1.0, top=tuple((t, -1.0) for t in top)) for top in tops]
    given = max(len(prompt) - 1, 0)
    part = ChoicePart(text="", prompt=tuple(prompt), tokens=list(tokens), scores=scores[given:])
    part.prompt_scores = scores[:given]
    return part


def test_log_probabilities_tell_tokens_apart():
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(KINDS["byte_fallback 0"].to_str()))
    ids = {name: tokenizer._tokenizer.token_to_id(name) for name in ("a", "▁a", "<0x61>", "<0xE6>")}
    other = tokenizer._tokenizer.token_to_id("<0xE7>")
    body = CompletionBody(prompt="x", logprobs=5)
    form = CompletionForm("m", [(0, ids["a"])], body, tokenizer=tokenizer, echoes=None)
    part = part_of([ids["▁a"]], [[*ids.values(), other]])
    told = form.choice(0, part)["logprobs"]
    assert told["tokens"] == [" a"]
    alike = f"token_id:{ids['<0x61>']}"
    assert [*told["top_logprobs"][0]] == ["a", " a", alike, "bytes:\\xe6", "bytes:\\xe7"]
    asked = ChatBody(messages=[{}], logprobs=True, top_logprobs=5)
    chat = ChatForm("m", ChatTurn(prompt=(0,)), asked, tokenizer=tokenizer)
    (entry,) = chat.choice(0, part)["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == (" a", [32, 97])
    assert [each["bytes"] for each in entry["top_logprobs"]] == (
        [[97], [32, 97], [97], [0xE6], [0xE7]]
    )


@pytest.mark.parametrize("least", range(7))
def test_a_stop_string_counts_where_it_ends(least):
    """Each token is one byte of "abcdefg". The stop string "bcd" ends with the fourth: it ends
    the answer unless more than four tokens have to come first. Then "g" does.
    """
    stream, text = TextStream(bytes_tokenizer(), [1], ["bcd", "g"]), ""
    for number, token in enumerate(b"abcdefg", start=1):
        text += stream.push(token, may_stop=number >= least)
        if stream.is_stopped:
            break
    assert text + stream.flush() == ("a" if least <= 4 else "abcdef")
    assert number == (4 if least <= 4 else 7)


def test_a_stop_string_that_ended_too_early_does_not_count_later():
    stream = TextStream(bytes_tokenizer(), [1], ["bcx", "b", "e"])
    pieces = [stream.push(token, may_stop=place >= 2) for place, token in enumerate(b"abcde")]
    assert "".join(pieces) == "abcd"
    assert stream.is_stopped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_fit_the_text(kind, echo):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(KINDS[kind].to_str()))
    prompt, new = tokenizer.encode("ab ab").tolist(), tokenizer.encode("b 日.a🙂é").tolist()
    end = tokenizer.eos_id
    text = tokenizer.decode(prompt)
    body = CompletionBody(prompt="x", logprobs=0, echo=echo)
    form = CompletionForm(
        "m", [(end, *prompt)], body, tokenizer=tokenizer, echoes=[text] if echo else None
    )
    stream, whole = TextStream(tokenizer, [end, *prompt], []), text if echo else ""
    whole += "".join(stream.push(token) for token in new) + stream.flush()
    given = [end, *prompt] if echo else []
    first, rest = new[:3], new[3:]
    tops = [[] for _ in (*given[1:], *first)]
    told = form.choice(0, part_of(first, tops, given))["logprobs"]["text_offset"]
    told += form.choice(0, part_of(rest, [[] for _ in rest]))["logprobs"]["text_offset"]
    tokens = [*given, *new]
    assert len(told) == len(tokens)
    before = [None if echo else prompt[-1], *tokens]
    for last, token, at, after in zip(before, tokens, told, [*told[1:], len(whole)], strict=False):
        data = tokenizer.token_bytes(token, last)
        if token != end and whole[at:after] and not tokenizer.spelled(token).startswith("bytes:"):
            assert whole[at:after].strip() in data.decode()
