"""A server in a thread that answers in letters, and how tests speak with it."""

import dataclasses
import json
import pathlib
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint.peft_files import Adapters, host_adapters
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.faults.servers import SERVED_CONFIG
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import by_path, define_model, merged
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.adapter_bank import AdapterBank
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.http.app import application
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.http.service import Service, ServiceLimits
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed

KEY = "secret"
CONTEXT = 256
CONFIG = dataclasses.replace(SERVED_CONFIG, vocab_size=257, max_positions=CONTEXT)
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }};{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% if loud %}!{% endif %}{% endif %}"
)
BASE = {"model": "letters", "prompt": "a", "max_tokens": 2}


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

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        max_running: int = 4,
        is_warm: bool = True,
        model: LoadedModel | None = None,
    ):
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "Letters"}')
        self.model = model or loaded_model()
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
        tokens = recomputed(
            decoder or self.decoder,
            [ids],
            max_new_tokens=new,
            sampling=GREEDY,
            eos_ids=[256],
            num_ids=257,
        )
        return self.model.tokenizer.decode([t.token for t in tokens if t.token != 256])


def wait_until_idle(running):
    deadline = time.monotonic() + 30
    while running.thread.num_open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running.thread.num_open == 0
    assert running.engine.scheduler.allocator.num_in_use == 0


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
