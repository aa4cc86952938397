"""Every picture of the README, drawn from what an experiment found.

    python bench.py plots                                  measure and draw all of them, some minutes on two cores
    python bench.py plots --only roofline bits             some of them
    python bench.py plots --redraw                         draw again what results/plots.json holds

A picture goes stale in silence: its numbers change, its description does not. So experiments (those of `bench.py
claims`, and two more) leave a sentence and series of plain numbers in plots.json, and here they are only drawn. Titles
and alt texts are in pictures.json, without numbers, so that they stay true:

    experiment(lab) -> Result ──► {"measured": ..., "series": ...} in plots.json ──► DRAWINGS[name] ──► SVG
                                       <desc> alt text, and the sentence with its numbers </desc> ◄──'

No background, and few colours, each four times darker than paper and four times lighter than the usual dark page; what
colour says, a marker or a hatch says too. Sources: Okabe and Ito (2008) for the hues; WCAG 2.1, sections 1.1.1 and
1.4.11; Williams et al. (CACM 2009) for the roofline. Left out: error bars; rates are medians of a few rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

from benchmarks.claims import RUNS
from benchmarks.lab import FULL, Lab, Sizes
from formats.command_line import as_command, given, refuse_unused, warn
from native.machine import usable_threads

PICTURES = json.loads(Path(__file__).with_name("pictures.json").read_text(encoding="utf-8"))
BLUE, RED, GREEN, GREY = "#1a80bb", "#d05a00", "#008f68", "#797c83"
STYLE = {
    "figure.figsize": (6.0, 3.6), "figure.constrained_layout.use": True, "font.size": 9.5, "axes.titlesize": 9.5,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY,
    "axes.labelcolor": GREY, "axes.titlecolor": GREY, "text.color": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GREY, "grid.alpha": 0.25, "axes.axisbelow": True,
    "lines.linewidth": 1.6, "lines.markersize": 5, "legend.frameon": False, "hatch.linewidth": 0.7,
    "savefig.transparent": True, "svg.hashsalt": "vitrine", "svg.fonttype": "path",
}  # fmt: skip


def label(panel, text: str, at: tuple, shift: tuple[float, float], **style) -> None:
    """A text beside a point, `shift` in points of print."""
    panel.annotate(text, at, shift, textcoords="offset points", **style)


def percent(panel) -> None:
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def kv_memory(series: dict, figure) -> None:
    looks = {
        "tokens": {"color": BLUE, "edgecolor": BLUE},
        "held, but empty": {"color": "none", "edgecolor": GREEN, "hatch": "///"},
        "free, and too little": {"color": "none", "edgecolor": RED, "hatch": "xxx"},
    }
    for panel, (side, bars) in zip(figure.subplots(1, 2, sharey=True), series.items(), strict=True):
        below, marks, parts = [0.0] * len(bars), [], list(zip(*bars, strict=True))
        for look, part in zip(looks.values(), parts, strict=True):
            marks.append(panel.bar(range(len(bars)), part, 0.8, below, linewidth=0.6, **look))
            below = [a + b for a, b in zip(below, part, strict=True)]
        panel.set(title=f"{side}: {fmean(parts[0]):.0%} tokens", xticks=[], xlabel="time →", ylim=(0, 1.0))
        percent(panel)
    figure.axes[0].set_ylabel("of the KV memory")
    figure.legend(marks, list(looks), loc="outside lower center", ncols=3)


def batch_chart(series: dict, figure) -> None:
    last = max(end for rows in series.values() for _, _, end, _ in rows)
    slots = 1 + max(slot for rows in series.values() for slot, *_ in rows)
    for panel, (side, rows) in zip(figure.subplots(2, 1, sharex=True), series.items(), strict=True):
        steps = max(end for _, _, end, _ in rows)
        panel.barh(range(slots), [steps] * slots, 0.72, color=GREY, alpha=0.25)
        for slot, start, end, number in rows:
            panel.barh(slot, end - start - last / 200, 0.72, start, color=BLUE)
            if end - start > last / 25:
                style = {"color": "white", "ha": "center", "va": "center_baseline", "fontsize": 6.5}
                panel.text((start + end) / 2, slot, number + 1, **style)
        used = sum(end - start for _, start, end, _ in rows) / slots / steps
        panel.set(title=f"{side} batching: {steps} steps, {used:.0%} of the batch slots used", ylabel="batch slot")
        panel.set(yticks=range(slots), yticklabels=range(1, slots + 1), xlim=(0, last), ylim=(slots - 0.5, -0.5))
        panel.grid(False)
    panel.set_xlabel("step (pale: an empty slot; numbers: requests)")


def chunking(series: dict, figure) -> None:
    panel, sides = figure.subplots(), list(series["gaps"].items())
    for (side, gaps), colour in zip((sides[0], sides[1]), (RED, BLUE), strict=True):  # unsplit, and the smallest chunks
        times, waits = zip(*gaps, strict=True)
        start = times[0] - waits[0] / 1e3
        panel.step([start, *times], [*waits, waits[-1]], where="post", color=colour)  # a wait is as long as it is high
        first = next(wait for time, wait in gaps if time > 0.5e-3)  # with a part of the prompt
        above = first == max(waits)
        style = {"color": colour, "va": "bottom" if above else "top", "in_layout": False}
        label(panel, f"{side}: at most {max(waits):,.0f} ms", (0, first), (6, 7 if above else -7), **style)
    panel.axvline(0, color=GREY, linestyle=":", linewidth=1)
    panel.text(0, 0.98, f" {series['long_prompt']:,} tokens arrive", transform=panel.get_xaxis_transform(), va="top")
    panel.set(yscale="log", ylabel="ms since the last token", xlabel="seconds since the long prompt arrived")
    panel.set_ylim(top=4 * max(wait for _, gaps in sides for _, wait in gaps))


def hit_rate(series: dict, figure) -> None:
    panel = figure.subplots()
    looks = {"fcfs": ("in order of arrival", RED, "o", -14), "lpm": ("longest cached prefix first", BLUE, "s", 8)}
    for policy, (name, colour, marker, shift) in looks.items():
        sizes, rates = zip(*series[policy], strict=True)
        panel.plot(sizes, rates, color=colour, marker=marker)
        label(panel, name, (sizes[1], rates[1]), (8, shift), color=colour)
    panel.set(ylim=(0, 1), xlabel="tokens that the KV memory holds", ylabel="of the prompts found in the cache")
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    percent(panel)


def radix_tree(series: dict, figure) -> None:
    panel, row = figure.subplots(), 0

    def draw(node: dict, start: int) -> float:
        """Children first: a node stands at the middle of them. Returns its height."""
        nonlocal row
        end, n_tokens, n_requests = start + node["tokens"], node["tokens"], node["requests"]
        heights = [draw(child, end) for child in node["children"]]
        row += not heights
        height = (min(heights) + max(heights)) / 2 if heights else float(row)
        for child in heights:
            panel.plot([end, end + 3], [height, child], color=GREY, linewidth=1)
        if n_tokens:
            panel.barh(height, n_tokens - 3, 0.36, start + 3, color=GREEN if n_requests > 1 else BLUE)
            said = f"{n_tokens} tokens, {n_requests} request{'s' * (n_requests > 1)}"
            if heights:
                panel.text(start + 3, height - 0.26, node["label"], va="bottom", fontsize=8.5)
                panel.text(start + 3, height + 0.26, said, va="top", fontsize=8.5)
            else:
                panel.text(end + 1.5, height, f"{node['label']}: {said}", va="center_baseline", fontsize=8.5)
        return height

    draw(series, 0)
    panel.set(ylim=(row + 0.6, 0.4), xlim=(-1, 165), yticks=[], xticks=range(0, 121, 20))
    panel.set_xlabel("tokens from the beginning (green: shared by several requests)", loc="left")
    panel.spines.left.set_visible(False)
    panel.spines.bottom.set_bounds(0, 120)
    panel.grid(False)


LOOKS = {"float32": (GREY, "o"), "bfloat16": (GREEN, "s"), "int8": (RED, "^"), "int4": (BLUE, "D")}


def roofline(series: dict, figure) -> None:
    panel, (bandwidth, single, integer) = figure.subplots(), series["ceilings"].values()
    low, high = 0.2, 3000.0
    for ceiling, name in ((single, "float32 products"), (integer, "8-bit integer products")):
        panel.plot([low, ceiling / bandwidth, high], [low * bandwidth, ceiling, ceiling], color=GREY, linewidth=1.2)
        panel.plot([low, ceiling / bandwidth], [ceiling, ceiling], color=GREY, linewidth=0.8, linestyle=":")
        panel.text(low * 1.2, ceiling * 1.07, f"{name}: {ceiling:,.0f}", va="bottom", fontsize=8.5)
    panel.text(low * 1.2, low * 9 * bandwidth, f"memory: {bandwidth:.0f} GB/s", fontsize=8.5)
    for name, row in series["configurations"].items():
        colour, marker = LOOKS[name.partition("-")[0]]
        look = {"color": colour, "markerfacecolor": "none" if "-" in name else colour, "markersize": 5.5}
        for batch, x, y in dots(row, series["prompt"]):
            panel.plot(x, y, marker, linestyle="none", **look)
            if name in ("float32", "int4"):
                label(panel, batch, (x, y), (0, -7), fontsize=7.5, ha="center", va="top", color=colour)
    marks = [panel.plot([], [], marker, color=colour, linestyle="none")[0] for colour, marker in LOOKS.values()]
    names = ["float32", "bfloat16", "int8 (hollow: in groups)", "int4 (hollow: larger groups)"]
    panel.legend(marks, names, loc="lower right", fontsize=8.5)
    panel.set(xscale="log", yscale="log", xlabel="operations per byte of weights and KV", xlim=(low, high))
    panel.set(ylabel="billion operations a second", ylim=(2, integer * 2.5))


def dots(row: dict, prompt: int) -> list[tuple[str, float, float]]:
    """(label, operations per byte, billion operations a second) of a configuration's batches and prompt."""
    points, token = [], 2 * (row["layer_parameters"] + row["head_parameters"])  # operations
    for batch, rate in row["decode_tok_s"].items():
        read = row["step_bytes"] + int(batch) * row["kv_bytes"]
        points.append((f"×{batch}", token * int(batch) / read, token * rate / 1e9))
    token = 2 * row["layer_parameters"]  # of a prompt only the last one passes the head
    return [*points, ("prefill", token * prompt / row["step_bytes"], token * row["prefill_tok_s"] / 1e9)]


