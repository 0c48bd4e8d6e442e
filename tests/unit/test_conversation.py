"""Dialogues and files of prompts: what one prompt alone gives, and a cache that is used."""

import dataclasses
import io
import json
import os
import sys

import chat_model
import pytest

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.cli.chat import errors_to
from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig, TokenizerConfig
from jaxinfra.config.presets import run_preset
from jaxinfra.config.run import RunConfig
from jaxinfra.data.chat_template import load_chat_template
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.serving.conversation import Conversation
from jaxinfra.serving.generate import generate_text
from jaxinfra.serving.load import load, load_template
from jaxinfra.serving.sampling import GREEDY

NEW = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    place = tmp_path_factory.mktemp("model") / "chat"
    config = dataclasses.replace(chat_model.MODEL, max_positions=160)
    chat_model.write_model(place, config=config)
    return place


@pytest.fixture(scope="module")
def model(path):
    return load(path)


def alone(model, path, messages):
    """The answer to a conversation that is computed from its first token."""
    ids = load_chat_template(path).encode(model.tokenizer, messages)
    pieces = generate_text(model, ids, max_new_tokens=NEW, sampling=GREEDY)
    return "".join(piece.text for piece in pieces)


def test_a_run_is_asked_as_it_was_trained(tmp_path):
    """The template's settings of the run hold, but for those that are given."""
    data = DataConfig(
        format="chat",
        chat_template="hf",
        template_settings={"thinks": False},
        tokenizer=TokenizerConfig(kind="bytes"),
    )
    config = codec.normalized(dataclasses.replace(run_preset("tiny"), data=data), RunConfig)
    run = RunDirectory(tmp_path / "run")
    run.create(config, {"chat_template.jinja": b"{{ thinks }}{{ loud }}"})
    assert run.read_config().data.template_settings == {"thinks": False}
    assert load_template(run.path).render([]) == "False"
    assert load_template(run.path, {"loud": 1}).render([]) == "False1"
    assert load_template(run.path, {"thinks": True}).render([]) == "True"
    with pytest.raises(ConfigError, match="has no setting 'think'; did you mean 'thinks'"):
        load_template(run.path, {"think": True})


@pytest.mark.slow
def test_a_dialogue_is_what_its_turns_are_alone_and_computes_new_tokens_only(model, path):
    talk = Conversation(
        model, load_chat_template(path), sampling=GREEDY, max_new_tokens=NEW, context=160
    )
    first = "".join(talk.ask("hello there, how is the weather"))
    assert first == alone(model, path, talk.messages[:1])
    assert talk.num_cached == 0
    second = "".join(talk.ask("and tomorrow"))
    assert second == alone(model, path, talk.messages[:3])
    assert talk.num_cached >= 16  # pages of what was said before
    assert [each["role"] for each in talk.messages] == ["user", "assistant"] * 2
    talk.forget()
    assert not talk.messages
    with pytest.raises(DataError):
        talk.ask("x" * 200)
    assert not talk.messages  # it was not taken


@pytest.mark.slow
def test_the_command_reads_messages_and_writes_answers(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/forget\nhello\n/quit\nnever read\n"))
    options = ["--max-new-tokens", str(NEW), "--temperature", "0", "--context", "96"]
    assert main(["chat", str(path), *options]) == 0
    said = capsys.readouterr().out
    half = len(said) // 2
    assert said[:half] == said[half:]  # forgotten, the second is the first again
    assert said


def test_a_model_without_a_template_is_told_what_to_do(tmp_path, capsys):
    assert main(["chat", str(tmp_path)]) == 1
    assert "--plain" in capsys.readouterr().err


def test_what_compilers_print_stays_out_of_a_dialogue(tmp_path, capfd):
    log = tmp_path / "cache" / "chat.log"
    with errors_to(log):
        os.write(2, b"W0000 slow operation\n")
    os.write(2, b"ours\n")
    assert log.read_text() == "W0000 slow operation\n"
    assert capfd.readouterr().err == "ours\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_of_prompts_is_answered_in_its_order(name, model, path, tmp_path):
    prompts = ["hello", "weather and", "el"]
    lines = [json.dumps({"prompt": each}) if name == "a.jsonl" else each for each in prompts]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    words = ["generate", str(path), "--prompts", str(tmp_path / name), "--chat"]
    words += ["--max-new-tokens", str(NEW), "--temperature", "0", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [each["prompt"] for each in found] == prompts
    for each in found:
        messages = [{"role": "user", "content": each["prompt"]}]
        assert each["text"] == alone(model, path, messages)
        assert each["finish"] in ("length", "eos")
    assert main(words) == 1  # what is there is not written over


@pytest.mark.slow
def test_equal_prompts_of_a_file_get_texts_of_their_own(path, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello\n" * 3)
    words = ["generate", str(path), "--prompts", str(tmp_path / "a.txt"), "--temperature", "1.5"]
    assert main([*words, "--max-new-tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({json.loads(line)["text"] for line in lines}) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ('{"text": 3}\n', "neither a"), ("[1]\n", "is no")],
    ids=["empty", "field", "list"],
)
def test_bad_files_of_prompts(text, words, path, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(text)
    assert main(["generate", str(path), "--prompts", str(tmp_path / "a.jsonl")]) == 1
    assert words in capsys.readouterr().err
