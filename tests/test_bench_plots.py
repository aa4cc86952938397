"""Pictures from tiny data: what is counted has the right sign, each is drawn, described, and named in the README."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import tiny

import bench
from benchmarks import plot_data as bench_plot_data
from benchmarks import plots as bench_plots
from benchmarks.plot_data import Bench, Sizes
from benchmarks.plots import PICTURES

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
SMALL = Sizes(
    trace_requests=200, batch_requests=10, hit_requests=120, hit_blocks=(128, 512, 2048), long_prompt=200, prompt=40,
    batches=(1, 2), gen=4, repeat=1, drafts=(1, 3), draft_gen=40, rates=(20.0, 40.0), load_requests=3, load_gen=4,
    configurations=("float32", "int4"),
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("plots")
    (path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log", encoding="utf-8")
    folder = tiny.hf_folder(path / "m", "llama", tie_word_embeddings=True)
    small = Bench(str(folder), 1, SMALL, path / "text.txt")
    bench_plots.gather(list(PICTURES), small, path / "plots.json")
    return bench_plots.read(path / "plots.json")


def test_pages_leave_less_unused_than_slabs(data):
    slab, pages = data["kv-memory"].values()
    assert slab["mean"]["tokens"] < 0.5 < 0.9 < pages["mean"]["tokens"]
    assert slab["mean"]["fragments"] > 0.2 > 0.01 > pages["mean"]["fragments"]
    for side in (slab, pages):
        bars = list(zip(*(side[part] for part in bench_plot_data.PARTS), strict=True))
        assert 2 < len(bars) <= 24 and all(0 < sum(bar) <= 1.001 for bar in bars)


def test_batch_slots_hold_one_request_at_a_time_and_fill_sooner_with_continuous_batching(data):
    static, continuous = data["batch-chart"].values()
    for rows in (static, continuous):
        assert sorted(number for *_, number in rows) == list(range(10))
        for slot in range(4):
            taken = sorted((start, end) for at, start, end, _ in rows if at == slot)
            assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:], strict=False))
    lengths = [{number: end - start for _, start, end, number in rows} for rows in (static, continuous)]
    assert lengths[0] == lengths[1]
    assert max(end for _, _, end, _ in continuous) < max(end for _, _, end, _ in static)


def test_hits_rise_with_the_cache_and_with_the_order(data):
    fcfs, lpm = ([rate for _, rate in data["hit-rate"][policy]] for policy in ("fcfs", "lpm"))
    assert fcfs[0] < fcfs[-1] < 1 and lpm[0] < lpm[-1] < 1 and lpm[0] > fcfs[0] + 0.05


def test_the_tree_holds_what_is_shared_once(data):
    found = data["radix-tree"]
    nodes = []

    def walk(node: dict) -> None:
        nodes.append(node)
        for child in node["children"]:
            assert child["requests"] <= node["requests"] and child["tokens"] == 8 * child["blocks"]
            walk(child)

    walk(found["tree"])
    assert sum(node["tokens"] for node in nodes) == found["computed_tokens"] < found["prompt_tokens"] / 2
    names = {node["label"]: node["requests"] for node in nodes}
    assert names["system prompt"] == 5 and names["four examples"] == 3 and names["chat 1, turn 2, turn 3"] == 3


def test_longer_drafts_are_right_less_often_and_never_lose_a_token(data):
    for points in data["acceptance"].values():
        lengths, shares, tokens = zip(*points, strict=True)
        assert lengths == (1, 3) and all(0 <= share <= 1 for share in shares)
        assert all(1 <= gained <= 1 + length for length, gained in zip(lengths, tokens, strict=True))
    assert data["acceptance"]["text that repeats"][1][2] > 1  # a random model soon repeats itself


def test_both_ways_to_compute_a_long_prompt_give_as_many_tokens(data):
    whole, chunks = data["chunking"]["sides"].values()
    assert len(whole["gaps"]) == len(chunks["gaps"]) == 23 + 4  # 24 and one for each of 4 chunks, the first has no gap
    assert data["chunking"]["long_prompt"] == 200


def test_configurations_are_counted(data):
    dense, int4 = data["configurations"]["found"].values()
    assert dense["bits"] == 32 and 4 < int4["bits"] < 9 and int4["step_bytes"] < dense["step_bytes"] / 3
    assert set(int4["decode_tok_s"]) == {"1", "2"} and int4["perplexity"] > 1
    assert [row["rate"] for row in data["load"]["rates"]] == [20, 40]
    assert all(row["failed"] == 0 and row["requests"] == 3 for row in data["load"]["rates"])


def test_a_dot_of_the_roofline_is_operations_over_bytes():
    found = {
        "bits": 5.0, "step_bytes": 100e6, "kv_bytes": 10e6, "layer_parameters": 90e6, "head_parameters": 10e6,
        "decode_tok_s": {"1": 50.0, "8": 100.0}, "prefill_tok_s": 400.0,
    }  # fmt: skip
    ceilings = {"read GB/s": 10.0, "float32 GFLOP/s": 60.0, "int8 GOP/s": 200.0}
    one, eight, prefill = bench_plots.dots(found, {"prompt": 512, "ceilings": ceilings})
    assert one == ("×1", pytest.approx(200 / 110), pytest.approx(10.0), pytest.approx(10 * 200 / 110))
    assert eight == ("×8", pytest.approx(1600 / 180), pytest.approx(20.0), pytest.approx(10 * 1600 / 180))
    assert prefill == ("prefill", pytest.approx(180 * 512 / 100), pytest.approx(72.0), 200.0)
    (*_, dense) = bench_plots.dots(found | {"bits": 32.0}, {"prompt": 512, "ceilings": ceilings})
    assert dense[3] == 60.0


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn_and_described(name, data, tmp_path):
    picture = PICTURES[name]
    found = bench_plots.draw(name, data[picture.data], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img" and root[0].tag == SVG + "title" and root[0].text == picture.title
    assert root[1].tag == SVG + "desc" and root[1].text == f"{picture.alt} {found}" and found.endswith(".")
    allowed = {bench_plots.BLUE, bench_plots.RED, bench_plots.GREEN, bench_plots.GREY, "#ffffff"}
    assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text)) <= allowed  # no black: nothing gets lost on a page
    bench_plots.draw(name, data[picture.data], tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text(encoding="utf-8") == text


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("colour", ["BLUE", "RED", "GREEN", "GREY"])
def test_colours_stand_out_on_paper_and_on_a_dark_page(colour):
    light = luminance(getattr(bench_plots, colour)) + 0.05
    assert 1.05 / light >= 4 and light / (luminance("#0d1117") + 0.05) >= 4


def test_the_readme_shows_each_picture_with_its_alt_text():
    shown = dict(
        re.findall(r"!\[([^\]]*)\]\((results/plots/[^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    )
    assert shown == {picture.alt: f"results/plots/{name}.svg" for name, picture in PICTURES.items()}
    kept = json.loads((ROOT / "results" / "plots.json").read_text(encoding="utf-8"))
    for name, picture in PICTURES.items():
        drawn = (ROOT / "results" / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        assert picture.data in kept and f"<title>{picture.title}</title>" in drawn and picture.alt in drawn


def test_redrawing_measures_nothing(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "p.json").write_text(json.dumps({"hit-rate": data["hit-rate"]}), encoding="utf-8")
    monkeypatch.setattr(bench_plots, "gather", None)
    flags = ["plots", "--redraw", "--out", str(tmp_path / "p"), "--only", "hit-rate"]
    assert bench.main([*flags, "--json"]) == 0
    assert "in order of arrival" in json.loads(capsys.readouterr().out)["hit-rate"]
    assert (tmp_path / "p" / "hit-rate.svg").exists()
    for flag in (["--model", "smollm2"], ["--threads", "2"]):
        assert bench.main([*flags, *flag]) == 2
        assert f"{flag[0]} would change nothing here: --redraw measures nothing" in capsys.readouterr().err
    assert bench.main([*flags, "load"]) == 2 and "no data for load: leave out --redraw" in capsys.readouterr().err


def test_pictures_not_asked_for_keep_their_data(tmp_path, capsys):
    (tmp_path / "p.json").write_text('{"load": {"rates": []}}', encoding="utf-8")
    assert bench.main(["plots", "--out", str(tmp_path / "p"), "--only", "radix-tree"]) == 0
    assert set(json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))) == {"load", "radix-tree"}
    assert "came from the tree" in capsys.readouterr().out


def test_what_was_gathered_before_a_failure_is_kept(tmp_path, monkeypatch):
    def failing(small):
        raise ValueError("no server")

    monkeypatch.setitem(bench_plots.GATHER, "load", failing)
    assert bench.main(["plots", "--out", str(tmp_path / "p"), "--only", "radix-tree", "load"]) == 2
    assert set(bench_plots.read(tmp_path / "p.json")) == {"radix-tree"}


@pytest.mark.parametrize("content", ["", "[]", "null", "1", "{", '{"radix-tree": 1}', '{"radix-tree": {"tree": {}}}'])
def test_damaged_data_are_named(tmp_path, capsys, content):
    (tmp_path / "p.json").write_text(content, encoding="utf-8")
    flags = ["plots", "--out", str(tmp_path / "p"), "--only", "radix-tree"]
    assert bench.main([*flags, "--redraw"]) == 2
    said = capsys.readouterr().err
    assert "p.json" in said and ("leave out --redraw" in said or "damaged" in said)
    assert bench.main(flags) == (0 if "radix" in content else 2)


def test_two_folders_do_not_share_their_data(tmp_path, capsys):
    for name in ("v1.2", "v1.3"):
        assert bench.main(["plots", "--out", str(tmp_path / name), "--only", "radix-tree"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"v1.2", "v1.2.json", "v1.3", "v1.3.json"}
    for out in (".", "..", "/"):
        with pytest.raises(SystemExit):
            bench.main(["plots", "--out", out])
        assert "name a folder" in capsys.readouterr().err
