"""Agents: official clients call tools in a loop, in every family's form, streamed and whole."""

import asyncio
import json

import openai
import pydantic
import pytest
from scripted_server import ScriptedServer, spelled_calls

FORMS = (
    *("openai", "deepseek_v3", "deepseek_v31", "glm45", "qwen3_coder", "mistral"),
    *("mistral_list", "hermes", "pythonic", "llama3_json"),
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CITIES = ("Rome", 'O"slo', "Zü rich", "Bo\\nn", "Ur {a}")
SHOWS_TEXT = {"openai", "pythonic", "llama3_json"}  # nothing but calls in an answer with calls


def answers(form):
    """Five calls, the last two in one answer where the form has that, and a last text."""
    calls = [("look", {"city": city, "days": day}) for day, city in enumerate(CITIES)]
    one_each = form == "openai"
    turns = [[each] for each in calls] if one_each else [*([c] for c in calls[:3]), calls[3:]]
    texts = [spelled_calls(form, turn) for turn in turns]
    if form not in SHOWS_TEXT:
        texts[0] = f"I look.\n{texts[0]}"
    final = "<|channel|>final<|message|>Sunny." if form == "openai" else "Sunny."
    return [*texts, final]


def expected():
    return [{"city": city, "days": day} for day, city in enumerate(CITIES)]


async def openai_loop(client, *, stream):
    """Calls tools until there is a text; returns all arguments, and texts."""
    messages, called, texts = [{"role": "user", "content": "Weather?"}], [], []
    while True:
        asked = {"model": "m", "messages": messages, "tools": [TOOL]}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        (choice,) = answer.choices
        message = choice.message
        texts.append(message.content)
        assert choice.finish_reason == ("tool_calls" if message.tool_calls else "stop")
        if not message.tool_calls:
            return called, texts
        messages.append(
            message.model_dump(exclude_none=True, exclude={"parsed", "parsed_arguments"})
        )
        for call in message.tool_calls:
            assert call.function.name == "look"
            called.append(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sun"})


@pytest.mark.parametrize("form", FORMS)
def test_an_agent_calls_five_tools(form, tmp_path):
    async def run():
        served = ScriptedServer(tmp_path, form=form)
        async with served.http() as http:
            client = openai.AsyncOpenAI(base_url="http://m/v1", api_key="key", http_client=http)
            for stream in (False, True):
                served.engine.script = answers(form)
                called, texts = await openai_loop(client, stream=stream)
                assert called == expected()
                assert texts[-1] == "Sunny."
                assert (texts[0] or "") == ("" if form in SHOWS_TEXT else "I look.")
                assert '"role": "tool"' in served.engine.prompt()
                length = 9 if form.startswith("mistral") else 29
                ids = [
                    each.split('"')[0] for each in served.engine.prompt().split('"tool_call_id": "')
                ]
                assert {len(each) for each in ids[1:]} == {length}

    asyncio.run(run())


async def responses_loop(client, *, stream, stored):
    """Runs five tool calls through the Responses API, stored or with all turns sent again."""
    tools = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True}]
    given, called, previous = [{"role": "user", "content": "Weather?"}], [], None
    while True:
        asked = {"model": "m", "input": given, "tools": tools, "instructions": "Be brief."}
        asked |= {"store": stored} | ({"previous_response_id": previous} if previous else {})
        if stream:
            async with client.responses.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        assert answer.status == "completed"
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return called, answer.output_text
        results = []
        for call in calls:
            called.append(json.loads(call.arguments))
            results.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
            )
        if stored:
            given, previous = results, answer.id
        else:
            given = [
                *given,
                *(each.model_dump(exclude_none=True) for each in answer.output),
                *results,
            ]


