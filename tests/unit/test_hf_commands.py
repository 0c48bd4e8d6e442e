"""A run exported to Hugging Face and used from there: generate and evaluate give the same."""

import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import processors

import jaxinfra
from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.cli import generate as cli_generate
from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig, TokenizerConfig, TokenizerKind
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.run import CheckpointConfig, RunConfig, TrainingConfig
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.errors import DataError
from jaxinfra.serving.conversation import Conversation
from jaxinfra.serving.engine.requests import RequestProgress
from jaxinfra.serving.load import load
from jaxinfra.serving.sampling import GREEDY
from jaxinfra.training.job import make_job
from tests.small_models import dense

MODEL = dense(vocab_size=260, model_dim=16, heads=(2, 1), hidden_dim=24, init_std=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "tiny"
    path.mkdir()
    text = path.parent / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    config = RunConfig(
        model=MODEL,
        data=DataConfig(
            source=str(text),
            heldout_source=str(text),
            tokenizer=TokenizerConfig(kind=TokenizerKind.BYTES),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
        training=TrainingConfig(steps=1, batch_size=4, sequence_length=64),
    )
    (path / "config.json").write_text(codec.to_json(config))
    bytes_tokenizer().save(path / "tokenizer.json")
    identity = {"model": codec.to_dict(MODEL)}
    with Checkpointer(path / "checkpoints", CheckpointConfig(), identity=identity) as saver:
        saver.save(1, make_job(config).initialize(), data_state={})
    return path


@pytest.fixture(scope="module")
def exported(run):
    assert main(["convert", str(run), str(run.parent / "hf")]) == 0
    return run.parent / "hf"


@pytest.mark.slow  # losses agree below; `test_hf_convert.py` has the weights to the bit
def test_an_exported_run_gives_the_same_logits(run, exported):
    ids = np.arange(30, dtype=np.int32)[None]
    of_run, of_export = (
        jax.jit(jaxinfra.load_model(path).__call__)(ids) for path in (run, exported)
    )
    np.testing.assert_array_equal(of_run, of_export)


def test_an_exported_run_separates_texts_as_in_training(exported):
    tokenizer = Tokenizer.load(exported / "tokenizer.json")
    assert (tokenizer.prefix_ids, tokenizer.end_ids) == ((256,), (256,))
    # As any reader of tokenizer.json does it.
    ids = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json")).encode("ab").ids
    assert ids == [256, *b"ab"]


@pytest.mark.slow
def test_generate_in_a_chat_template(exported, tmp_path, capsys):
    options = ["--max-new-tokens", "12", "--temperature", "0"]
    assert main(["generate", str(exported), "--prompt", "fox", "--chat", *options]) == 1
    assert "ships no chat template" in capsys.readouterr().err
    copy = shutil.copytree(exported, tmp_path / "copy")
    template = "{{ bos_token }}The {{ messages[0].content }}"
    (copy / "chat_template.jinja").write_text(template)
    texts = []
    for prompt in (["--prompt", "The fox"], ["--prompt", "fox", "--chat"]):
        assert main(["generate", str(copy), *prompt, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"


@pytest.mark.slow
def test_evaluate_agrees(run, exported, tmp_path, capsys):
    losses = []
    for path, *mesh in ([run], [exported], [exported, "--mesh", "fsdp=8"]):
        text = str(run.parent / "text.txt")
        options = ["--data", text, "--cache", str(tmp_path / "cache"), "--json", *mesh]
        assert main(["evaluate", str(path), *options]) == 0
        losses.append(json.loads(capsys.readouterr().out))
    assert set(losses[0]) - set(losses[1]) == {"step"}
    for other in losses[1:]:
        assert other["heldout_loss"] == pytest.approx(losses[0]["heldout_loss"], rel=1e-6)
        assert other["tokens"] == losses[0]["tokens"]


def one_token_more(model):
    values = json.loads((model / "tokenizer.json").read_text())
    values["model"]["vocab"]["more"] = 260
    (model / "tokenizer.json").write_text(json.dumps(values))


def ends_nowhere(model):
    (model / "generation_config.json").write_text('{"eos_token_id": [256, 260]}')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(one_token_more, ""), (ends_nowhere, "ends with token 260")],
    ids=["a token more than the model has", "an end token that the model lacks"],
)
def test_ids_are_held_against_the_vocabulary(exported, tmp_path, capsys, spoil, words):
    copy = shutil.copytree(exported, tmp_path / "copy")
    spoil(copy)
    code = main(["generate", str(copy), "--prompt", "a", "--max-new-tokens", "1"])
    assert code == (spoil is ends_nowhere)
    assert words in capsys.readouterr().err
    if spoil is one_token_more:
        out, text = tmp_path / "out", tmp_path / "text.txt"
        assert main(["convert", str(copy), str(out)]) == 0
        assert (out / "tokenizer.json").read_bytes() == (copy / "tokenizer.json").read_bytes()
        text.write_text("a text without it")
        options = ["--data", str(text), "--cache", str(tmp_path / "cache")]
        assert main(["evaluate", str(copy), *options]) == 0


@pytest.mark.slow  # by default a server's prompts
@pytest.mark.parametrize("kind", ["run", "exported"])
def test_ids_beyond_the_model_are_refused_in_prompts(run, exported, tmp_path, capsys, kind):
    """Of a tokenizer with a token more than the model: ``generate``, ``chat`` and a server."""
    copy = shutil.copytree({"run": run, "exported": exported}[kind], tmp_path / "copy")
    values = json.loads((copy / "tokenizer.json").read_text())
    for token in range(257, 261):
        added = values["added_tokens"][0] | {"id": token, "content": f"<{token}>"}
        values["added_tokens"].append(added | {"special": False})
    (copy / "tokenizer.json").write_text(json.dumps(values))
    model = load(copy)
    assert (model.num_ids, model.tokenizer.vocab_size) == (260, 261)
    assert model.prompt("a<259><260>")[-2:] == [259, 260]
    refusal = "..260, the model's vocabulary is 0..259; encode it with the model's tokenizer"

    assert main(["generate", str(copy), "--prompt", "a<260>"]) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert refusal in said
    assert main(["generate", str(copy), "--prompt", "a<259>", "--max-new-tokens", "2"]) == 0

    conversation = Conversation(model, None, sampling=GREEDY, max_new_tokens=2, context=64)
    with pytest.raises(DataError, match=re.escape(refusal)):
        conversation.ask("a<260>")
    assert conversation.messages == []
    assert "".join(conversation.ask("a<259>")) or conversation.end


def test_steps_belong_to_runs(exported, capsys):
    for command, *options in (["evaluate"], ["generate", "--prompt", "x"]):
        assert main([command, str(exported), "--step", "3", *options]) == 1
        assert "a single model, w" in capsys.readouterr().err


def test_end_tokens_are_the_models_own(exported, tmp_path):
    copy = shutil.copytree(exported, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [65, 256]}))
    tokenizer = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save(str(copy / "tokenizer.json"))
    model = load(copy)
    assert (model.prefix_ids, model.tokenizer.end_ids) == ((), (256, 65))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_do_not_reach_a_terminal(
    run, exported, capsys, monkeypatch, is_terminal
):
    drawn = [RequestProgress(0, text=text) for text in ("a\x1b[2J\tb\n", "c\x07")]
    monkeypatch.setattr(cli_generate, "generate_text", lambda *_, **__: iter(drawn))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert main(["generate", str(exported), "--prompt", "x"]) == 0
    shown = "a\ufffd[2J\tb\nc\ufffd\n" if is_terminal else "a\x1b[2J\tb\nc\x07\n"
    assert capsys.readouterr().out == shown
