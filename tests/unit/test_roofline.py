"""Roofline and MFU arithmetic, against published figures and counts by hand."""

import dataclasses
import json

import pytest

from experiments.bench.kernels import roofline_work as roofline
from experiments.bench.kernels.roofline_work import Point, Work
from experiments.pictures import roofline as picture
from jaxinfra.config.model import stacked
from jaxinfra.config.presets import MODELS
from jaxinfra.model.definition import define_model
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.inference import Serving, decode, ridge
from jaxinfra.planning.memory import kv_bytes
from jaxinfra.planning.model import find_model

H200 = find_device("h200")


@pytest.mark.parametrize(("name", "flops_per_byte"), [("h100", 295), ("h200", 206)])
def test_ridge_points_are_the_datasheets(name, flops_per_byte):
    assert round(ridge(find_device(name))) == flops_per_byte


def test_a_product_of_4096_in_half_a_millisecond():
    work = roofline.matmul_work(4096, 4096, 4096)
    point = Point(name="gemm", group="kernel", work=work, seconds=0.5e-3)
    assert point.flops_per_s / 1e12 == pytest.approx(274.9, abs=0.05)
    share = roofline.mfu(work.flops, seconds=0.5e-3, peak_flops=H200.flops["bf16"])
    assert share == pytest.approx(0.278, abs=5e-4)
    assert work.intensity == pytest.approx(4096 / 3)
    assert point.bound(H200) == "compute"
    assert point.as_json(H200)["of_attainable"] == pytest.approx(share)


def test_under_the_slope_bandwidth_decides():
    work = roofline.elementwise_work(1 << 20, streams=2, flops_each=5)
    assert work.intensity == 1.25
    point = Point(name="softmax", group="kernel", work=work, seconds=1e-6)
    assert point.bound(H200) == "memory"
    assert point.attainable(H200) == 1.25 * H200.hbm_bytes_per_s
    # Under the slope, the share of attainable FLOP/s is the share of the bandwidth.
    share = point.as_json(H200)["of_attainable"]
    assert share == pytest.approx(point.bytes_per_s / H200.hbm_bytes_per_s)


def test_measured_ceilings_move_the_ridge():
    measured = roofline.with_ceilings(H200, flops={"bf16": 800e12}, hbm_bytes_per_s=4e12)
    assert ridge(measured) == 200
    with pytest.raises(KeyError):
        Point(
            name="x", group="kernel", work=Work(flops=1, memory_bytes=1), seconds=1, compute="fp8"
        ).attainable(measured)


def test_attention_counts_what_it_sees():
    call = {"batch": 3, "length": 5, "q_heads": 4, "kv_heads": 2, "width": 8}
    full = roofline.attention_work(**call, causal=False)
    assert full.flops == 3 * 4 * (2 * 5 * 5 * 8) * 2
    causal = roofline.attention_work(**call, causal=True)
    assert causal.flops / full.flops == 15 / 25
    assert causal.memory_bytes == full.memory_bytes
    # q and the output, k and v, and one fp32 logsumexp a row and head.
    assert full.memory_bytes == 2 * 3 * 5 * (2 * 4 * 8 + 2 * 2 * 8) + 4 * 3 * 5 * 4
    backward = roofline.attention_backward_work(**call, causal=True)
    assert backward.flops == 2.5 * causal.flops
    assert backward.memory_bytes == 2 * 3 * 5 * (4 * 4 * 8 + 4 * 2 * 8) + 4 * 3 * 5 * 4


def test_the_loss_is_three_products():
    work = roofline.linear_cross_entropy_work(tokens=16_384, width=2048, vocab=128_256)
    product = roofline.matmul_work(16_384, 128_256, 2048)
    assert work.flops == 3 * product.flops
    # Logits would be most of the traffic, and are none of it.
    assert work.memory_bytes < product.memory_bytes / 2