@pytest.mark.parametrize("form", ["hermes", "openai"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "stateless"])
def test_an_agent_uses_responses(form, stored, tmp_path):
    async def run():
        served = ScriptedServer(tmp_path, form=form)
        async with served.http() as http:
            client = openai.AsyncOpenAI(base_url="http://m/v1", api_key="key", http_client=http)
            for stream in (False, True):
                served.engine.script = answers(form)
                called, text = await responses_loop(client, stream=stream, stored=stored)
                assert (called, text) == (expected(), "Sunny.")
                prompt = served.engine.prompt()
                assert prompt.count("Be brief.") == 1
                assert prompt.count('"role": "tool"') == len(CITIES)

    asyncio.run(run())


def test_a_response_cut_within_a_call_says_so(tmp_path):
    """A call that was cut off is marked incomplete, so that an agent does not run it."""

    async def run():
        served = ScriptedServer(tmp_path, form="hermes")
        text = spelled_calls("hermes", [("look", {"city": "Rome"})])
        tools = [{"type": "function", "name": "look", "parameters": PARAMETERS}]
        async with served.http() as http:
            client = openai.AsyncOpenAI(base_url="http://m/v1", api_key="key", http_client=http)
            served.engine.script = [f"I look.{text[:60]}..."] * 2
            answer = await client.responses.create(model="m", input="x", tools=tools)
            events = [
                event
                async for event in await client.responses.create(
                    model="m", input="x", tools=tools, stream=True
                )
            ]
        assert events[-1].type == "response.incomplete"
        for response in (answer, events[-1].response):
            assert response.status == "incomplete"
            assert response.incomplete_details.reason == "max_output_tokens"
            assert [item.status for item in response.output] == ["completed", "incomplete"]

    asyncio.run(run())


def respond(directory, *turns, form="hermes"):
    """Answers of requests of which each follows the one before; and the server.

    Args:
        turns: of each request, the script of its answer and its body.
    """

    async def run():
        served, answers = ScriptedServer(directory, form=form), []
        async with served.http() as http:
            for script, body in turns:
                served.engine.script = [script]
                before = {"previous_response_id": answers[-1]["id"]} if answers else {}
                tools = [{"type": "function", "name": "look", "parameters": PARAMETERS}]
                asked = {"model": "m", "tools": tools} | before | body
                answers.append((await http.post("/v1/responses", json=asked)).json())
        return served, answers

    return asyncio.run(run())


def test_a_result_has_its_calls_name_whether_the_response_was_kept_or_not(tmp_path):
    """Some chat templates write it."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    served, _ = respond(tmp_path, ("So.", {"input": [call]}), ("So.", {"input": [result]}))
    assert '"role": "tool", "tool_call_id": "c", "content": "sun", "name": "look"' in (
        served.engine.prompt()
    )
    _, (answer,) = respond(tmp_path, ("So.", {"input": [call | {"call_id": ["c"]}]}))
    assert "input[0] (function_call) has no call_id that is a text" in answer["error"]["message"]


def test_a_whole_call_is_completed_where_one_after_it_is_left_out_and_cut(tmp_path):
    text = spelled_calls("hermes", [("look", {"city": "Rome"}), ("look", {"city": "Ur"})])
    asked = {"input": "x", "parallel_tool_calls": False}
    _, (answer,) = respond(tmp_path, (f"{text[:-20]}...", asked))
    assert answer["status"] == "incomplete"
    assert [item["status"] for item in answer["output"]] == ["completed"]
    openai.types.responses.Response.model_validate(answer)  # its client itself checks nothing


async def anthropic_loop(client, *, stream):
    """Runs five tool calls through Anthropic's Messages API."""
    tools = [{"name": "look", "input_schema": PARAMETERS}]
    messages, called = [{"role": "user", "content": "Weather?"}], []
    while True:
        asked = {
            "model": "m",
            "messages": messages,
            "tools": tools,
            "max_tokens": 99,
            "system": "Hm",
        }
        if stream:
            async with client.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            return called, answer.content[-1].text
        called += [call.input for call in calls]
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "sun"} for c in calls]
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": results},
        ]


