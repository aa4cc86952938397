"""Every picture of the README: what it needs, how it is drawn, and its description for those who do not see it.

    python bench.py plots                                  gather and draw all of them, some minutes on two cores
    python bench.py plots --only roofline bits             some of them
    python bench.py plots --redraw                         draw again what results/plots.json holds

The problem. A picture in a document goes stale in silence: its numbers change, its description does not. And it is read
on white paper, on a black page, by eyes that do not tell red from green, and by a screen reader.

The idea. One table, PICTURES: the data (plot_data.py), the drawing, a title and an alt text. The alt text holds no
numbers, so that it stays true; the README repeats it. The numbers go into the SVG, in the sentence a drawing returns:

    <svg role="img">  <title> what it is about </title>  <desc> alt text, and the sentence with its numbers </desc>

No background, and few colours, each four times darker than paper and four times lighter than the usual dark page; what
colour says, a marker or a hatch says too. Sources: Okabe and Ito (2008) for the hues; WCAG 2.1, sections 1.1.1 and
1.4.11; Williams et al. (CACM 2009) for the roofline. Left out: other formats; an SVG prints at any size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.plot_data import GATHER, PARTS, Bench, Sizes
from formats.command_line import as_command, given, refuse_unused, warn
from native.machine import usable_threads

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


def kv_memory(data: dict, figure) -> str:
    looks = {"tokens": (BLUE, ""), "reserved": (GREEN, "///"), "fragments": (RED, "xxx")}
    sentences = []
    for panel, (side, parts) in zip(figure.subplots(1, 2, sharey=True), data.items(), strict=True):
        below = [0.0] * len(parts["tokens"])
        for part in PARTS:
            colour, hatch = looks[part]
            fill = colour if part == "tokens" else "none"
            panel.bar(
                range(len(below)), parts[part], 0.8, below, color=fill, edgecolor=colour, hatch=hatch, linewidth=0.6
            )
            below = [a + b for a, b in zip(below, parts[part], strict=True)]
        panel.set(title=side, xticks=[], xlabel="time →", ylim=(0, 1.0))
        percent(panel)
        sentences.append(f"{side}: " + ", ".join(f"{parts['mean'][part]:.0%} {part}" for part in PARTS))
    figure.axes[0].set_ylabel("of the KV memory")
    marks = [swatch(*looks[part], filled=part == "tokens") for part in PARTS]
    names = ["tokens", "reserved: will be filled", "fragments: never used"]
    figure.legend(marks, names, loc="outside lower center", ncols=3)
    return "; ".join(sentences) + "."


def swatch(colour: str, hatch: str, filled: bool):
    from matplotlib.patches import Patch

    return Patch(facecolor=colour if filled else "none", edgecolor=colour, hatch=hatch)


def batch_chart(data: dict, figure) -> str:
    last = max(end for rows in data.values() for _, _, end, _ in rows)
    slots = 1 + max(slot for rows in data.values() for slot, *_ in rows)
    sentences = []
    for panel, (side, rows) in zip(figure.subplots(2, 1, sharex=True), data.items(), strict=True):
        steps = max(end for _, _, end, _ in rows)
        panel.barh(range(slots), [steps] * slots, 0.72, color=GREY, alpha=0.25)
        for slot, start, end, number in rows:
            panel.barh(slot, end - start - 0.6, 0.72, start + 0.3, color=BLUE)
            if end - start > 4:
                middle = (start + end) / 2
                panel.text(middle, slot, number + 1, color="white", ha="center", va="center_baseline", fontsize=7.5)
        used = sum(end - start for _, start, end, _ in rows) / slots / steps
        sentences.append(f"{side} batching: {steps} steps, {used:.0%} of the batch slots used")
        panel.set(title=sentences[-1], ylabel="batch slot", yticks=range(slots), yticklabels=range(1, slots + 1))
        panel.set(xlim=(0, last), ylim=(slots - 0.5, -0.5))
        panel.grid(False)
    panel.set_xlabel("step (pale: an empty slot; numbers: requests)")
    return "; ".join(sentences) + "."


def chunking(data: dict, figure) -> str:
    panel, sentences = figure.subplots(), []
    for (side, series), colour in zip(data["sides"].items(), (RED, BLUE), strict=True):
        times = [seconds - series["arrived"] for seconds, _ in series["gaps"]]
        gaps = [gap for _, gap in series["gaps"]]
        start = times[0] - gaps[0] / 1e3
        panel.step([start, *times], [*gaps, gaps[-1]], where="post", color=colour)  # a wait is as long as it is high
        first = next(gap for gap, time in zip(gaps, times, strict=True) if time > 0.5e-3)  # with a part of the prompt
        above = first == max(gaps)
        style = {"color": colour, "va": "bottom" if above else "top", "in_layout": False}
        label(panel, f"{side}: at most {max(gaps):,.0f} ms", (0, first), (6, 7 if above else -7), **style)
        sentences.append(f"{side}: the longest gap is {max(gaps):,.0f} ms")
    panel.axvline(0, color=GREY, linestyle=":", linewidth=1)
    panel.text(0, 0.98, f" {data['long_prompt']:,} tokens arrive", transform=panel.get_xaxis_transform(), va="top")
    panel.set(yscale="log", ylabel="ms since the last token", xlabel="seconds since the long prompt arrived")
    panel.set_ylim(top=4 * max(gap for series in data["sides"].values() for _, gap in series["gaps"]))
    return "; ".join(sentences) + "."


def hit_rate(data: dict, figure) -> str:
    panel, sentences = figure.subplots(), []
    names = {"fcfs": "in order of arrival", "lpm": "longest cached prefix first"}
    for (policy, points), colour, marker, below in zip(data.items(), (RED, BLUE), "os", (True, False), strict=True):
        sizes, rates = zip(*points, strict=True)
        panel.plot(sizes, rates, color=colour, marker=marker)
        shift, va = ((8, -8), "top") if below else ((-4, 20), "bottom")
        label(panel, names[policy], (sizes[below], rates[below]), shift, color=colour, va=va)
        sentences.append(
            f"{names[policy]}: {rates[0]:.0%} with {sizes[0]:,} tokens of KV, {rates[-1]:.0%} with {sizes[-1]:,}"
        )
    panel.set(
        xscale="log", ylim=(0, 1), xlabel="tokens that the KV memory holds", ylabel="of the prompts found in the cache"
    )
    ticks = [size for size in sizes if size & (size - 1) == 0]  # powers of two have room for their names
    panel.set_xticks(ticks, [f"{size:,}" for size in ticks])
    panel.minorticks_off()
    percent(panel)
    return "; ".join(sentences) + "."


def radix_tree(data: dict, figure) -> str:
    panel, row = figure.subplots(), 0

    def draw(node: dict, start: int) -> float:
        """Children first: a node stands at the middle of them. Returns its height."""
        nonlocal row
        end = start + node["tokens"]
        heights = [draw(child, end) for child in node["children"]]
        if not heights:
            row += 1
        height = (min(heights) + max(heights)) / 2 if heights else float(row)
        for child in heights:
            panel.plot([end, end + 3], [height, child], color=GREY, linewidth=1)
        if node["tokens"]:
            shared, said = node["requests"] > 1, f"{node['tokens']} tokens, {node['requests']} request"
            panel.barh(height, node["tokens"] - 3, 0.36, start + 3, color=GREEN if shared else BLUE)
            said += "s" * shared
            if heights:
                panel.text(start + 3, height - 0.26, node["label"], va="bottom", fontsize=8.5)
                panel.text(start + 3, height + 0.26, said, va="top", fontsize=8.5)
            else:
                panel.text(end + 1.5, height, f"{node['label']}: {said}", va="center_baseline", fontsize=8.5)
        return height

    draw(data["tree"], 0)
    panel.set(ylim=(row + 0.6, 0.4), xlim=(-1, 165), yticks=[])
    panel.set_xlabel("tokens from the beginning (green: shared by several requests)", loc="left")
    panel.set_xticks(range(0, 121, 20))
    panel.spines.left.set_visible(False)
    panel.spines.bottom.set_bounds(0, 120)
    panel.grid(False)
    return (
        f"{data['prompt_tokens']} prompt tokens were asked for, {data['computed_tokens']} of them computed and held: "
        f"{1 - data['computed_tokens'] / data['prompt_tokens']:.0%} came from the tree."
    )


LOOKS = {"float32": (GREY, "o"), "bfloat16": (GREEN, "s"), "int8": (RED, "^"), "int4": (BLUE, "D")}


def roofline(data: dict, figure) -> str:
    panel = figure.subplots()
    bandwidth, single, integer = data["ceilings"].values()
    low, high = 0.2, 3000.0
    for ceiling, name in ((single, "float32 products"), (integer, "8-bit integer products")):
        panel.plot([low, ceiling / bandwidth, high], [low * bandwidth, ceiling, ceiling], color=GREY, linewidth=1.2)
        panel.plot([low, ceiling / bandwidth], [ceiling, ceiling], color=GREY, linewidth=0.8, linestyle=":")
        panel.text(low * 1.2, ceiling * 1.07, f"{name}: {ceiling:,.0f}", va="bottom", fontsize=8.5)
    panel.text(low * 1.2, low * 9 * bandwidth, f"memory: {bandwidth:.0f} GB/s", fontsize=8.5)
    best = {}
    for name, f in data["found"].items():
        colour, marker = LOOKS[name.partition("-")[0]]
        for batch, x, y, ceiling in dots(f, data):
            filled = colour if "-" not in name else "none"
            panel.plot(x, y, marker, color=colour, markerfacecolor=filled, markersize=5.5, linestyle="none")
            best.setdefault(batch, {})[name] = y / ceiling
            if name in ("float32", "int4"):
                style = {"fontsize": 7.5, "ha": "center", "va": "top", "color": colour}
                label(panel, batch, (x, y), (0, -7), **style)
    marks = [panel.plot([], [], marker, color=colour, linestyle="none")[0] for colour, marker in LOOKS.values()]
    names = ["float32", "bfloat16", "int8 (hollow: in groups)", "int4 (hollow: larger groups)"]
    panel.legend(marks, names, loc="lower right", fontsize=8.5)
    panel.set(xscale="log", yscale="log", xlabel="operations per byte of weights and KV", xlim=(low, high))
    panel.set(ylabel="billion operations a second", ylim=(2, integer * 2.5))
    shares = ", ".join(f"{batch} {by['int4']:.0%}" for batch, by in best.items() if "int4" in by)
    return f"Share of the ceiling above each dot, int4: {shares}."


def dots(f: dict, data: dict) -> list[tuple[str, float, float, float]]:
    """(label, operations per byte, billion operations a second, the roof there) of a configuration."""
    bandwidth, single, integer = data["ceilings"].values()
    points = []
    for batch, rate in f["decode_tok_s"].items():
        operations = 2 * (f["layer_parameters"] + f["head_parameters"])  # of one token
        points.append(
            (f"×{batch}", operations * int(batch) / (f["step_bytes"] + int(batch) * f["kv_bytes"]), operations * rate)
        )
    operations = 2 * f["layer_parameters"] * data["prompt"]
    points.append(("prefill", operations / f["step_bytes"], operations * f["prefill_tok_s"] / data["prompt"]))
    peak = integer if f["bits"] < 16 else single
    return [(label, x, y / 1e9, min(x * bandwidth, peak)) for label, x, y in points]


PLACES = {  # of the names, beside dots that lie close together: points right, points up, alignment
    "float32": (0, 10, "center"), "bfloat16": (0, -10, "center"), "int8": (0, 10, "center"), "int8-g32": (7, 4, "left"),
    "int4": (0, -11, "center"), "int4-g64": (8, -1, "left"), "int4-g128": (-5, 10, "left"),
}  # fmt: skip


def bits(data: dict, figure) -> str:
    quality, speed = figure.subplots(1, 2)
    ordered = sorted(data["found"].items(), key=lambda item: item[1]["bits"])
    for name, f in ordered:
        colour, marker = LOOKS[name.partition("-")[0]]
        dx, dy, align = PLACES[name]
        for panel, value in ((quality, f["perplexity"]), (speed, f["decode_tok_s"]["1"])):
            panel.plot(f["bits"], value, marker, color=colour, markersize=6)
            label(panel, name, (f["bits"], value), (dx, dy), fontsize=8, color=colour, ha=align, va="center")
    for panel, title in ((quality, "perplexity (lower is better)"), (speed, "tok/s, one sequence")):
        panel.set(title=title, xscale="log", xlabel="bits a weight", xlim=(4.2, 40))
        panel.set_xticks([4.5, 6, 8, 16, 32], ["4.5", "6", "8", "16", "32"])
        panel.minorticks_off()
        panel.margins(y=0.18)
    speed.set_ylim(bottom=0)
    return (
        "; ".join(
            f"{name}: {f['bits']:.2f} bits, perplexity {f['perplexity']:.2f}, {f['decode_tok_s']['1']:.0f} tok/s"
            for name, f in ordered
        )
        + "."
    )


def acceptance(data: dict, figure) -> str:
    share, gain = figure.subplots(1, 2)
    sentences = []
    for (text, points), colour, marker in zip(data.items(), (BLUE, RED), "so", strict=True):
        lengths, shares, tokens = zip(*points, strict=True)
        for panel, values in ((share, shares), (gain, tokens)):
            panel.plot(lengths, values, color=colour, marker=marker)
        label(gain, text, (lengths[-1], tokens[-1]), (0, 7), color=colour, ha="right")
        sentences.append(
            f"{text}: drafts of {lengths[-1]} are {shares[-1]:.0%} right and give {tokens[-1]:.2f} tokens a step"
        )
    share.set(title="guesses that were right", ylim=(0, 1), xlabel="guesses a step", xticks=lengths)
    percent(share)
    gain.set(title="tokens a step", xlabel="guesses a step", xticks=lengths)
    gain.set_ylim(bottom=0)
    gain.margins(y=0.2)
    return "; ".join(sentences) + "."


def load(data: dict, figure) -> str:
    rates = [row["rate"] for row in data["rates"]]
    titles = {"ttft_s": "time to first token, ms", "tpot_s": "time per later token, ms"}
    for panel, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for q, colour, marker in (("p95", RED, "o"), ("p50", BLUE, "s")):
            values = [1e3 * (row[key][q] or 0) for row in data["rates"]]
            panel.plot(rates, values, color=colour, marker=marker)
            label(panel, q, (rates[-1], values[-1]), (6, 0), color=colour, va="center")
        panel.set(title=title, xlabel="requests a second", ylim=(0, None), xticks=rates)
        panel.margins(x=0.14)
    ends = (data["rates"][0]["ttft_s"], data["rates"][-1]["ttft_s"])
    (low50, low95), (high50, high95) = ((1e3 * ttft["p50"], 1e3 * ttft["p95"]) for ttft in ends)
    return (
        f"Median TTFT {low50:,.0f} ms at {rates[0]:g} requests a second, {high50:,.0f} ms at {rates[-1]:g}; 95 % come "
        f"within {low95:,.0f} and {high95:,.0f} ms."
    )


@dataclass(frozen=True)
class Picture:
    """data: its entry of GATHER; alt: what it shows, for those who do not see it (without numbers: those change)."""

    data: str
    draw: Callable[[dict, object], str]
    title: str
    alt: str


PICTURES = {
    "kv-memory": Picture(
        "kv-memory", kv_memory, "KV memory while requests wait for it",
        "Two stacked bar charts of KV memory over time. With one contiguous slab per request, tokens fill about a "
        "third and the rest is reserved or lost in fragments; with pages, tokens fill nearly all of it.",
    ),
    "batch-chart": Picture(
        "batch-chart", batch_chart, "Static beside continuous batching",
        "Two charts of four batch slots over steps. In static batching short requests leave their slots empty until "
        "the longest of the batch has ended; in continuous batching the next request takes the slot at once, and all "
        "end much earlier.",
    ),
    "chunking": Picture(
        "chunking", chunking, "A long prompt arrives among running answers",
        "Milliseconds between two tokens of a running answer, over time. Computed in one step, a long prompt makes it "
        "wait once for very long; computed in chunks, many gaps are a little longer and none is long.",
    ),
    "hit-rate": Picture(
        "hit-rate", hit_rate, "Prefix hits over the size of the cache",
        "Share of prompt tokens found in the prefix cache over the size of the KV memory. Both lines rise; serving the "
        "longest cached prefix first is far ahead where memory is scarce and equal where it is plentiful.",
    ),
    "radix-tree": Picture(
        "radix-tree", radix_tree, "The radix tree of eight requests",
        "A tree drawn from left to right over token positions. Three chats share a system prompt and three questions "
        "share four examples; each shared run of tokens is held once.",
    ),
    "roofline": Picture(
        "configurations", roofline, "What bounds each step on this machine",
        "A roofline chart. Decoding one sequence lies near the slope that memory bandwidth draws, with fewer bits "
        "further up; batches of 8 and 32 and prefill lie further right, below the ceilings of arithmetic.",
    ),
    "bits": Picture(
        "configurations", bits, "Bits a weight against quality and speed",
        "Two charts over bits a weight, from 5 to 32. Perplexity is level for 32, 16 and 8 bits and for 4 bits in "
        "groups of 32, and rises for larger groups; tokens per second rise as bits fall.",
    ),
    "acceptance": Picture(
        "acceptance", acceptance, "Guesses of n-gram speculation",
        "Share of right guesses, and tokens a step, over the number of guesses a step. In text that repeats itself "
        "most guesses are right and each step gives several tokens; in a story few are, and the gain is small.",
    ),
    "load": Picture(
        "load", load, "Latency against load",
        "Time to first token and time per later token, median and 95th percentile, over requests per second. Both rise "
        "with the load, and the tail rises first.",
    ),
}  # fmt: skip


def draw(name: str, data: dict, path: Path) -> str:
    """Draw one picture as SVG (or what the suffix of `path` says); returns the sentence with what it shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture = PICTURES[name]
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure()
        sentence = picture.draw(data, figure)
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator")) if path.suffix == ".svg" else None)
        pyplot.close(figure)
    if path.suffix == ".svg":
        words = f"<title>{escape(picture.title)}</title>\n <desc>{escape(picture.alt)} {escape(sentence)}</desc>\n"
        head, tag, body = path.read_text(encoding="utf-8").partition("<svg ")
        opening, end, rest = body.partition(">")
        path.write_text(f'{head}{tag}role="img" {opening}{end}\n {words}{rest}', encoding="utf-8")
    return sentence


