"""Every picture of the README: what it needs, how it is drawn, and its words for those who do not see it.

    python bench.py plots                                  gather and draw all of them, some minutes on two cores
    python bench.py plots --only roofline bits             some of them
    python bench.py plots --redraw                         draw again what results/plots.json holds

The problem. A picture in a document goes stale in silence: its numbers change, its description does not, and nobody
knows the command that made it.

The idea. One table, PICTURES: the data (plot_data.py), the drawing (pictures.py), a title and an alt text.
The alt text says what is to be seen and holds no numbers, so that it stays true; the README repeats it word for word,
which a test checks. The numbers go into the SVG, as the sentence that the drawing returns:

    <svg role="img">  <title> what it is about </title>  <desc> alt text, and what was found </desc>

Source: WCAG 2.1, section 1.1.1. Left out: other formats; an SVG prints at any size.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks import pictures
from benchmarks.pictures import STYLE
from benchmarks.plot_data import GATHER, Bench, Sizes
from formats.command_line import as_command, given, refuse_unused


@dataclass(frozen=True)
class Picture:
    """data: its entry of GATHER; alt: what it shows, for those who do not see it (without numbers: those change)."""

    data: str
    draw: Callable[[dict, object], str]
    title: str
    alt: str


PICTURES = {
    "kv-memory": Picture(
        "kv-memory", pictures.kv_memory, "KV memory while requests wait for it",
        "Two stacked bar charts of KV memory over time. With one contiguous slab per request, tokens fill about a "
        "third and the rest is reserved or lost in fragments; with pages, tokens fill nearly all of it.",
    ),
    "batch-chart": Picture(
        "batch-chart", pictures.batch_chart, "Static beside continuous batching",
        "Two charts of four seats over steps. In static batching short requests leave their seats empty until the "
        "longest of the batch has ended; in continuous batching the next request takes the seat at once, and all end "
        "much earlier.",
    ),
    "chunking": Picture(
        "chunking", pictures.chunking, "A long prompt arrives among running answers",
        "Milliseconds between two tokens of a running answer, over time. Computed in one step, a long prompt makes it "
        "wait once for very long; computed in chunks, many gaps are a little longer and none is long.",
    ),
    "hit-rate": Picture(
        "hit-rate", pictures.hit_rate, "Prefix hits over the size of the cache",
        "Share of prompt tokens found in the prefix cache over the size of the KV memory. Both lines rise; serving the "
        "longest cached prefix first is far ahead where memory is scarce and equal where it is plentiful.",
    ),
    "radix-tree": Picture(
        "radix-tree", pictures.radix_tree, "The radix tree of eight requests",
        "A tree drawn from left to right over token positions. Three chats share a system prompt and three questions "
        "share four examples; each shared run of tokens is held once.",
    ),
    "roofline": Picture(
        "configurations", pictures.roofline, "What bounds each step on this machine",
        "A roofline chart. Decoding one sequence lies near the slope that memory bandwidth draws, with fewer bits "
        "further up; batches of 8 and 32 and prefill lie further right, below the ceilings of arithmetic.",
    ),
    "bits": Picture(
        "configurations", pictures.bits, "Bits a weight against quality and speed",
        "Two charts over bits a weight, from 5 to 32. Perplexity is level for 32, 16 and 8 bits and for 4 bits in "
        "groups of 32, and rises for larger groups; tokens per second rise as bits fall.",
    ),
    "acceptance": Picture(
        "acceptance", pictures.acceptance, "Guesses of n-gram speculation",
        "Share of right guesses, and tokens a step, over the number of guesses a step. In text that repeats itself "
        "most guesses are right and each step gives several tokens; in a story few are, and the gain is small.",
    ),
    "load": Picture(
        "load", pictures.load, "Latency against load",
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
        found = picture.draw(data, figure)
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator")) if path.suffix == ".svg" else None)
        pyplot.close(figure)
    if path.suffix == ".svg":
        words = f"<title>{escape(picture.title)}</title>\n <desc>{escape(picture.alt)} {escape(found)}</desc>\n"
        head, tag, body = path.read_text(encoding="utf-8").partition("<svg ")
        opening, end, rest = body.partition(">")
        path.write_text(f'{head}{tag}role="img" {opening}{end}\n {words}{rest}', encoding="utf-8")
    return found


# ---- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.py plots", description="Gather what the pictures show, and draw them.")
    parser.add_argument("--out", type=Path, default=Path("results/plots"), metavar="DIR", help="data goes to DIR.json")
    parser.add_argument(
        "--only", nargs="+", choices=list(PICTURES), default=list(PICTURES), metavar="NAME", help=", ".join(PICTURES)
    )
    parser.add_argument("--redraw", action="store_true", help="draw what DIR.json holds; measure nothing")
    parser.add_argument("--model", default="smollm2", metavar="M")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), metavar="N")
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
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        data = read(file) | {name: GATHER[name](bench)}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())  # for `git diff`
        part = file.with_name(file.name + ".part")
        part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        part.replace(file)  # as a whole, or not at all
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


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
    return {name: draw_kept(name, data, args.out, file) for name in args.only}


def draw_kept(name: str, data: dict, folder: Path, file: Path) -> str:
    """`draw`, from data that may be those of another version of this program."""
    try:
        return draw(name, data[PICTURES[name].data], folder / f"{name}.svg")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{file}: its data do not make the picture {name} ({type(error).__name__}: {error}): leave out --redraw"
        ) from error


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    found = run(args, Bench(args.model, args.threads, Sizes()))
    print(json.dumps(found) if args.json else "\n".join(f"{name:12} {text}" for name, text in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
