"""The pictures themselves: numbers in, one figure each, and one sentence with what it shows.

The problem. A plot is read on white paper, on a white page, on a black page, by eyes that do not tell red from green,
and by a screen reader.

The idea. No background, and few colours, each of a luminance near 0.2: four times darker than paper and four times
lighter than the usual dark page. Grey for everything that is not data. What colour says, a marker or a hatch says too.
Labels stand at what they name, and each function returns the sentence that a reader would take away.

    white page | #1a80bb #d05a00 #008f68 #797c83 | dark page

Drawing knows nothing about where numbers come from, so a picture can be drawn again from a file (benchmarks/plots.py).

Sources: the hues are those of Okabe and Ito ("Color Universal Design", 2008), balanced in luminance; the contrast is
that of WCAG 2.1, section 1.4.11; the roofline is that of Williams et al. (CACM 2009). Left out: interaction; live.html
moves.
"""

from __future__ import annotations

from benchmarks.plot_data import PARTS

BLUE, RED, GREEN, GREY = "#1a80bb", "#d05a00", "#008f68", "#797c83"
STYLE = {
    "figure.figsize": (6.0, 3.6), "figure.constrained_layout.use": True, "font.size": 9.5, "axes.titlesize": 9.5,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY,
    "axes.labelcolor": GREY, "axes.titlecolor": GREY, "text.color": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GREY, "grid.alpha": 0.25, "axes.axisbelow": True,
    "lines.linewidth": 1.6, "lines.markersize": 5, "legend.frameon": False, "hatch.linewidth": 0.7,
    "savefig.transparent": True, "svg.hashsalt": "vitrine", "svg.fonttype": "path",
}  # fmt: skip


def kv_memory(data: dict, figure) -> str:
    looks = {"tokens": (BLUE, ""), "reserved": (GREEN, "///"), "fragments": (RED, "xxx")}
    found = []
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
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        found.append(f"{side}: " + ", ".join(f"{parts['mean'][part]:.0%} {part}" for part in PARTS))
    figure.axes[0].set_ylabel("of the KV memory")
    marks = [swatch(*looks[part], filled=part == "tokens") for part in PARTS]
    names = ["tokens", "reserved: will be filled", "fragments: never used"]
    figure.legend(marks, names, loc="outside lower center", ncols=3)
    return "; ".join(found) + "."


def swatch(colour: str, hatch: str, filled: bool):
    from matplotlib.patches import Patch

    return Patch(facecolor=colour if filled else "none", edgecolor=colour, hatch=hatch)


def batch_chart(data: dict, figure) -> str:
    last = max(end for rows in data.values() for _, _, end, _ in rows)
    seats = 1 + max(seat for rows in data.values() for seat, *_ in rows)
    found = []
    for panel, (side, rows) in zip(figure.subplots(2, 1, sharex=True), data.items(), strict=True):
        steps = max(end for _, _, end, _ in rows)
        panel.barh(range(seats), [steps] * seats, 0.72, color=GREY, alpha=0.25)
        for seat, start, end, number in rows:
            panel.barh(seat, end - start - 0.6, 0.72, start + 0.3, color=BLUE)
            if end - start > 4:
                middle = (start + end) / 2
                panel.text(middle, seat, number + 1, color="white", ha="center", va="center_baseline", fontsize=7.5)
        used = sum(end - start for _, start, end, _ in rows) / seats / steps
        panel.set(title=f"{side} batching: {steps} steps, {used:.0%} of the seats used", ylabel="seat")
        panel.set(xlim=(0, last), yticks=range(seats), yticklabels=range(1, seats + 1), ylim=(seats - 0.5, -0.5))
        panel.grid(False)
        found.append(f"{side} batching: {steps} steps, {used:.0%} of the seats used")
    panel.set_xlabel("step (pale: an empty seat; numbers: requests)")
    return "; ".join(found) + "."