PLACES = {  # of the names, beside dots that lie close together: points right, points up, alignment
    "float32": (0, 10, "center"), "bfloat16": (0, -10, "center"), "int8": (0, 10, "center"), "int8-g32": (7, 4, "left"),
    "int4": (0, -11, "center"), "int4-g64": (8, -1, "left"), "int4-g128": (-5, 10, "left"),
}  # fmt: skip


def bits(series: dict, figure) -> None:
    quality, speed = figure.subplots(1, 2)
    for name, row in series["configurations"].items():
        colour, marker = LOOKS[name.partition("-")[0]]
        dx, dy, align = PLACES[name]
        for panel, value in ((quality, row["perplexity"]), (speed, row["decode_tok_s"]["1"])):
            panel.plot(row["bits"], value, marker, color=colour, markersize=6)
            label(panel, name, (row["bits"], value), (dx, dy), fontsize=8, color=colour, ha=align, va="center")
    for panel, title in ((quality, "perplexity (lower is better)"), (speed, "tok/s, one sequence")):
        panel.set(title=title, xscale="log", xlabel="bits a weight", xlim=(4.2, 40))
        panel.set_xticks([4.5, 6, 8, 16, 32], ["4.5", "6", "8", "16", "32"])
        panel.minorticks_off()
        panel.margins(y=0.18)
    speed.set_ylim(bottom=0)


