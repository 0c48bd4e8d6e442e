"""Clients that ask for what cannot be, come too often, go away or do not listen; and its end."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from e2e.served_letters import BASE, KEY, Running, loaded_model, post, wait_until_idle

from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.serving.http import guards


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
        ("/v1/completions", b"{", 400, "the body is not JSON: .* at character 1"),
        ("/v1/completions", b"\xff\xfe", 400, "the body is not JSON"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "half a character"),
        ("/v1/nothing", BASE, 404, "Not Found"),
        ("/detokenize", {"tokens": [-1]}, 400, r"ids -1\.\.-1 are not all in 0\.\.256"),
        ("/tokenize", {}, 400, "either a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "either a prompt or messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            400,
            "top_logprobs=2 takes logprobs=true",
        ),
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
            "text alone is read",
        ),
        ("/v1/embeddings", {"input": "x"}, 400, "makes no embeddings"),
        ("/v1/score", {}, 400, "scores no pairs"),
        ("/v1/load_lora_adapter", {}, 400, "when it starts"),
        ("/v1/completions", BASE | {"priority": 1}, 400, "order of their arrival"),
        ("/v1/completions", BASE | {"min_tokens": 3}, 400, "min_tokens=3 exceeds max_tokens=2"),
        ("/v1/completions", BASE | {"allowed_token_ids": [999]}, 400, r"\[999\] are not all in"),
        (
            "/v1/completions",
            BASE | {"guided_regex": "a", "guided_choice": ["b"]},
            400,
            "one structure",
        ),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, 400, "'computer_call'"),
        (
            "/v1/responses",
            {"input": "x", "previous_response_id": "resp_0"},
            404,
            "'resp_0' is not kept here",
        ),
        ("/v1/messages", {"messages": [{"role": "x"}], "max_tokens": 1}, 400, "got role 'x'"),
    ],
    ids=[
        *("too_long", "model", "choices", "temperature", "unknown_setting"),
        *("stop_ids", "no_prompts", "no_stream", "no_json"),
        *("no_text", "half_a_character", "path", "tokens"),
        *("no_prompt", "two_prompts", "scores"),
        *("ids", "body_size", "structure", "role", "image", "embeddings"),
        *("score", "adapter", "priority", "min_tokens", "allowed_ids", "structures"),
        *("item", "response", "message"),
    ],
)
def test_refusals_say_why(running, path, body, status, message):
    code, answer, _ = post(running, path, body)
    assert code == status
    assert re.search(message, answer["error"]["message"]), answer


def test_ids_beyond_the_model_are_refused_and_never_drawn(tmp_path):
    """Of a tokenizer with two tokens more than the model, in texts, in messages and as ids."""
    model = loaded_model()
    values = json.loads(model.tokenizer._json)
    for token in (257, 258):
        added = values["added_tokens"][0] | {"id": token, "content": f"<{token}>"}
        values["added_tokens"].append(added | {"special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    served = Running(tmp_path, is_warm=False, model=dataclasses.replace(model, tokenizer=tokenizer))
    message = {"role": "user", "content": "x<258>"}
    beyond = r"\.\.258, the model's vocabulary is 0\.\.256; encode it"
    with served.server.running():
        for path, said in (
            ("completions", {"prompt": "x<258>"}),
            ("completions", {"prompt": [258]}),
            ("completions", {"prompt": "x<258>", "stream": True}),
            ("chat/completions", {"messages": [message]}),
        ):
            code, answer, _ = post(served, f"/v1/{path}", said)
            assert code == 400
            assert re.search(beyond, answer["error"]["message"]), answer
        hot = {"prompt": "a", "max_tokens": 60, "temperature": 2, "seed": 1, "ignore_eos": True}
        structured = hot | {"response_format": {"type": "regex", "regex": "(<25[78]>|a){20}"}}
        for body in (hot, structured):
            code, answer, _ = post(served, "/v1/completions", body)
            assert code == 200, answer
            assert answer["usage"]["completion_tokens"] > 0
        assert set(answer["choices"][0]["text"]) <= set("<2578>a")
    served.thread.close()


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"response_format": FORMAT | {"strictness": 1}}, "response_format.strictness"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "regex": "a"}}, "type text takes no regex"),
        (
            {"response_format": FORMAT | {"json_schema": {"schema": {}, "mode": 1}}},
            "response_format.json_schema.mode",
        ),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"tools": [TOOL | {"more": 1}]}, "more"),
        ({"tools": [{"type": "function", "function": {"name": "f", "args": {}}}]}, "args"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"metadata": 3}, "metadata"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": "required", "tools": [TOOL]}, "--tool-parser NAME"),
        ({"tool_choice": {"function": {"name": "g"}}, "tools": [TOOL]}, "names 'g'"),
        ({"continue_final_message": True}, "no text of the model to go on with"),
    ],
)
def test_settings_are_known_at_every_depth(running, settings, words):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | settings
    code, answer, _ = post(running, "/v1/chat/completions", body)
    assert code == 400
    assert words in answer["error"]["message"]


def stream(running, path, body):
    """The last event of a stream."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    address = f"{running.server.address}{path}"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().split(b"\n\n")[-2]


