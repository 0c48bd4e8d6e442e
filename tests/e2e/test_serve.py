"""What the server answers: OpenAI's own client, its page, its figures."""

import argparse
import concurrent.futures
import json
import re
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest
from e2e.served_letters import BASE, CONTEXT, KEY, post

from experiments.bench.serving import serve as bench
from experiments.pictures.serving import draw
from jaxinfra.errors import ConfigError


def test_completions_are_what_the_model_says(running, client):
    answer = client.completions.create(
        model="letters", prompt=["abc", "xyz"], max_tokens=12, temperature=0
    )
    assert [c.text for c in answer.choices] == [running.alone(p, new=12) for p in ("abc", "xyz")]
    assert answer.usage.prompt_tokens == 8
    assert answer.usage.completion_tokens <= 24
    ids = client.completions.create(
        model="letters", prompt=[256, 97, 98, 99], max_tokens=12, temperature=0, echo=True
    )
    assert ids.choices[0].text.endswith(answer.choices[0].text)
    assert "abc" in ids.choices[0].text


def test_streams_join_to_the_answer(running, client):
    settings = {"model": "letters", "prompt": "abc", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**settings)
    chunks = [
        *client.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    ]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == (
        whole.choices[0].finish_reason
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_choices_are_seeded_and_differ(client):
    def drawn(seed):
        answer = client.chat.completions.create(
            model="letters",
            messages=[{"role": "user", "content": "hi"}],
            n=3,
            max_tokens=8,
            temperature=1.5,
            seed=seed,
        )
        return [choice.message.content for choice in answer.choices]

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) != first
    assert len(set(first)) == 3


def test_equal_prompts_of_a_call_get_texts_of_their_own(client):
    settings = dict(
        model="letters", max_tokens=12, temperature=1.5, extra_body={"ignore_eos": True}
    )
    together = client.completions.create(prompt=["ab"] * 3, seed=5, **settings)
    assert len({each.text for each in together.choices}) == 3
    alone = client.completions.create(prompt="ab", n=3, seed=5, **settings)
    assert [each.text for each in alone.choices] == [each.text for each in together.choices]


def test_a_conversation_is_rendered_with_its_tools(running, client):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = client.chat.completions.create(
        model="letters", messages=messages, tools=[tool], max_tokens=5, temperature=0
    )
    assert answer.usage.prompt_tokens == len("look;u:hi;a:")
    stream = client.chat.completions.create(
        model="letters", messages=messages, tools=[tool], max_tokens=5, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("format_", "check"),
    [
        (
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {
                        "type": "object",
                        "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "boolean"}},
                        "required": ["a", "b"],
                        "additionalProperties": False,
                    },
                },
            },
            lambda text: json.loads(text)["a"] in ("yes", "no"),
        ),
        ({"type": "regex", "regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6),
        ({"type": "grammar", "grammar": 'start: "x" | "yy"'}, lambda text: text in ("x", "yy")),
    ],
    ids=["json_schema", "regex", "grammar"],
)
def test_structured_output_fits(client, format_, check):
    answer = client.completions.create(
        model="letters",
        prompt="abc",
        max_tokens=60,
        temperature=1.0,
        n=3,
        extra_body={"response_format": format_},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert check(choice.text), choice.text


def test_log_probabilities(running, client):
    """As evaluation harnesses ask for them: of a prompt that is echoed, token by token."""
    settings = {"model": "letters", "prompt": "abc", "max_tokens": 3, "temperature": 0}
    answer = client.completions.create(**settings, echo=True, logprobs=2)
    told = answer.choices[0].logprobs
    assert "".join(told.tokens[:4]).endswith("abc")
    assert told.token_logprobs[0] is None
    assert len(told.token_logprobs) == len(told.top_logprobs) == 4 + answer.usage.completion_tokens
    for value, top in zip(told.token_logprobs[4:], told.top_logprobs[4:], strict=True):
        assert value == max(top.values()) <= 0
    # A token that is not among the most likely is told behind them.
    pairs = [*zip(told.tokens, told.top_logprobs, strict=True)][1:]
    assert all(token in top for token, top in pairs)
    assert {len(top) for _, top in pairs} == {2, 3}
    chunks = [*client.completions.create(**settings, logprobs=2, stream=True)]
    streamed = [x for c in chunks for x in c.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(told.token_logprobs[4:], abs=1e-5)
    chat = client.chat.completions.create(
        model="letters",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=1,
        temperature=0,
    )
    content = chat.choices[0].logprobs.content
    assert [each.logprob for each in content] == [each.top_logprobs[0].logprob for each in content]


def test_a_harness_scores_texts_by_echoed_prompts(running, client):
    """As lm-eval's local-completions does: token ids, several at once, a context's end known by its
    length, nothing drawn that counts.
    """
    contexts, texts = ((256, 97, 98), (256,)), ((99, 100), (120, 121, 122))
    prompts = [[*context, *text] for context, text in zip(contexts, texts, strict=True)]
    asked = {"model": "letters", "prompt": prompts, "temperature": 0, "echo": True, "logprobs": 1}
    one, none = (client.completions.create(**asked, max_tokens=new, seed=1) for new in (1, 0))
    for number, (ids, context) in enumerate(zip(prompts, contexts, strict=True)):
        logits = np.asarray(running.decoder(np.array([ids], np.int32)))[0, :-1, :257]
        true = np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))
        told, alone = (answer.choices[number].logprobs for answer in (one, none))
        scored = slice(len(context), -1)  # without what was drawn
        want = [true[at - 1, ids[at]] for at in range(len(context), len(ids))]
        np.testing.assert_allclose(told.token_logprobs[scored], want, atol=1e-4)
        greedy = [
            value == max(top.values())
            for value, top in zip(
                told.token_logprobs[scored], told.top_logprobs[scored], strict=True
            )
        ]
        assert greedy == [
            ids[at] == np.argmax(true[at - 1]) for at in range(len(context), len(ids))
        ]
        assert alone.token_logprobs == told.token_logprobs[:-1]
        assert len(alone.tokens) == len(ids)
    assert none.usage.completion_tokens == 0
    assert [choice.finish_reason for choice in none.choices] == ["length"] * 2
    assert none.choices[0].text == running.model.tokenizer.decode(prompts[0])