def chunking(data: dict, figure) -> str:
    panel, found = figure.subplots(), []
    for (side, series), colour in zip(data["sides"].items(), (RED, BLUE), strict=True):
        times = [seconds - series["arrived"] for seconds, _ in series["gaps"]]
        gaps = [gap for _, gap in series["gaps"]]
        start = times[0] - gaps[0] / 1e3
        panel.step([start, *times], [*gaps, gaps[-1]], where="post", color=colour)  # a wait is as long as it is high
        first = next(gap for gap, time in zip(gaps, times, strict=True) if time > 0.5e-3)  # with a part of the prompt
        panel.annotate(
            f"{side}: at most {max(gaps):,.0f} ms", (0, first), (6, 7 if first == max(gaps) else -7), color=colour,
            textcoords="offset points", va="bottom" if first == max(gaps) else "top", in_layout=False,
        )  # fmt: skip
        found.append(f"{side}: the longest gap is {max(gaps):,.0f} ms")
    panel.axvline(0, color=GREY, linestyle=":", linewidth=1)
    panel.text(0, 0.98, f" {data['long_prompt']:,} tokens arrive", transform=panel.get_xaxis_transform(), va="top")
    panel.set(yscale="log", ylabel="ms since the last token", xlabel="seconds since the long prompt arrived")
    panel.set_ylim(top=4 * max(gap for series in data["sides"].values() for _, gap in series["gaps"]))
    return "; ".join(found) + "."


def hit_rate(data: dict, figure) -> str:
    panel, found = figure.subplots(), []
    names = {"fcfs": "in order of arrival", "lpm": "longest cached prefix first"}
    for (policy, points), colour, marker, below in zip(data.items(), (RED, BLUE), "os", (True, False), strict=True):
        sizes, rates = zip(*points, strict=True)
        panel.plot(sizes, rates, color=colour, marker=marker)
        panel.annotate(
            names[policy], (sizes[below], rates[below]), (8, -8) if below else (-4, 20), textcoords="offset points",
            color=colour, va="top" if below else "bottom",
        )  # fmt: skip
        found.append(
            f"{names[policy]}: {rates[0]:.0%} with {sizes[0]:,} tokens of KV, {rates[-1]:.0%} with {sizes[-1]:,}"
        )
    panel.set(
        xscale="log", ylim=(0, 1), xlabel="tokens that the KV memory holds", ylabel="of the prompts found in the cache"
    )
    ticks = [size for size in sizes if size & (size - 1) == 0]  # powers of two have room for their names
    panel.set_xticks(ticks, [f"{size:,}" for size in ticks])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return "; ".join(found) + "."


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
    bandwidth, single, whole = data["ceilings"].values()
    low, high = 0.2, 3000.0
    for ceiling, name in ((single, "float32 products"), (whole, "8-bit integer products")):
        panel.plot([low, ceiling / bandwidth, high], [low * bandwidth, ceiling, ceiling], color=GREY, linewidth=1.2)
        panel.plot([low, ceiling / bandwidth], [ceiling, ceiling], color=GREY, linewidth=0.8, linestyle=":")
        panel.text(low * 1.2, ceiling * 1.07, f"{name}: {ceiling:,.0f}", va="bottom", fontsize=8.5)
    panel.text(low * 1.2, low * 9 * bandwidth, f"memory: {bandwidth:.0f} GB/s", fontsize=8.5)
    best = {}
    for name, f in data["found"].items():
        colour, marker = LOOKS[name.partition("-")[0]]
        for label, x, y, ceiling in dots(f, data):
            filled = colour if "-" not in name else "none"
            panel.plot(x, y, marker, color=colour, markerfacecolor=filled, markersize=5.5, linestyle="none")
            best.setdefault(label, {})[name] = y / ceiling
            if name in ("float32", "int4"):
                panel.annotate(
                    label,
                    (x, y),
                    (0, -7),
                    textcoords="offset points",
                    fontsize=7.5,
                    ha="center",
                    va="top",
                    color=colour,
                )
    marks = [panel.plot([], [], marker, color=colour, linestyle="none")[0] for colour, marker in LOOKS.values()]
    names = ["float32", "bfloat16", "int8 (hollow: in groups)", "int4 (hollow: larger groups)"]
    panel.legend(marks, names, loc="lower right", fontsize=8.5)
    panel.set(xscale="log", yscale="log", xlabel="operations per byte of weights and KV", xlim=(low, high))
    panel.set(ylabel="billion operations a second", ylim=(2, whole * 2.5))
    shares = ", ".join(f"{label} {by['int4']:.0%}" for label, by in best.items() if "int4" in by)
    return f"Share of the ceiling above each dot, int4: {shares}."


