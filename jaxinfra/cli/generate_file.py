"""Generation for a file of prompts, many at a time: ``jaxinfra generate RUN --prompts FILE``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxinfra.data.chat_template import load_chat_template
from jaxinfra.errors import CheckpointError, ConfigError, DataError
from jaxinfra.runtime.files import parse_json, read_bytes
from jaxinfra.serving.generate import engine_for, request_of
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import SamplingConfig


def read_prompts(file: Path) -> list[Any]:
    """Reads the prompts of a file: lines of text, or ``prompt`` or ``messages`` of JSON lines.

    Raises:
        DataError: a line has neither; the error names it.
    """
    try:
        text = read_bytes(file, error=DataError).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error})") from error
    lines = [(number, each) for number, each in enumerate(text.split("\n"), 1) if each.strip()]
    if file.suffix != ".jsonl":
        return [each for _, each in lines]
    found = []
    for number, line in lines:
        row = parse_json(line, where=f"{file}:{number}", error=DataError)
        prompt = row.get("prompt", row.get("messages"))
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(f'{file}:{number}: neither a "prompt" of text nor "messages"')
        found.append(prompt)
    return found


def generate_file(
    model: LoadedModel,
    path: Path,
    prompts: list[Any],
    out: TextIO,
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int,
    chat: bool,
) -> int:
    """Writes a JSON line for each prompt, in their order; returns the number of new tokens.

    Raises:
        CheckpointError: some prompts ended with an error; raised after all are done.
    """
    if not prompts:
        raise ConfigError("the file of prompts is empty; give a prompt on each line")
    template = None
    if chat or any(isinstance(each, list) for each in prompts):
        template = load_chat_template(path)

    def encoded() -> Iterator[list[int]]:
        for prompt in prompts:
            if template is None:
                yield model.prompt(prompt)
                continue
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            yield template.encode(model.tokenizer, messages)

    requests = [
        request_of(model, ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
        for ids in encoded()
    ]
    num_tokens, errors = 0, []
    engine = engine_for(model, requests, consumes=True, share_prefixes=True)
    for prompt, told in zip(prompts, engine.run(requests), strict=True):
        tokens = sum(len(each.tokens) for each in told)
        num_tokens += tokens
        line = {"prompt": prompt, "text": "".join(each.text for each in told), "tokens": tokens}
        line["finish"] = told[-1].end
        if told[-1].error is not None:
            line["error"] = told[-1].error
            errors.append(told[-1].error)
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
    if errors:
        raise CheckpointError(f"{len(errors)} of {len(prompts)} prompts failed: {errors[0]}")
    return num_tokens