def test_settings_reach_the_draw(client):
    settings = {"model": "letters", "prompt": "abc", "max_tokens": 4, "temperature": 0}
    biased = client.completions.create(**settings, logit_bias={"65": 100})
    assert biased.choices[0].text == "AAAA"
    penalized = client.completions.create(
        **settings, logit_bias={"65": 99.9, "66": 99}, presence_penalty=2
    )
    assert set(penalized.choices[0].text) == {"A", "B"}


def test_rules_of_tokens_reach_the_draw(running, client):
    """An end that is likely, words that are forbidden, and the only ids that may come."""
    ends = {"logit_bias": {"256": 100}}
    asked = {"model": "letters", "prompt": "abc", "max_tokens": 9, "temperature": 0}

    def ask(**more):
        return client.completions.create(**asked | more).choices[0]

    assert ask(**ends).text == ""
    longer = ask(**ends, extra_body={"min_tokens": 5, "return_token_ids": True})
    assert len(longer.token_ids) == 6
    assert longer.token_ids[-1] == 256
    assert longer.prompt_token_ids == [256, 97, 98, 99]
    likely = {"logit_bias": {"65": 100, "66": 50}}
    assert ask(**likely, extra_body={"bad_words": ["AAA"]}).text == "AABAABAAB"
    assert set(ask(extra_body={"allowed_token_ids": [120, 121]}).text) <= {"x", "y"}
    assert ask(extra_body={"structured_outputs": {"choice": ["one", "two"]}}).text in ("one", "two")
    assert ask(extra_body={"guided_regex": "[ab]{3}"}).finish_reason == "stop"
    text = running.alone("abc", new=12)
    stop = text[2:4]
    kept = ask(stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert kept.text == text[: text.index(stop) + len(stop)]
    letter = next(each for each in text[1:] if each.isascii())
    last = {"stop_token_ids": [ord(letter)]}
    assert ask(extra_body=last).text == text[: text.index(letter)]
    kept = ask(extra_body=last | {"include_stop_str_in_output": True})
    assert kept.text == text[: text.index(letter) + 1]
    assert ask(**ends, extra_body={"include_stop_str_in_output": True}).text == ""
    late = ask(stop=[text[0]], extra_body={"min_tokens": 3}).text
    assert len(late) >= 3


def test_prompts_are_scored_shortened_and_salted(running, client):
    asked = {"model": "letters", "prompt": "abcd" * 8, "max_tokens": 1, "temperature": 0}
    told = client.completions.create(**asked, echo=True, logprobs=1).choices[0].logprobs
    scored = client.completions.create(**asked, extra_body={"prompt_logprobs": 1}).choices[0]
    assert scored.prompt_logprobs[0] is None
    ids = [256, *asked["prompt"].encode()]
    values = [
        each[str(token)]["logprob"]
        for token, each in zip(ids, scored.prompt_logprobs, strict=True)
        if each
    ]
    assert values == pytest.approx(told.token_logprobs[1:33], abs=1e-5)
    short = client.completions.create(**asked, extra_body={"truncate_prompt_tokens": 5})
    assert short.usage.prompt_tokens == 5

    def cached(salt):
        answer = client.completions.create(**asked, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0
    several = client.completions.create(**asked, n=4, extra_body={"cache_salt": "c"})
    assert several.usage.prompt_tokens_details.cached_tokens == 0


def test_a_conversation_goes_on_within_its_last_message(running, client):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    asked = {"model": "letters", "messages": messages, "max_tokens": 3, "temperature": 0}

    def prompt(**more):
        body = {"return_token_ids": True} | more
        answer = client.chat.completions.create(**asked, extra_body=body)
        return running.model.tokenizer.decode(answer.prompt_token_ids)

    assert prompt() == "u:hi;a:so;a:"
    assert prompt(add_generation_prompt=False) == "u:hi;a:so;"
    assert prompt(continue_final_message=True) == "u:hi;a:so"


def test_stop_strings_end_the_text_before_them(running, client):
    text = running.alone("abc", new=12)
    stop = text[4:6]
    answer = client.completions.create(
        model="letters", prompt="abc", max_tokens=12, temperature=0, stop=[stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_request_names_an_adapter_as_its_model(running, client):
    """In one batch with the model itself, and streamed; each says its own."""

    def ask(model):
        return client.completions.create(model=model, prompt="adapt", max_tokens=9, temperature=0)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(ask, ["letters", "tuned", "letters", "tuned"])]
    plain = running.alone("adapt", new=9)
    tuned = running.alone("adapt", new=9, decoder=running.adapted)
    assert plain != tuned
    assert [answer.choices[0].text for answer in answers] == [plain, tuned, plain, tuned]
    assert [answer.model for answer in answers] == ["letters", "tuned", "letters", "tuned"]
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="tuned", messages=messages, max_tokens=4)
    assert chat.model == "tuned"


def test_the_page_needs_nothing_from_elsewhere(running):
    with urllib.request.urlopen(f"{running.server.address}/") as answer:
        page = answer.read().decode()
    assert "/v1/chat/completions" in page
    assert not re.search(r"""(?:src|href)=(?!"data:)|https?:|@import""", page)


def test_the_tokenizer_is_told_from_the_models_files(running):
    request = urllib.request.Request(
        f"{running.server.address}/tokenizer_info", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request) as answer:
        end = running.model.tokenizer.decode([256])
        told = {"tokenizer_class": "Letters", "bos_token": end, "eos_token": end}
        assert json.loads(answer.read()) == told


def test_tokens_are_counted(running):
    _, answer, _ = post(running, "/tokenize", {"prompt": "abc"})
    assert answer == {"count": 4, "max_model_len": CONTEXT, "tokens": [256, 97, 98, 99]}
    _, answer, _ = post(running, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert answer["count"] == len("u:x;a:")
    asked = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"loud": True}}
    assert post(running, "/tokenize", asked)[1]["count"] == len("u:x;a:!")
    status, answer, _ = post(running, "/tokenize", asked | {"chat_template_kwargs": {"low": True}})
    assert status == 400
    assert "no setting 'low'" in answer["error"]["message"]
    _, answer, _ = post(running, "/detokenize", {"tokens": [97, 256]})
    end = running.model.tokenizer.decode([256])
    assert answer == {"prompt": f"a{end}"}
    asked = {"prompt": end, "add_special_tokens": False}
    assert post(running, "/tokenize", asked)[1]["tokens"] == [256]
    assert post(running, "/tokenize", asked | {"prompt": ""})[1]["tokens"] == []


def test_metrics_have_the_names_of_dashboards(running, client):
    client.completions.create(**BASE)
    request = urllib.request.Request(
        f"{running.server.address}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_success_total",
        "vllm:prefix_cache_hits_total",
    ):
        assert f"{name}{{" in text, name
    assert 'jaxinfra:late_compiles_total{model_name="letters"} 0.0' in text


def test_the_load_generator_measures_what_clients_wait(running, tmp_path, capsys):
    args = argparse.Namespace(
        api_key=KEY,
        num_ids=256,
        rates=[10.0],
        concurrency=[2],
        seconds=0.5,
        settle=0.0,
        seed=0,
        shared_prefix=8,
        prompt_tokens=bench.Lengths(text="4:12"),
        new_tokens=bench.Lengths(text="~6"),
        first_ms=10_000.0,
        token_ms=10_000.0,
        whole=False,
    )
    rows = bench.run(running.server.address, args)
    assert [row["load"] for row in rows] == ["10 requests/s", "2 clients"]
    for row in rows:
        assert row["answered"] + row["refused"] == row["requests"] > 0
        assert row["failed"] == 0
        assert row["first_token_ms"]["p50"] <= row["whole_ms"]["p99"]
        assert row["goodput_requests_s"] == row["requests_s"] > 0
    assert capsys.readouterr().out.count("tokens/s") == 2
    document = {
        "environment": {"device": "cpu"},
        "lengths": {"prompt": "4:12", "new": "~6"},
        "rows": rows,
    }
    draw(document, tmp_path / "load.svg")
    assert "2 clients" in (tmp_path / "load.svg").read_text()
    with pytest.raises(ConfigError, match="write 128, 64:256"):
        bench.Lengths(text="many").draw(np.random.default_rng(0))