def test_what_clients_send_and_nothing_depends_on_is_taken(running):
    said = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"}
    said |= {"safety_identifier": "x", "prompt_cache_key": "y", "parallel_tool_calls": False}
    said |= {"prompt_cache_retention": "24h", "stream_options": {"include_obfuscation": False}}
    nothing = dict.fromkeys(("temperature", "n", "stop", "stream", "tools", "logit_bias"))
    within = {"response_format": {"type": "json_object", "json_schema": None}}
    within |= {"tools": [TOOL | {"function": TOOL["function"] | {"strict": None}}]}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [TOOL]}
    for path, asked in (("/v1/chat/completions", body), ("/v1/completions", BASE)):
        ended = stream(running, path, asked | said | {"stream": True})
        assert ended == b"data: [DONE]"
    assert post(running, "/v1/chat/completions", body | nothing)[0] == 200
    assert post(running, "/v1/chat/completions", body | within)[0] == 200


def test_the_key_is_asked_for(running, client):
    assert post(running, "/v1/completions", BASE, key=None)[0] == 401
    assert post(running, "/v1/completions", BASE, key="other")[0] == 401
    with urllib.request.urlopen(f"{running.server.address}/health") as answer:
        assert json.loads(answer.read()) == {"status": "ok", "stalled_s": 0}
    assert [model.id for model in client.models.list()] == ["letters", "tuned"]
    assert client.models.retrieve("tuned").parent == "letters"
    assert not hasattr(client.models.retrieve("letters"), "parent")


@pytest.mark.parametrize("is_open", [False, True])
def test_metrics_need_no_key_where_they_are_open(is_open):
    sent = []

    async def application(scope, receive, send):
        sent.append({"status": 200})

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    guarded = guards.RequestGuards(application, api_key=KEY, max_body_bytes=9, open_metrics=is_open)
    for path in ("/metrics", "/v1/models"):
        asyncio.run(guarded({"type": "http", "path": path, "headers": []}, receive, send))
    told = [message["status"] for message in sent if "status" in message]
    assert told == [200 if is_open else 401, 401]


@pytest.mark.parametrize(("key", "status"), [(KEY, 413), ("other", 401)], ids=["size", "key"])
def test_a_refusal_arrives_though_the_client_sends_to_the_end(running, key, status):
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", running.server.port, timeout=30)
    ) as client:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        client.request("POST", "/v1/completions", b" " * 8_000_000, headers)
        answer = client.getresponse()
        assert answer.status == status
        assert "error" in json.loads(answer.read())


def test_a_refused_client_that_never_ends_is_left(running, monkeypatch):
    monkeypatch.setattr(guards, "_LINGER_S", 0.1)
    asked = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=30) as client:
        client.sendall(f"{asked}Content-Length: 30000\r\n\r\n ".encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))  # until the server closes
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"more than 20000 bytes" in answer


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
