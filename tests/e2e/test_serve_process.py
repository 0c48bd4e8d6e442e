"""``jaxinfra serve`` as a process: it says where it is, and leaves when it is asked to."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jax
import pytest
from engine_models import definition

from experiments.bench.serving import serve_endurance
from jaxinfra.checkpoint.model_directory import write_ours
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.cli.main import main
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.model.definition import by_path
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed

ROOT = pathlib.Path(__file__).parents[2]


@contextlib.contextmanager
def process(directory: pathlib.Path, *options: str, environment=None):
    command = [sys.executable, "-m", "jaxinfra", "serve", *options]
    with subprocess.Popen(
        command,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as made:
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
def model(tmp_path):
    bytes_tokenizer().save(tmp_path / "tokenizer.json")
    write_ours(
        LiveParameters(arrays=by_path(definition().initialize(jax.random.key(0)))),
        definition(),
        tmp_path / "model",
        hf=None,
        tokenizer_directory=tmp_path,
        dtype=None,
        max_shard_bytes=1 << 30,
    )
    return tmp_path / "model"


@pytest.mark.slow
def test_a_signal_ends_it_after_its_requests(model):
    small = ("--max-running", "1", "--max-step-tokens", "32", "--port", "0", "--name", "m")
    with process(model.parent, str(model), *small) as served:
        line = next(line for line in served.stdout if " at http" in line)
        assert line.startswith("m at http://127.0.0.1:")
        address = line.partition(" at ")[2].partition(": ")[0]
        body = {"model": "m", "prompt": [1, 2], "max_tokens": 60, "ignore_eos": True, "n": 60}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answers = []

        def ask():
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append(json.loads(answer.read()))

        asking = threading.Thread(target=ask)
        asking.start()
        metrics = ""
        # They run one at a time.
        while 'num_requests_running{model_name="m"} 1.0' not in metrics:
            with urllib.request.urlopen(f"{address}/metrics") as answer:
                metrics = answer.read().decode()
            assert asking.is_alive()
        os.kill(served.pid, signal.SIGTERM)
        asking.join()
        assert answers[0]["usage"]["completion_tokens"] == 3600
        assert "stopped by SIGTERM: 60 requests, 3600 tokens" in served.stdout.read()
        assert served.wait(30) == 0


def answered(address: str, body, *, until: float) -> str:
    """The answer's text, asked for again while no server listens or it is starting or stopping."""
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    while True:
        try:
            request = urllib.request.Request(f"{address}/v1/completions", data, kind)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 503:
                raise
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError | ConnectionResetError):
                raise
        except ConnectionResetError as error:
            if isinstance(error, http.client.RemoteDisconnected):
                raise  # closed without an answer, not reset before it was accepted
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_clients_that_wait_get_all_answers_over_a_restart(model):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = (str(model), "--max-running", "2", "--max-step-tokens", "32", "--name", "m")
    cache = {**os.environ, "XDG_CACHE_HOME": str(model.parent)}
    until = time.monotonic() + 240
    bodies = [
        {"model": "m", "prompt": [1 + client, 2], "max_tokens": 40, "temperature": 0}
        for client in range(6)
    ]

    def answers(body):
        return [answered(f"http://127.0.0.1:{port}", body, until=until) for _ in range(40)]

    def started():
        return process(model.parent, *words, "--port", str(port), environment=cache)

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        with started() as first:
            assert any(" at http" in line for line in first.stdout)
            coming = [pool.submit(answers, body) for body in bodies]
            answered(f"http://127.0.0.1:{port}", bodies[0], until=until)
            os.kill(first.pid, signal.SIGTERM)
            first.stdout.read()
            assert first.wait(60) == 0
        assert not all(each.done() for each in coming)
        with started() as second:
            texts = [each.result() for each in coming]
            second.send_signal(signal.SIGTERM)
            said = second.stdout.read()
    assert [len(each) for each in texts] == [40] * len(bodies)
    assert [len({*each}) for each in texts] == [1] * len(bodies), "both say the same"
    assert "stopped by SIGTERM" in said