# ---- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.py plots", description="Gather what the pictures show, and draw them.")
    parser.add_argument("--out", type=Path, default=Path("results/plots"), metavar="DIR", help="data goes to DIR.json")
    parser.add_argument(
        "--only", nargs="+", choices=list(PICTURES), default=list(PICTURES), metavar="NAME", help=", ".join(PICTURES)
    )
    parser.add_argument("--redraw", action="store_true", help="draw what DIR.json holds; measure nothing")
    parser.add_argument("--model", default="smollm2", metavar="M")
    parser.add_argument("--threads", type=int, default=min(2, usable_threads()[0]), metavar="N")
    parser.add_argument("--json", action="store_true", help="print what each picture shows as one JSON object")
    args = parser.parse_args(argv)
    if args.out.name in ("", ".."):
        parser.error(f"--out {args.out}: name a folder, beside which its data can lie")
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: must be at least 1")
    unmeasured = (["model", "threads"], not args.redraw, "--redraw measures nothing; leave them out")
    refuse_unused(given(parser, argv, args), unmeasured)
    return args


def gather(names: list[str], bench: Bench, file: Path) -> None:
    """Put the data of these pictures into `file`, each as soon as it is there: whoever interrupts keeps the rest."""
    for name in dict.fromkeys(PICTURES[name].data for name in names):
        began = time.perf_counter()
        warn(f"{name} ...", end=" ")
        data = read(file) | {name: GATHER[name](bench)}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())  # for `git diff`
        part = file.with_name(file.name + ".part")
        part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        part.replace(file)  # as a whole, or not at all
        warn(f"{time.perf_counter() - began:.0f} s")


def read(file: Path) -> dict:
    """The data of all pictures so far. Raises ValueError for a file that is no such thing."""
    try:
        data = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        data = error
    if not isinstance(data, dict):
        raise ValueError(f"{file} is damaged ({repr(data)[:100]}): delete it, and gather the data again")
    return data


def run(args: argparse.Namespace, bench: Bench) -> dict[str, str]:
    """Gather (unless --redraw) and draw; returns what each picture shows."""
    file = args.out.with_name(args.out.name + ".json")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.redraw:
        gather(args.only, bench, file)
    data = read(file)
    missing = [name for name in args.only if PICTURES[name].data not in data]
    if missing:
        raise ValueError(f"{file} has no data for {', '.join(missing)}: leave out --redraw")
    sentences = {}
    for name in args.only:
        try:
            sentences[name] = draw(name, data[PICTURES[name].data], args.out / f"{name}.svg")
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # data of another version, say
            cause = f"its data do not make the picture {name} ({type(error).__name__}: {error})"
            raise ValueError(f"{file}: {cause}: leave out --redraw") from error
    return sentences


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sentences = run(args, Bench(args.model, args.threads, Sizes()))
    print(json.dumps(sentences) if args.json else "\n".join(f"{name:12} {text}" for name, text in sentences.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