@pytest.mark.parametrize("form", ["glm45", "mistral", "openai"])
def test_an_agent_uses_messages(form, tmp_path):
    import anthropic  # takes seconds, which collecting all tests need not wait for

    async def run():
        served = ScriptedServer(tmp_path, form=form)
        async with served.http() as http:
            client = anthropic.AsyncAnthropic(base_url="http://m", api_key="key", http_client=http)
            for stream in (False, True):
                served.engine.script = answers(form)
                assert await anthropic_loop(client, stream=stream) == (expected(), "Sunny.")
            with pytest.raises(anthropic.BadRequestError, match="'other'") as told:
                await client.messages.create(
                    model="m",
                    max_tokens=9,
                    messages=[{"role": "user", "content": "x"}],
                    tools=[{"name": "look", "input_schema": PARAMETERS}],
                    tool_choice={"type": "tool", "name": "other"},
                )
            assert told.value.body["type"] == "error"
            count = await client.messages.count_tokens(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
            assert count.input_tokens == len(b'[{"role": "user", "content": "x"}]')

    asyncio.run(run())


def test_a_message_goes_on_with_the_assistants_last_words(tmp_path):
    """An answer continues a last message of the assistant. A message needs a block with text."""

    async def run():
        served = ScriptedServer(tmp_path)
        asked = {"model": "m", "max_tokens": 9}
        begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is {"}]
        async with served.http() as http:
            served.engine.script = ["so}"]
            answer = await http.post("/v1/messages", json=asked | {"messages": begun})
            assert answer.json()["content"] == [{"type": "text", "text": "so}"}]
            assert served.engine.prompt().endswith("It is {")
            none = asked | {"messages": [{"role": "user", "content": []}]}
            assert (await http.post("/v1/messages", json=none)).status_code == 400

    asyncio.run(run())


@pytest.mark.parametrize("stops", [["b", "d"], ["d"], ["e"]])
def test_a_message_says_which_sequence_ended_it(stops, tmp_path):
    async def run():
        served = ScriptedServer(tmp_path)
        served.engine.script = ["acde" if "e" not in stops else "acd"]
        asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        async with served.http() as http:
            return (await http.post("/v1/messages", json=asked | {"stop_sequences": stops})).json()

    answer = asyncio.run(run())
    told = ("end_turn", None) if "e" in stops else ("stop_sequence", "d")
    assert (answer["stop_reason"], answer["stop_sequence"]) == told


def test_parts_of_a_users_text_are_lines_in_every_api(tmp_path):
    """The last word of a part and the first word of the next part stay two words."""
    texts = ["one", "two"]
    parts = [{"type": "text", "text": each} for each in texts]
    user = {"messages": [{"role": "user", "content": parts}]}
    given = [{"type": "input_text", "text": each} for each in texts]
    asked = {
        "/v1/chat/completions": user,
        "/v1/messages": user | {"max_tokens": 9},
        "/v1/responses": {"input": [{"role": "user", "content": given}]},
    }

    async def run():
        served = ScriptedServer(tmp_path)
        async with served.http() as http:
            for path, body in asked.items():
                served.engine.script = ["so"]
                await http.post(path, json={"model": "m"} | body)
        return [served.engine.prompt(number) for number in range(len(asked))]

    assert [each.split('"content": "')[1][:8] for each in asyncio.run(run())] == [r"one\ntwo"] * 3


class Forecast(pydantic.BaseModel):
    city: str
    days: int


def test_parse_helpers_read_structures_and_calls(tmp_path):
    async def run():
        served = ScriptedServer(tmp_path, form="hermes")
        said = '{"city":"Rome","days":2}'
        async with served.http() as http:
            client = openai.AsyncOpenAI(base_url="http://m/v1", api_key="key", http_client=http)
            asked = [{"role": "user", "content": "x"}]
            served.engine.script = [
                said,
                said,
                spelled_calls("hermes", [("Forecast", {"city": "Ur", "days": 1})]),
            ]
            chat = await client.chat.completions.parse(
                model="m", messages=asked, response_format=Forecast
            )
            assert chat.choices[0].message.parsed == Forecast(city="Rome", days=2)
            answer = await client.responses.parse(model="m", input="x", text_format=Forecast)
            assert answer.output_parsed == Forecast(city="Rome", days=2)
            chat = await client.chat.completions.parse(
                model="m", messages=asked, tools=[openai.pydantic_function_tool(Forecast)]
            )
            (call,) = chat.choices[0].message.tool_calls
            assert call.function.parsed_arguments == Forecast(city="Ur", days=1)

    asyncio.run(run())


def asked_once(directory, script, *, form="hermes", ending="", limits=(), **body):
    """The server, and its answer's choice to one request."""

    async def run():
        served = ScriptedServer(directory, form=form, ending=ending, **dict(limits))
        served.engine.script = [script]
        body.setdefault("messages", [{"role": "user", "content": "x"}])
        async with served.http() as http:
            answer = await http.post("/v1/chat/completions", json=body)
        return served, answer.json()

    served, answer = asyncio.run(run())
    assert "choices" in answer, answer
    told = answer["choices"][0]
    reasoning = told["message"].get("reasoning_content", "")
    counts = answer["usage"]["completion_tokens_details"]
    assert counts == {"reasoning_tokens": len(served.tokenizer.encode(reasoning))}
    return served, told


STOP = {"type": "function", "function": {"name": "stop"}}


@pytest.mark.parametrize("form", FORMS)
def test_a_choice_of_tools_is_enforced(form, tmp_path):
    """The grammar admits calls as the family writes them, and no text before them."""
    call = spelled_calls(form, [("look", {"city": "Rome", "days": 2})])
    both = {"tools": [TOOL, STOP]}
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        _, told = asked_once(tmp_path, call, form=form, tool_choice=choice, **both)
        assert told["finish_reason"] == "tool_calls"
        (made,) = told["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"city": "Rome", "days": 2}
    with pytest.raises(AssertionError, match="outside of the structure"):
        asked_once(tmp_path, "No.", form=form, tool_choice="required", **both)
    other = {"type": "function", "function": {"name": "stop"}}
    with pytest.raises(AssertionError, match="outside of the structure"):
        asked_once(tmp_path, call, form=form, tool_choice=other, **both)


def test_a_tool_whose_schema_is_none_is_named(tmp_path):
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "objekt"}}}
    with pytest.raises(AssertionError, match=r"odd.*: its parameters: .*objekt") as told:
        asked_once(tmp_path, "", tools=[TOOL, odd], tool_choice="required")
    assert "start:" not in str(told.value), "nothing of a grammar that the client did not write"