def acceptance(series: dict, figure) -> None:
    share, gain = figure.subplots(1, 2)
    for (text, points), colour, marker in zip(series.items(), (BLUE, GREEN, RED), "sDo", strict=True):
        lengths, shares, tokens = zip(*points, strict=True)
        for panel, values in ((share, shares), (gain, tokens)):
            panel.plot(lengths, values, color=colour, marker=marker)
        label(gain, text, (lengths[-1], tokens[-1]), (0, 7), color=colour, ha="right")
    share.set(title="guesses that were right", ylim=(0, 1), xlabel="guesses a step", xticks=lengths)
    percent(share)
    gain.set(title="tokens a step", xlabel="guesses a step", xticks=lengths)
    gain.set_ylim(bottom=0)
    gain.margins(y=0.2)


def load(series: dict, figure) -> None:
    rates = [row["rate"] for row in series["rates"]]
    titles = {"ttft_s": "time to first token, ms", "tpot_s": "time per later token, ms"}
    for panel, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for q, colour, marker in (("p95", RED, "o"), ("p50", BLUE, "s")):
            values = [1e3 * row[key][q] for row in series["rates"]]
            panel.plot(rates, values, color=colour, marker=marker)
            label(panel, q, (rates[-1], values[-1]), (6, 0), color=colour, va="center")
        panel.set(title=title, xlabel="requests a second", ylim=(0, None), xticks=rates)
        panel.margins(x=0.14)


