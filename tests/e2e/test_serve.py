"""The server as clients meet it: OpenAI's own client, raw sockets, and signals."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import pathlib
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import serve as bench
from experiments.pictures.serving import draw
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.core.errors import ConfigError
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.gym import served_model
from jaxinfra.models.decoder import Decoder
from jaxinfra.models.definition import by_path, define_model, merged
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.adapter_bank import AdapterBank
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.generate import generate
from jaxinfra.serving.http.app import application
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.http.service import Service, ServiceLimits
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import GREEDY
from jaxinfra.weights.trained_adapters import Adapters, host_adapters

KEY = "secret"
CONTEXT = 256
CONFIG = dataclasses.replace(served_model.CONFIG, vocab_size=257, max_positions=CONTEXT)
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }};{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def loaded_model() -> LoadedModel:
    """Random weights, and logits in which ASCII letters stand out, so that text is text."""
    definition = define_model(CONFIG, execution_on())
    rng = np.random.default_rng(0)
    values = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.4, leaf.shape), leaf.dtype), definition.shapes
    )
    return LoadedModel(
        definition=definition,
        parameters=values,
        tokenizer=bytes_tokenizer(),
        config=None,
        step=None,
    )


LORA = LoraConfig(rank=1, alpha=4.0, targets=("query", "down"))


def adapted_model(model: LoadedModel) -> tuple[Decoder, Adapters]:
    """The model with an adapter that changes what it says, and that adapter."""
    whole = define_model(CONFIG, execution_on(), lora=LORA)
    rng = np.random.default_rng(7)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0.0, 0.6, x.shape), x.dtype),
        whole.freeze(model.definition.shapes).initialize(jax.random.key(0)),
    )
    return whole.bind(merged(model.parameters, adapters)), host_adapters(LORA, by_path(adapters))


class Running:
    """A server in a thread, with what it serves."""

    def __init__(self, directory: pathlib.Path, *, max_running: int = 4, is_warm: bool = True):
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        self.model = loaded_model()
        self.decoder = self.model.decoder
        self.adapted, adapters = adapted_model(self.model)
        self.engine = Engine.of(
            self.model,
            bank=AdapterBank(names=("tuned",), adapters=(adapters,)),
            options=EngineOptions(
                max_running=max_running,
                page_size=8,
                max_step_tokens=96,
                chunk_sizes=(64,),
                max_piece_rows=1,
            ),
        )
        if is_warm:
            self.engine.warm_up()
        self.thread = EngineThread(self.engine, max_open=8)
        self.thread.start()
        service = Service(
            self.model,
            self.thread,
            path=directory,
            name="letters",
            limits=ServiceLimits(max_body_bytes=20_000, max_continuations=6),
        )
        options = ServerOptions(port=0, api_key=KEY, drain_s=20)
        app = application(service, api_key=KEY)
        self.server = HttpServer(app, options, drain=self.thread.drain)

    def alone(self, prompt: str, *, new: int, decoder: Decoder | None = None) -> str:
        ids = [256, *prompt.encode()]
        tokens = generate(
            decoder or self.decoder,
            [ids],
            max_new_tokens=new,
            sampling=GREEDY,
            eos_ids=[256],
            num_ids=257,
        )
        return self.model.tokenizer.decode([t.token for t in tokens if t.token != 256])


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    served = Running(tmp_path_factory.mktemp("model"))
    with served.server.running():
        yield served
    served.thread.close()


@pytest.fixture(scope="module")
def client(running):
    import openai  # a second of every worker's start, where it stands above

    with openai.OpenAI(base_url=f"{running.server.address}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def wait_until_idle(running):
    deadline = time.monotonic() + 30
    while running.thread.num_open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running.thread.num_open == 0
    assert running.engine.scheduler.allocator.num_held == 0


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


def test_stop_strings_end_the_text_before_them(running, client):
    text = running.alone("abc", new=12)
    stop = text[4:6]
    answer = client.completions.create(
        model="letters", prompt="abc", max_tokens=12, temperature=0, stop=[stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def post(running, path, body, *, key=KEY):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(f"{running.server.address}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


BASE = {"model": "letters", "prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", BASE | {"prompt": "x" * 300}, 400, "301 tokens.*context is 256"),
        ("/v1/completions", BASE | {"model": "other"}, 404, "'other' is not served here"),
        ("/v1/completions", BASE | {"n": 7}, 400, "7 continuations; this server takes 6"),
        ("/v1/completions", BASE | {"temperature": -1}, 400, "temperature"),
        ("/v1/completions", BASE | {"best_of": 2}, 400, "best_of"),
        ("/v1/completions", BASE | {"stop_token_ids": [2, -3]}, 400, r"stop ids -3\.\.2"),
        ("/v1/completions", BASE | {"prompt": []}, 400, "list of prompts is empty"),
        ("/v1/completions", BASE | {"stream_options": {}}, 400, "stream_options are of a stream"),
        ("/v1/completions", b"{", 400, "JSON"),
        ("/v1/completions", b"\xff\xfe", 400, "JSON decode error"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "half a character"),
        ("/v1/nothing", BASE, 404, "Not Found"),
        ("/detokenize", {"tokens": [-1]}, 400, r"ids -1\.\.-1 are not all in 0\.\.256"),
        ("/v1/completions", BASE | {"prompt": [300]}, 400, r"token ids 300\.\.300"),
        ("/v1/completions", BASE | {"prompt": "x" * 30_000}, 413, "more than 20000 bytes"),
        (
            "/v1/completions",
            BASE | {"response_format": {"type": "regex", "regex": "(("}},
            400,
            "regex",
        ),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "has no role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "reads text only",
        ),
        ("/v1/embeddings", {"input": "x"}, 400, "makes no embeddings"),
    ],
    ids=[
        *("too_long", "model", "choices", "temperature", "unknown_setting"),
        *("stop_ids", "no_prompts", "no_stream", "no_json"),
        *("no_text", "half_a_character", "path", "tokens"),
        *("ids", "body_size", "structure", "role", "image", "embeddings"),
    ],
)
def test_refusals_say_why(running, path, body, status, message):
    code, answer, _ = post(running, path, body)
    assert code == status
    assert re.search(message, answer["error"]["message"]), answer


def test_the_key_is_asked_for(running, client):
    assert post(running, "/v1/completions", BASE, key=None)[0] == 401
    assert post(running, "/v1/completions", BASE, key="other")[0] == 401
    with urllib.request.urlopen(f"{running.server.address}/health") as answer:
        assert json.loads(answer.read()) == {"status": "ok", "stalled_s": 0}
    assert [model.id for model in client.models.list()] == ["letters", "tuned"]
    assert client.models.retrieve("tuned").parent == "letters"
    assert not hasattr(client.models.retrieve("letters"), "parent")


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


def test_tokens_are_counted(running):
    _, answer, _ = post(running, "/tokenize", {"prompt": "abc"})
    assert answer == {"count": 4, "max_model_len": CONTEXT, "tokens": [256, 97, 98, 99]}
    _, answer, _ = post(running, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert answer["count"] == len("u:x;a:")
    _, answer, _ = post(running, "/detokenize", {"tokens": [97, 256]})
    end = running.model.tokenizer.decode([256])
    assert answer == {"prompt": f"a{end}"}
    asked = {"prompt": end, "add_special_tokens": False}
    assert post(running, "/tokenize", asked)[1]["tokens"] == [256]


def test_overload_is_told_to_come_again(running):
    long = BASE | {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(post, running, "/v1/completions", long | {"n": 2}) for _ in range(6)]
        answers = [each.result() for each in asked]
    codes = [code for code, _, _ in answers]
    assert set(codes) == {200, 429}
    assert all(headers["Retry-After"] for code, _, headers in answers if code == 429)
    wait_until_idle(running)


def test_a_client_that_goes_away_frees_its_pages(running):
    body = BASE | {"max_tokens": 250, "ignore_eos": True}
    ended = dict(running.engine.counts.ended)
    for stream in (True, False):
        connection = http.client.HTTPConnection("127.0.0.1", running.server.port)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body | {"stream": stream}),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        if stream:
            connection.getresponse().read(40)
        else:
            time.sleep(0.05)
        connection.sock and connection.sock.close()
        connection.close()
    wait_until_idle(running)
    assert running.engine.counts.ended["cancelled"] > ended.get("cancelled", 0)


def test_a_client_that_does_not_read_holds_nobody_up(running):
    """What it asked for is computed and waits for it, and others are answered meanwhile."""
    body = BASE | {"max_tokens": 200, "ignore_eos": True, "temperature": 0, "logprobs": 20}
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", running.server.port, timeout=30)
    ) as slow:
        slow.connect()
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        slow.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        assert post(running, "/v1/completions", BASE)[0] == 200
        wait_until_idle(running)
        events = slow.getresponse().read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    said = [json.loads(each.removeprefix("data: "))["choices"][0] for each in events[:-1]]
    assert (
        "".join(each["text"] for each in said)
        == (post(running, "/v1/completions", body)[1]["choices"][0]["text"])
    )
    assert said[-1]["finish_reason"] == "length"


def test_headers_without_end_are_not_kept(running):
    """Nobody has shown a key yet when headers come."""
    more = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 8000) for number in range(4000))
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=30) as endless:
        endless.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            endless.sendall(more)  # 32 MB, of which it hears 64 KB and sockets hold some


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


def test_a_stop_lets_open_requests_end(tmp_path):
    served = Running(tmp_path, max_running=1, is_warm=False)
    with contextlib.ExitStack() as stack:
        stack.callback(served.thread.close)
        with served.server.running():
            results = []
            body = BASE | {"max_tokens": 200, "ignore_eos": True}
            asking = threading.Thread(
                target=lambda: results.append(post(served, "/v1/completions", body))
            )
            asking.start()
            while not served.thread.num_open:
                time.sleep(0.001)
        asking.join()
    ((status, answer, _),) = results
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 200


def test_the_load_generator_measures_what_clients_wait(running, tmp_path, capsys):
    args = argparse.Namespace(
        api_key=KEY,
        num_ids=256,
        rates=[10.0],
        concurrency=[2],
        seconds=0.5,
        seed=0,
        shared_prefix=8,
        prompt_tokens=bench.Lengths(text="4:12"),
        new_tokens=bench.Lengths(text="~6"),
        first_ms=10_000.0,
        token_ms=10_000.0,
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
