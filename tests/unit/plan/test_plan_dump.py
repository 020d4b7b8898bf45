"""The text, the picture and the command say what the plan says."""

import argparse
import json
import xml.etree.ElementTree as ElementTree

import pytest

from sgl_lowlatency.cli import plan as command
from sgl_lowlatency.plan import dump
from sgl_lowlatency.plan.picture import draw
from sgl_lowlatency.plan.presets import GEOMETRIES, MOE_GEOMETRIES
from sgl_lowlatency.plan.static_plan import make_plan

PLAN = make_plan(GEOMETRIES["qwen3-8b"], 2, 132, has_head=True)
WITHOUT_HEAD = make_plan(GEOMETRIES["qwen3-8b"], 2, 132)


def run(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(argv))


def test_bytes_and_floor_of_qwen3_8b():
    layer = 2 * 4096 * (6144 + 4096 + 3 * 12288) + 2 * (2 * 4096 + 2 * 128)
    assert dump.weight_bytes(WITHOUT_HEAD) == 36 * layer + 2 * 4096 * 3
    assert dump.weight_bytes(PLAN) == dump.weight_bytes(WITHOUT_HEAD) + 2 * 4096 * 151936
    assert dump.kv_bytes(PLAN, 1024) == 36 * 2 * 1024 * 2 * 8 * 128 * 2
    assert dump.floor_ms(4_650_000_000) == pytest.approx(1.0)


def test_text_names_every_op_edge_and_buffer():
    text = dump.to_text(PLAN)
    assert PLAN.hash[:16] in text
    lines = text.splitlines()
    for name in [*(op.name for op in PLAN.ops), "head", *(edge.name for edge in PLAN.edges), *(b.name for b in PLAN.buffers)]:
        assert any(line.split()[:1] == [name] for line in lines), name
    assert "12 x 2, 120 x 3" in text  # blocks x qkv tiles
    assert any(line.split()[:4] == ["attention", "4,096", "combine", "out_proj"] for line in lines)  # words: 2 rows of 4096 bf16
    assert f"8 generations of {PLAN.generation_bytes:,} bytes" in text and "layer l clears that of layer l + 4" in text
    assert "1.031 of the mean" in text
    assert any(line.split()[:2] == ["1,024", "15,136,827,392"] for line in lines)
    assert "12 x 2, 120 x 3" in text and "8 x 71, 124 x 72" in text and "behind the last one the LM head" in text  # blocks x tiles of the head


def test_text_of_a_step_without_a_head():
    text = dump.to_text(WITHOUT_HEAD)
    lines = text.splitlines()
    assert not any(line.split()[:1] == ["head"] for line in lines) and "ends at the final norm" in text
    assert any(line.split()[:2] == ["1,024", "13,892,167,680"] for line in lines)
    assert any("after the last layer: final norm" in line for line in draw(WITHOUT_HEAD).to_svg().splitlines())


def test_a_verify_step_says_what_it_is_made_of():
    plan = make_plan(GEOMETRIES["qwen3-8b"], 8, 132, rows_per_request=4)
    assert "8 rows (2 requests of 4) on 132 blocks" in dump.to_text(plan)
    assert dump.kv_bytes(plan, 1024) == dump.kv_bytes(PLAN, 1024), "K and V of a request are read once for its rows"
    assert "8 rows (2 requests of 4)" in draw(plan).to_svg()


def test_picture_is_svg_with_a_bar_piece_per_block_and_op(tmp_path):
    draw(PLAN).save(tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    down = [r for r in root.iter(f"{svg}rect") if r.get("fill") == "#54a24b"]
    assert len(down) == 132 + 2  # every block owns down tiles; one box of the flow, one of the legend
    texts = [t.text for t in root.iter(f"{svg}text")]
    assert any(PLAN.hash[:12] in text for text in texts)
    assert {"qkv", "attention", "out_proj", "gate_up", "down"} <= set(texts)
    assert {"12,288 words", "4,096 words", "8,704 words"} <= set(texts)
    assert any("LM head, 9,496 tiles, logits out; final norm, hidden out" in text for text in texts)


def test_picture_ending_is_checked(tmp_path):
    with pytest.raises(ValueError, match="neither .svg nor .png"):
        draw(PLAN).save(tmp_path / "plan.pdf")


def test_png_has_the_canvas_size(tmp_path):
    image = pytest.importorskip("PIL.Image")
    draw(PLAN).save(tmp_path / "plan.png")
    with image.open(tmp_path / "plan.png") as png:
        assert png.size == (1180, 640)
        assert png.getpixel((70, 120)) == (0x4C, 0x78, 0xA8)  # the qkv box


def test_command_plans_a_verify_step(capsys):
    assert run("--geometry", "qwen3-8b", "--rows", "8", "--rows-per-request", "4") == 0
    assert "2 requests of 4" in capsys.readouterr().out
    assert run("--geometry", "qwen3-8b", "--rows", "8", "--rows-per-request", "3") == 2
    assert "rows 8 is not a multiple of rows_per_request 3" in capsys.readouterr().err


def test_command_prints_text(capsys):
    assert run("--geometry", "qwen3-8b", "--rows", "2") == 0
    out = capsys.readouterr().out
    assert PLAN.hash[:16] in out and "\nvalid: " in out


def test_command_prints_the_json_that_the_hash_covers(capsys):
    assert run("--geometry", "qwen3-8b", "--rows", "2", "--json") == 0
    assert capsys.readouterr().out == PLAN.to_json() + "\n"


def test_command_plans_a_step_without_a_head(capsys):
    assert run("--geometry", "qwen3-8b", "--rows", "2", "--without-head") == 0
    assert WITHOUT_HEAD.hash[:16] in capsys.readouterr().out


def test_command_reads_a_config(tmp_path, capsys):
    config = {
        "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("--geometry", str(tmp_path), "--grid", "4", "--picture", str(tmp_path / "out.svg")) == 0
    assert "hidden 256, 4 q heads, 2 kv heads of 64" in capsys.readouterr().out
    assert (tmp_path / "out.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--geometry", "gpt-9"), "--geometry gpt-9 is neither one of qwen3-0.6b"),
        (("--geometry", "qwen3-8b", "--rows", "40"), "rows 40 is outside 1..32"),
        (("--geometry", "qwen3-8b", "--picture", "x.pdf"), "neither .svg nor .png"),
    ],
)
def test_command_refuses_with_the_reason(argv, message, capsys):
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


def test_a_moe_plan_says_what_is_shared_out_and_counts_experts():
    """By hand: 128 (1 - (15 / 16)^2) = 15.5 distinct experts of 2 rows, 9,437,184 bytes each."""
    plan = make_plan(MOE_GEOMETRIES["qwen3-30b-a3b"], 2, 128, has_head=True)
    layer = 2 * 2048 * (5120 + 4096 + 128) + 2 * (2 * 2048 + 2 * 128) + round(15.5 * 9_437_184)
    assert dump.weight_bytes(plan) == 48 * layer + 2 * 2048 * (151936 + 3)
    text = dump.to_text(plan)
    assert "128 experts of 768, 8 a row" in text and "15.5 distinct experts a layer" in text and "shared out on the device" in text
    assert any(line.split()[:3] == ["router", "2,048", "2,048"] for line in text.splitlines())
    picture = draw(plan).to_svg()
    assert all(words in picture for words in ("router", "gate_up: shared out by routing", "128 experts of 768, 8 a row"))
    ElementTree.fromstring(picture)