DRAWINGS = {"kv-memory": kv_memory, "batch-chart": batch_chart, "chunking": chunking, "hit-rate": hit_rate}
DRAWINGS |= {"radix-tree": radix_tree, "roofline": roofline, "bits": bits, "acceptance": acceptance, "load": load}


def draw(name: str, result: dict, path: Path) -> None:
    """Draw one picture as SVG, described for those who do not see it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    title, alt = PICTURES[name]["title"], PICTURES[name]["alt"]
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure()
        DRAWINGS[name](result["series"], figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator")))
        pyplot.close(figure)
    words = f"<title>{escape(title)}</title>\n <desc>{escape(alt)} {escape(result['measured'])}.</desc>\n"
    head, tag, body = path.read_text(encoding="utf-8").partition("<svg ")
    opening, end, rest = body.partition(">")
    path.write_text(f'{head}{tag}role="img" {opening}{end}\n {words}{rest}', encoding="utf-8")


# ---- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.py plots", description="Measure what the pictures show, and draw them.")
    parser.add_argument("--out", type=Path, default=Path("results/plots"), metavar="DIR", help="data goes to DIR.json")
    names = list(PICTURES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--redraw", action="store_true", help="draw what DIR.json holds; measure nothing")
    parser.add_argument("--model", default="smollm2", metavar="M")
    parser.add_argument("--threads", type=int, default=min(2, usable_threads()[0]), metavar="N")
    parser.add_argument("--json", action="store_true", help="print what each picture shows as one JSON object")
    args = parser.parse_args(argv)
    if args.out.name in ("", ".."):
        parser.error(f"--out {args.out}: name a folder, beside which its data can lie")
    unmeasured = (["model", "threads"], not args.redraw, "--redraw measures nothing; leave them out")
    refuse_unused(given(parser, argv, args), unmeasured)
    return args


def gather(names: list[str], lab: Lab, file: Path) -> None:
    """Put what the experiments of these pictures find into `file`, one by one: whoever interrupts keeps the rest."""
    for name in dict.fromkeys(PICTURES[name]["experiment"] for name in names):
        began = time.perf_counter()
        result = RUNS[name](lab)
        lab.close()
        data = read(file) | {name: {"measured": result.measured, "series": result.series}}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())  # for `git diff`
        part = file.with_name(file.name + ".part")
        part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        part.replace(file)  # as a whole, or not at all
        warn(f"{name}: {time.perf_counter() - began:.0f} s")


def read(file: Path) -> dict:
    """What the experiments have found so far. Raises ValueError for a file that is no such thing."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and measure again") from None


def run(args: argparse.Namespace, sizes: Sizes = FULL) -> dict[str, str]:
    """Measure (unless --redraw) and draw; returns what each picture shows."""
    file = args.out.with_name(args.out.name + ".json")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.redraw:
        flags = {"model": args.model, "threads": args.threads, "quant": "int4", "compile": True}
        gather(args.only, Lab(flags, sizes), file)
    data, sentences = read(file), {}
    for name in args.only:
        try:
            result = data[PICTURES[name]["experiment"]]
            draw(name, result, args.out / f"{name}.svg")
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # none, or those of another version
            cause = f"no data for the picture {name} ({type(error).__name__}: {error})"
            raise ValueError(f"{file} has {cause}: leave out --redraw") from error
        sentences[name] = result["measured"]
    return sentences


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sentences = run(args)
    print(json.dumps(sentences) if args.json else "\n".join(f"{name:12} {text}" for name, text in sentences.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