def test_tool_choice_none_offers_no_tools(tmp_path):
    text = spelled_calls("hermes", [("look", {"city": "Rome"})])
    served, told = asked_once(tmp_path, text, tools=[TOOL], tool_choice="none")
    assert "parameters" not in served.engine.prompt()
    assert told["message"] == {"role": "assistant", "content": text}
    _, told = asked_once(tmp_path, text, tools=[TOOL], limits={"tool_parser": "none"})
    assert told["message"]["content"] == text


def test_one_call_is_kept_where_calls_in_parallel_are_refused(tmp_path):
    text = spelled_calls("hermes", [("look", {"city": "Rome"}), ("look", {"city": "Ur"})])
    _, told = asked_once(tmp_path, text, tools=[TOOL], parallel_tool_calls=False)
    (call,) = told["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_an_answer_cut_within_a_call_says_so(tmp_path):
    text = spelled_calls("hermes", [("look", {"city": "Rome"})])
    begin = text.index("{", 20)
    _, told = asked_once(tmp_path, f"{text[: begin + 4]}...", tools=[TOOL])
    assert told["finish_reason"] == "length"
    (call,) = told["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": text[begin : begin + 4]}
    _, told = asked_once(tmp_path, f"{text[:30]}...", tools=[TOOL])
    assert told["message"] == {"role": "assistant", "content": text[:30]}


THOUGHT = "{# </think> #}"


@pytest.mark.parametrize("ending", [f"{THOUGHT}<think>\n", THOUGHT], ids=["opened", "written"])
def test_reasoning_is_told_apart_from_a_structured_answer(ending, tmp_path):
    begun = "" if "<think>" in ending else "<think>"
    structure = {"response_format": {"type": "json_object"}}
    text = f'{begun}\nLet me {{see}}.\n</think>{{"a":1}}'
    _, told = asked_once(tmp_path, text, ending=ending, **structure)
    assert told["message"]["reasoning_content"] == "Let me {see}."
    assert told["message"]["content"] == '{"a":1}'
    call = spelled_calls("hermes", [("look", {"city": "Rome"})])
    required = {"tools": [TOOL], "tool_choice": "required"}
    _, told = asked_once(tmp_path, f"{begun}Hm</think>{call}", ending=ending, **required)
    assert told["message"]["reasoning_content"] == "Hm"
    assert told["message"]["content"] is None
    assert told["finish_reason"] == "tool_calls"
    limits = {"reads_reasoning": False}
    _, told = asked_once(tmp_path, "<think>Hm</think>so", ending=THOUGHT, limits=limits)
    assert told["message"] == {"role": "assistant", "content": "<think>Hm</think>so"}


def test_harmony_reasons_before_a_structure_and_a_required_call(tmp_path):
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    text = f'{thought}<|channel|>final<|message|>{{"a":1}}'
    structure = {"response_format": {"type": "json_object"}}
    _, told = asked_once(tmp_path, text, form="openai", **structure)
    assert told["message"]["reasoning_content"] == "Hm"
    assert told["message"]["content"] == '{"a":1}'
    call = spelled_calls("openai", [("look", {"city": "Rome"})])
    required = {"tools": [TOOL], "tool_choice": "required"}
    _, told = asked_once(tmp_path, thought + call, form="openai", **required)
    assert told["message"]["reasoning_content"] == "Hm"
    assert len(told["message"]["tool_calls"]) == 1


def test_settings_of_the_template_and_hints_reach_it(tmp_path):
    served, _ = asked_once(tmp_path, "so", chat_template_kwargs={"enable_thinking": False})
    assert served.engine.prompt().endswith("thinking=False")
    served, _ = asked_once(tmp_path, "so", reasoning_effort="high")
    assert served.engine.prompt().endswith("effort=high")


def test_special_tokens_add_no_text_where_they_are_not_wanted(tmp_path):
    """By default, as in vLLM; marks of calls and stop strings are found all the same."""
    calls = spelled_calls("mistral", [("look", {"city": "Rome"})])
    text = "a<|call|>b" + calls.replace("look", "look[CALL_ID]abc123def")
    asked = {"form": "mistral", "tools": [TOOL]}
    _, told = asked_once(tmp_path, text, **asked)
    assert told["message"]["content"] == "ab"
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    _, told = asked_once(tmp_path, text, **asked, skip_special_tokens=False)
    assert told["message"]["content"] == "a<|call|>b"
    _, told = asked_once(tmp_path, text, **asked, stop=["<|call|>"])
    assert told["message"]["content"] == "a"
    _, told = asked_once(tmp_path, text, form="mistral", limits={"tool_parser": "none"})
    assert told["message"]["content"].startswith("ab[TOOL_CALLS]look")
    _, told = asked_once(tmp_path, text, form=None, tools=[TOOL])  # calls of no known form
    assert told["message"]["content"] == text


def test_offsets_of_a_completion_are_in_its_text(tmp_path):
    async def run():
        served = ScriptedServer(tmp_path)
        served.engine.script = ["a<|call|>bc"]
        asked = {"model": "m", "prompt": "x", "max_tokens": 9, "logprobs": 0}
        async with served.http() as http:
            return (await http.post("/v1/completions", json=asked)).json()["choices"][0]

    told = asyncio.run(run())
    assert told["text"] == "abc"
    assert told["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]