def test_intensity_of_decode_is_about_its_batch():
    model = find_model("llama3_8b")

    def step(batch, context):
        moved = decode(model, H200, Serving(), batch=batch, context=context).memory_bytes
        return Work(flops=model.decode_flops(context, batch=batch), memory_bytes=moved)

    one, many = step(1, 128), step(32, 128)
    assert one.intensity == pytest.approx(1, abs=0.1)
    assert 0.75 * 32 < many.intensity < 32
    # With long contexts every sequence brings its own cache to read, and batching gains little.
    long = step(32, 65_536)
    assert long.intensity < 0.2 * 32
    cache = kv_bytes(model, batch=32, context=65_536)
    assert long.memory_bytes - many.memory_bytes == pytest.approx(
        cache - kv_bytes(model, batch=32, context=128)
    )


def palm_flops_per_token(config, *, num_parameters, sequence_length):
    """PaLM's, 6 N + 12 L H Q T (arXiv 2204.02311, appendix B): every query sees every key."""
    widths = sum(block.mixer.score_width for block in config.layers)
    return 6.0 * num_parameters + 12.0 * widths * sequence_length


def test_palm_accounting_gives_palms_figures():
    """46.2% at 238.3K tokens/s on 6144 TPU v4 chips of 275 TFLOP/s; 45.7% without attention."""
    config = MODELS["tiny"]()
    block = config.blocks[0]
    attention = dataclasses.replace(
        block.mixer, num_q_heads=48, num_kv_heads=1, head_dim=256, rope=None
    )
    block = dataclasses.replace(block, mixer=attention)
    palm = dataclasses.replace(config, stacks=stacked(block, num_layers=118))
    parameters = 540_350_000_000
    chips = {"peak_flops": 275e12, "devices": 6144, "seconds": 1 / 238.3e3}
    flops = palm_flops_per_token(palm, num_parameters=parameters, sequence_length=2048)
    assert roofline.mfu(flops, **chips) == pytest.approx(0.462, abs=1e-3)
    assert roofline.mfu(6.0 * parameters, **chips) == pytest.approx(0.457, abs=1e-3)


def test_exact_accounting_is_below_palms_by_half_the_attention():
    config = MODELS["llama32_1b"]()
    model = define_model(config, execution_on())
    palm = palm_flops_per_token(config, num_parameters=model.num_parameters, sequence_length=4096)
    exact = training_flops_per_token(model, 4096)
    # 16 layers of 32 heads of 64 see (T + 1) / 2 keys instead of T; norms are not multiplied with.
    norms = 33 * 2048
    assert palm - exact == 6 * 16 * 32 * 64 * (4096 - 1) + 6 * norms


@pytest.mark.slow  # of a benchmark
def test_the_picture_shows_every_point(tmp_path):
    ceilings = {"bf16": 800e12, "fp32": 50e12, "copy": 4e12, "read": 4.4e12}
    measured = roofline.with_ceilings(
        H200, flops={"bf16": 800e12, "fp32": 50e12}, hbm_bytes_per_s=4.4e12
    )
    work = roofline.matmul_work(512, 512, 512)
    points = [
        Point(name=f"a {group}", group=group, work=work, seconds=1e-5).as_json(measured)
        for group in picture.GROUPS
    ]
    document = {
        "device": "NVIDIA H200",
        "ceilings": ceilings,
        "points": [*points, {"name": "broken", "failed": "why"}],
    }
    file = tmp_path / "roofline.svg"
    picture.draw(json.loads(json.dumps(document)), file)
    text = file.read_text()
    assert all(f"a {group}" in text for group in picture.GROUPS)
    assert "broken" not in text
    assert "4.40 TB/s" in text


def test_the_page_tells_what_is_stored():
    page = (picture.ROOT / "docs/roofline.md").read_text()
    document = json.loads(picture.RESULTS.read_text())
    points = {point["name"]: point for point in document["points"]}

    def told(name, digits, unit):
        point = points[name]
        row = f"| {point['intensity']:.{digits}f} | {point[unit]:.0f}"
        share = f"| {point['of_attainable']:.0%} |"
        return [line for line in page.splitlines() if row in line and share in line]

    for name in ("clustered", "attention", "attention backward", "linear + cross entropy"):
        assert len(told(name, 0, "tflops")) == 1, name
    for name, digits in (("softmax", 2), ("rms_norm", 1), ("elu and gradient", 2)):
        assert len(told(name, digits, "gb_per_s")) == 1, name