def dots(f: dict, data: dict) -> list[tuple[str, float, float, float]]:
    """(label, operations per byte, billion operations a second, the roof there) of a configuration."""
    bandwidth, single, whole = data["ceilings"].values()
    found = []
    for batch, rate in f["decode_tok_s"].items():
        operations = 2 * (f["layer_parameters"] + f["head_parameters"])  # of one token
        found.append(
            (f"×{batch}", operations * int(batch) / (f["step_bytes"] + int(batch) * f["kv_bytes"]), operations * rate)
        )
    operations = 2 * f["layer_parameters"] * data["prompt"]
    found.append(("prefill", operations / f["step_bytes"], operations * f["prefill_tok_s"] / data["prompt"]))
    peak = whole if f["bits"] < 16 else single
    return [(label, x, y / 1e9, min(x * bandwidth, peak)) for label, x, y in found]


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
            panel.annotate(
                name, (f["bits"], value), (dx, dy), textcoords="offset points", fontsize=8, color=colour, ha=align,
                va="center",
            )  # fmt: skip
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
    found = []
    for (text, points), colour, marker in zip(data.items(), (BLUE, RED), "so", strict=True):
        lengths, shares, tokens = zip(*points, strict=True)
        for panel, values in ((share, shares), (gain, tokens)):
            panel.plot(lengths, values, color=colour, marker=marker)
        gain.annotate(text, (lengths[-1], tokens[-1]), (0, 7), textcoords="offset points", color=colour, ha="right")
        found.append(
            f"{text}: drafts of {lengths[-1]} are {shares[-1]:.0%} right and give {tokens[-1]:.2f} tokens a step"
        )
    share.set(title="guesses that were right", ylim=(0, 1), xlabel="guesses a step", xticks=lengths)
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    gain.set(title="tokens a step", xlabel="guesses a step", xticks=lengths)
    gain.set_ylim(bottom=0)
    gain.margins(y=0.2)
    return "; ".join(found) + "."


def load(data: dict, figure) -> str:
    rates = [row["rate"] for row in data["rates"]]
    for panel, (key, title) in zip(
        figure.subplots(1, 2),
        (("ttft_s", "time to first token, ms"), ("tpot_s", "time per later token, ms")),
        strict=True,
    ):
        for q, colour, marker in (("p95", RED, "o"), ("p50", BLUE, "s")):
            values = [1e3 * (row[key][q] or 0) for row in data["rates"]]
            panel.plot(rates, values, color=colour, marker=marker)
            panel.annotate(q, (rates[-1], values[-1]), (6, 0), textcoords="offset points", color=colour, va="center")
        panel.set(title=title, xlabel="requests a second", ylim=(0, None), xticks=rates)
        panel.margins(x=0.14)
    first, last = data["rates"][0], data["rates"][-1]
    return (
        f"Median TTFT {first['ttft_s']['p50'] * 1e3:,.0f} ms at {first['rate']:g} requests a second, "
        f"{last['ttft_s']['p50'] * 1e3:,.0f} ms at {last['rate']:g}; 95 % come within "
        f"{first['ttft_s']['p95'] * 1e3:,.0f} and {last['ttft_s']['p95'] * 1e3:,.0f} ms."
    )