@pytest.mark.slow
def test_the_load_generator_starts_and_ends_its_server(model):
    out = model.parent / "load.json"
    command = [sys.executable, "-m", "jaxinfra", "bench", "serve", str(model), "--out", str(out)]
    load = ("--concurrency", "2", "--seconds", "1", "--prompt-tokens", "4", "--new-tokens", "1:8")
    small = ("--max-running", "1", "--max-step-tokens", "32", "--name", "m")
    ended = subprocess.run(
        [*command, *load, "--", *small],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["answered"] == row["requests"] > 0
    assert "stopped by SIGTERM" in ended.stdout, "its own server has ended"
    assert out.with_suffix(".svg").exists()


@pytest.mark.slow
def test_a_server_is_as_before_after_thousands_of_requests():
    """Some of them bad: texts, pages, compilations and the server's memory."""
    found = serve_endurance.run(1500)
    assert {*found["ends"]} == {"answered", *serve_endurance.SHARES}
    assert found["texts_compared"] > 1000
    assert found["resident_mib"]["growth_between_halves"] < 4


@contextlib.contextmanager
def two_processes(model, *options):
    """The model over both, a device each; gives the processes, and the first one's address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"JAXINFRA_COORDINATOR": f"127.0.0.1:{port}", "JAXINFRA_NUM_PROCESSES": "2"}
    words = (str(model), "--mesh", "tensor=2", "--port", "0", "--name", "m", *options)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                process(
                    model.parent,
                    *words,
                    environment={**os.environ, **job, "JAXINFRA_PROCESS_ID": str(rank)},
                )
            )
            for rank in range(2)
        ]
        line = next((line for line in ranks[0].stdout if " at http" in line), "")
        assert line, "it did not come to serve"
        yield ranks, line.partition(" at ")[2].partition(": ")[0]


def completion(address, **body):
    data = json.dumps({"model": "m", "temperature": 0, "ignore_eos": True, **body}).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{address}/v1/completions", data, headers)


@pytest.mark.slow
def test_a_model_over_two_processes_says_what_it_says_in_one(model):
    prompts = [[5, 6, 7], [7, 250, 3, 99, 4, 8, 1, 2, 3, 40], [7, 250, 3, 99, 1]]
    small = ("--max-running", "2", "--max-step-tokens", "32", "--page-size", "4")
    with two_processes(model, *small) as (ranks, address):
        asked = completion(address, prompt=prompts, max_tokens=20)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            got = [choice["text"] for choice in json.loads(answer.read())["choices"]]
        ranks[1].send_signal(signal.SIGTERM)  # as whoever starts them may send it to both
        ranks[0].send_signal(signal.SIGTERM)
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    one = definition().bind(definition().initialize(jax.random.key(0)))
    want = [[] for _ in prompts]
    for each in recomputed(one, prompts, max_new_tokens=20, sampling=GREEDY, num_ids=257):
        want[each.row].append(each.token)
    assert got == [bytes_tokenizer().decode(tokens) for tokens in want]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_first_one_with_its_name(model):
    """A client in flight is told; nobody waits for a collective that never ends."""
    with two_processes(model, "--max-running", "1", "--max-step-tokens", "32") as (ranks, address):
        asked = completion(address, prompt=[5], max_tokens=60, n=60)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(urllib.request.urlopen, asked, timeout=60)
            metrics = ""
            while 'num_requests_running{model_name="m"} 1.0' not in metrics:
                with urllib.request.urlopen(f"{address}/metrics") as answer:
                    metrics = answer.read().decode()
                assert not waiting.done()
            ranks[1].kill()
            with pytest.raises(urllib.error.HTTPError) as told:
                waiting.result()
        assert told.value.code == 500
        assert b"the engine failed" in told.value.read()
        assert ranks[0].wait(60) == 74
        assert "process 1 of 2 is gone, and with it a part of the model" in ranks[0].stdout.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("model", "--preemption", "host"), "--preemption host with one model over 2 processes"),
        (("model", "--replicas", "2"), "--replicas with one model over 2 processes"),
        ((), "several processes serve one model: name it"),
    ],
    ids=["host", "replicas", "no_model"],
)
def test_what_several_processes_do_not_serve_is_refused(monkeypatch, capsys, options, message):
    monkeypatch.setenv("JAXINFRA_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("JAXINFRA_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAXINFRA_PROCESS_ID", "0")
    assert main(["serve", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=4,expert=2", "replica=2"])
def test_meshes_with_rows_of_their_own_are_refused(mesh, capsys):
    assert main(["serve", "nowhere", "--mesh", mesh]) == 1
    assert "over 2 replica or fsdp devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nowhere",), "it does not exist"),
        (("model", "--draft", "model"), "--draft needs --num-drafts"),
        (("model", "--max-running", "0"), "max_running=0 must be at least 1"),
        (("model", "--replicas", "0"), "--replicas 0 must be at least 1"),
        (("model", "--replicas", "2", "--page-size", "0"), "with exit code 1 before it served"),
        (("model", "--port", "99999"), "port=99999 must be in 0..65535"),
        (("model", "--host", "203.0.113.1"), "cannot listen at 203.0.113.1:8000"),
    ],
    ids=["no_model", "no_drafts", "no_room", "no_replicas", "no_pages", "no_port", "no_address"],
)
@pytest.mark.slow
def test_what_cannot_be_served_is_said_in_a_line(model, options, message):
    with process(model.parent, *options) as served:
        said = served.stdout.read()
        assert served.wait(60) == 1
    assert message in said
    assert "Traceback" not in said
