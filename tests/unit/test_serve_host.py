"""The benchmark of the host's work: requests run to their ends without any program."""

from experiments.bench.serving import serve_host
from jaxinfra.checkpoint.finite import nonfinite_allowed
from jaxinfra.faults.servers import write_served_model
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest
from jaxinfra.serving.engine.runner import ModelRunner
from jaxinfra.serving.load import load


def test_requests_end_without_programs(tmp_path):
    with nonfinite_allowed(), serve_host.without_programs():
        model = load(write_served_model(tmp_path / "letters"))
        engine = serve_host.engine_of(model, 2)
        request = GenerationRequest(prompt_ids=(97, 98), max_new_tokens=5)
        told = engine.run([request] * 3)
        assert ["".join(each.text for each in one) for one in told] == ["eeeee"] * 3
        assert {one[-1].end for one in told} == {EndReason.LENGTH}
        assert engine.runner.num_compiled == 0
        row = serve_host.step(model, 2)
        assert row["cpu_us"] > 0
        assert row["blocks"] == 3 * (serve_host.NEW // serve_host.BLOCK - 2)
    assert ModelRunner.call.__module__ == ModelRunner.__module__
