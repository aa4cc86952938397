"""The pictures and their data: what is counted has the right sign, each is drawn, described, and in the README."""

import json
import re
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from pathlib import Path
from statistics import fmean

import pytest
import tiny

import bench
from benchmarks import guessing
from benchmarks import plots as bench_plots
from benchmarks.lab import Sizes
from benchmarks.plots import PICTURES

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
SMALL = Sizes(
    rounds=1, trace_requests=200, batch_requests=10, lpm_requests=60, long_prompt=200, budgets=(64,), decoded=4,
    configurations=("float32", "int8", "int4"), batches=(1, 2), text=60, guessed=40, rates=(20.0, 40.0),
    load_requests=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict:
    """What the experiments of all pictures find with a tiny model, by experiment."""
    path = tmp_path_factory.mktemp("plots")
    folder = tiny.hf_folder(path / "m", "llama", tie_word_embeddings=True, max_position_embeddings=2048)
    args = Namespace(out=path / "p", only=list(PICTURES), redraw=False, model=str(folder), threads=1)
    with pytest.MonkeyPatch.context() as patch:
        same = {"temperature": 0.0, "logit_bias": {5: 100}}  # the one text that a random model repeats
        patch.setitem(guessing.TEXTS, "quotes", (guessing.TEXTS["story"][0], same))
        assert list(bench_plots.run(args, SMALL)) == list(PICTURES)
    return bench_plots.read(path / "p.json")


def test_pages_leave_less_unused_than_slabs(data):
    slab, pages = data["kv-memory"]["series"].values()
    for bars in (slab, pages):
        assert 2 < len(bars) <= 24 and all(sum(bar) == pytest.approx(1, abs=1e-3) for bar in bars)
    assert fmean(tokens for tokens, *_ in slab) < 0.5 < 0.9 < fmean(tokens for tokens, *_ in pages)


def test_batch_slots_hold_one_request_at_a_time_and_fill_sooner_with_continuous_batching(data):
    static, continuous = data["batching"]["series"].values()
    for rows in (static, continuous):
        assert sorted(number for *_, number in rows) == list(range(10))
        for slot in range(8):
            taken = sorted((start, end) for at, start, end, _ in rows if at == slot)
            assert taken and all(a[1] <= b[0] for a, b in zip(taken, taken[1:], strict=False))
    lengths = [{number: end - start for _, start, end, number in rows} for rows in (static, continuous)]
    assert lengths[0] == lengths[1]
    assert max(end for _, _, end, _ in continuous) < max(end for _, _, end, _ in static)


def test_hits_rise_with_the_cache_and_with_the_order(data):
    fcfs, lpm = ([rate for _, rate in data["lpm"]["series"][policy]] for policy in ("fcfs", "lpm"))
    assert fcfs[0] < fcfs[-1] < 1 and lpm[0] < lpm[-1] < 1 and lpm[0] > fcfs[0] + 0.05


def test_the_tree_holds_what_is_shared_once(data):
    nodes = [data["radix-tree"]["series"]]
    for node in nodes:  # grows as it is read
        nodes += node["children"]
        assert all(child["requests"] <= node["requests"] for child in node["children"]) and node["tokens"] % 8 == 0
    assert f"{sum(node['tokens'] for node in nodes)} of them computed" in data["radix-tree"]["measured"]
    names = {node["label"]: node["requests"] for node in nodes}
    assert names["system prompt"] == 5 and names["four examples"] == 3 and names["chat 1, turn 2, turn 3"] == 3


def test_series_hold_what_was_asked_for(data):
    for points in data["speculation"]["series"].values():
        assert all(0 <= share <= 1 <= tokens <= 1 + length for length, share, tokens in points)
    assert [round(tokens) for *_, tokens in data["speculation"]["series"]["quotes"]][:4] == [2, 3, 4, 4]
    whole, chunks = data["chunked-prefill"]["series"]["gaps"].values()
    assert len(whole) == len(chunks) == 15 + 4  # 16 tokens and one for each of 4 chunks, the first has no gap
    dense, _, int4 = data["quantisation"]["series"]["configurations"].values()
    assert dense["bits"] == 32 and 4 < int4["bits"] < 9 and int4["step_bytes"] < dense["step_bytes"] / 3
    assert set(int4["decode_tok_s"]) == {"1", "2"} and int4["perplexity"] > 1
    assert [row["rate"] for row in data["load"]["series"]["rates"]] == [20, 40]


def test_a_dot_of_the_roofline_is_operations_over_bytes():
    found = {
        "step_bytes": 100e6, "kv_bytes": 10e6, "layer_parameters": 90e6, "head_parameters": 10e6,
        "decode_tok_s": {"1": 50.0, "8": 100.0}, "prefill_tok_s": 400.0,
    }  # fmt: skip
    one, eight, prefill = bench_plots.dots(found, 512)
    assert one == ("×1", pytest.approx(200 / 110), pytest.approx(10.0))
    assert eight == ("×8", pytest.approx(1600 / 180), pytest.approx(20.0))
    assert prefill == ("prefill", pytest.approx(180 * 512 / 100), pytest.approx(72.0))


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn_and_described(name, data, tmp_path):
    picture, found = PICTURES[name], data[PICTURES[name]["experiment"]]
    bench_plots.draw(name, found, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img" and root[0].tag == SVG + "title" and root[0].text == picture["title"]
    assert root[1].tag == SVG + "desc" and root[1].text == f"{picture['alt']} {found['measured']}."
    allowed = {bench_plots.BLUE, bench_plots.RED, bench_plots.GREEN, bench_plots.GREY, "#ffffff"}
    assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text)) <= allowed  # no black: nothing gets lost on a page
    bench_plots.draw(name, found, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text(encoding="utf-8") == text


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05


def test_colours_stand_out_on_paper_and_on_a_dark_page():
    for colour in (bench_plots.BLUE, bench_plots.RED, bench_plots.GREEN, bench_plots.GREY):
        assert 1.05 / luminance(colour) >= 4 and luminance(colour) / luminance("#0d1117") >= 4


def test_the_readme_shows_each_picture_as_it_was_drawn(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"!\[([^\]]*)\]\((results/plots/[^)]*)\)", readme))
    assert shown == {picture["alt"]: f"results/plots/{name}.svg" for name, picture in PICTURES.items()}
    kept = bench_plots.read(ROOT / "results" / "plots.json")
    for name, picture in PICTURES.items():
        drawn = (ROOT / "results" / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        assert f"<title>{picture['title']}</title>" in drawn and picture["alt"] in drawn
        bench_plots.draw(name, kept[picture["experiment"]], tmp_path / f"{name}.svg")


def test_redrawing_measures_nothing(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "p.json").write_text(json.dumps({"lpm": data["lpm"]}), encoding="utf-8")
    monkeypatch.setattr(bench_plots, "gather", None)
    flags = ["plots", "--redraw", "--out", str(tmp_path / "p"), "--only", "hit-rate"]
    assert bench.main([*flags, "--json"]) == 0 and (tmp_path / "p" / "hit-rate.svg").exists()
    assert json.loads(capsys.readouterr().out) == {"hit-rate": data["lpm"]["measured"]}
    assert bench.main([*flags, "--threads", "2"]) == 2
    assert "--threads would change nothing here: --redraw measures nothing" in capsys.readouterr().err


def test_what_was_found_before_is_kept_also_when_another_fails(tmp_path, monkeypatch, capsys):
    def failing(lab):
        raise ValueError("no server")

    monkeypatch.setitem(bench_plots.RUNS, "load", failing)
    (tmp_path / "p.json").write_text('{"batching": {}}', encoding="utf-8")
    assert bench.main(["plots", "--out", str(tmp_path / "p"), "--only", "radix-tree", "load"]) == 2
    assert "no server" in capsys.readouterr().err and {"p.json", "p"} == {path.name for path in tmp_path.iterdir()}
    assert set(bench_plots.read(tmp_path / "p.json")) == {"batching", "radix-tree"}


DAMAGED = ("", "[1]", "null", "1", "{", "{}", '{"radix-tree": 1}', '{"radix-tree": {"series": {}}}')


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_data_are_named(tmp_path, capsys, content):
    (tmp_path / "p.json").write_text(content, encoding="utf-8")
    flags = ["plots", "--out", str(tmp_path / "p"), "--only", "radix-tree"]
    assert bench.main([*flags, "--redraw"]) == 2
    said = capsys.readouterr().err
    assert "p.json has no data for the picture radix-tree" in said or "p.json is damaged" in said
    assert bench.main(flags) == (0 if content.endswith("}") else 2)


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_data_lie_beside_a_folder_with_a_name(out, capsys):
    with pytest.raises(SystemExit):
        bench.main(["plots", "--out", out])
    assert "name a folder" in capsys.readouterr().err
