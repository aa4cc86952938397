"""What guessing and jumping buy: several tokens from one step, where the text or a grammar allows it.

Problem. A decode step reads every weight for one row. More rows would cost little, but the next token has to be known
first: guessed by something cheap, or forced by a structure.

Idea. The same prompts with each proposer and with none, alone and in a batch, on text that repeats what stands in the
prompt and on text that does not (lab.py):

    speculation    off | each of PROPOSERS          steps for the same tokens; guesses made and accepted
    structured     free | mask | mask and jumps     steps, tokens drawn, valid answers; what masks and grammars cost

    quotes     <a passage> The same text once more:      greedy; the answer stands in the prompt
    code       <a function> The same, renamed:           greedy; most of the answer does
    story      Once upon a time there was a fox who      drawn at temperature 0.8; nothing does

Guesses change no answer, so all sides must give the same tokens. Forced text may be written in other tokens than drawn
text, so there validity is compared. Sources: beside each claim in papers.json. Left out: trees of guesses.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable

from benchmarks.lab import Lab, Result, Run, middle, ratio, run_all, run_decode, tokens_of
from benchmarks.quality import TEXT
from drafting.budget import Speculator
from formats.command_line import warn
from generate import LLM
from sampling import SamplingParams
from structured import TokenTrie

PROPOSERS = ("ngram", "head", "self:{third}")  # values of `speculate`; {third} is a third of the model's layers
ANIMALS = ("fox", "whale", "mouse", "heron", "badger", "goat", "beetle", "wolf")
CODE = """def total_of_{0}(items):
    total = 0
    for item in items:
        if item.kind == "{0}":
            total += item.price * item.count
    return total
"""


def quotes() -> list[str]:
    passages = [line[:240] for line in TEXT.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [f"{passage}\n\nThe same text once more, word for word:\n\n{passage[:40]}" for passage in passages[:8]]


def code() -> list[str]:
    task = "\n# The same function, with total renamed to result:\ndef result_of_"
    return [CODE.format(animal) + task + animal for animal in ANIMALS]


def story() -> list[str]:
    return [f"Once upon a time there was a {animal} who" for animal in ANIMALS]


TEXTS: dict[str, tuple[Callable[[], list[str]], dict]] = {
    "quotes": (quotes, {"temperature": 0.0}),
    "code": (code, {"temperature": 0.0}),
    "story": (story, {"temperature": 0.8}),
}


def speculation(lab: Lab) -> Result:
    """Texts x batch sizes x proposers."""
    engines: dict[str, LLM] = {}
    left_out = []
    for pattern in PROPOSERS:
        name = pattern.format(third=max(1, lab.llm.config.num_layers // 3))
        try:
            engines[name] = lab.open(speculate=name)
        except ValueError as error:  # not every proposer is to be had for every model
            warn(f"speculation without {name}: {error}")
            left_out.append(name)
    speculators = {name: llm.engine.speculator for name, llm in engines.items()}
    runs = itertools.count()

    def side(case: tuple[str, int, str | None]) -> Run:
        text, batch, name = case
        llm = lab.use(engines[name or PROPOSERS[0]])
        prompts, params = TEXTS[text][0](), TEXTS[text][1] | {"max_tokens": lab.sizes.guessed}
        speculator = None
        if name is not None:  # a fresh one, which has learnt nothing yet
            known = speculators[name]
            speculator = Speculator(known.proposer, known.most, known.step, known.draft, known.trust)
        llm.engine.speculator = speculator
        scheduler = lab.scheduler(llm=llm)
        namespace = next(runs)  # a draft's prefix cache must not know the prompts from the round before
        requests = [
            llm.add(prompt, SamplingParams(ignore_eos=True, seed=i, **params), namespace=namespace)
            for i, prompt in enumerate(prompts[:batch])
        ]
        rate = run_decode(llm, requests)
        if speculator is not None and llm.engine.speculator is not speculator:
            raise ValueError(f"{name} failed while it guessed; its error stands above")
        stats = speculator.stats() if speculator else {"drafted": 0, "accepted": 0, "tokens_per_step": 1.0}
        counted = {"steps": scheduler.work["steps"], "guesses": stats["drafted"], "accepted": stats["accepted"]}
        counted["tokens a step"] = round(stats["tokens_per_step"], 2)
        clock = {"tok/s": rate} | ({"pays above %": 100 * stats["break_even"]} if speculator else {})
        return Run(counted, clock, tokens_of(requests))

    batches, sides = lab.sizes.batches[:2], {}
    for text, n in itertools.product(TEXTS, batches):
        cases = {f"{text} x{n}, off": (text, n, None)} | {f"{text} x{n}, {p}": (text, n, p) for p in engines}
        sides |= lab.alternate(side, cases)

    def gain(text: str, n: int, name: str) -> str:
        on, off = sides[f"{text} x{n}, {name}"], sides[f"{text} x{n}, off"]
        share = on["counted"]["accepted"] / max(1, on["counted"]["guesses"])
        return f"{text} {ratio(on, off, 'tok/s').split(' ')[0]} ({share:.0%} right)"

    measured = [
        f"{name} {n} at a time: {', '.join(gain(text, n, name) for text in TEXTS)}" for name in engines for n in batches
    ]
    even = [f"{name} {100 * speculator.break_even():.0f} %" for name, speculator in speculators.items()]
    most = {
        text: max(sides[f"{text} x{n}, {name}"]["counted"]["tokens a step"] for n in batches for name in engines)
        for text in TEXTS
    }
    return (
        sides,
        f"{'; '.join(measured)}; one guess alone pays if right more often than {', '.join(even)}"
        + f"; not to be had for this model: {', '.join(left_out)}" * bool(left_out),
        f"guesses for nothing: tokens a step, {', '.join(f'{text} {value:.2f}x' for text, value in most.items())}",
    )


def schema(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


WORD = {"type": "string", "maxLength": 24}
YEAR = {"type": "integer", "minimum": 1000, "maximum": 2100}
PERSON = schema(full_name=WORD, place_of_birth=WORD, year_of_birth=YEAR)
EXAMPLE = """Text: Marie Curie was born in Warsaw in 1867.
JSON: {"full_name": "Marie Curie", "place_of_birth": "Warsaw", "year_of_birth": 1867}

Text: %s
JSON: """
ITEM = schema(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, count={"type": "integer", "minimum": 1})
SCHEMAS = {
    "person": PERSON,
    "order": schema(
        id={"type": "string", "format": "uuid"},
        status={"enum": ["new", "paid", "sent"]},
        items={"type": "array", "items": ITEM, "minItems": 1, "maxItems": 4},
    ),
    "tool call": {
        "anyOf": [
            schema(tool={"const": "weather"}, arguments=schema(city=WORD, days={"type": "integer", "maximum": 14})),
            schema(tool={"const": "search"}, arguments=schema(query={"type": "string", "maxLength": 80})),
        ]
    },
}
PEOPLE = (
    "Ada Lovelace was born in London in 1815.",
    "Wolfgang Amadeus Mozart was born in Salzburg in 1756.",
    "Emmy Noether was born in Erlangen in 1882.",
    "Leonhard Euler was born in Basel in 1707.",
    "Sofia Kovalevskaya was born in Moscow in 1850.",
    "Alan Turing was born in London in 1912.",
)


def is_person(text: str) -> bool:
    """Whether a text begins with JSON of the schema PERSON; what follows is forgiven."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except ValueError:
        return False
    if not isinstance(value, dict) or set(value) != set(PERSON["properties"]):
        return False
    words = all(isinstance(value[key], str) and len(value[key]) <= 24 for key in ("full_name", "place_of_birth"))
    return words and type(value["year_of_birth"]) is int and 1000 <= value["year_of_birth"] <= 2100


def structured(lab: Lab) -> Result:
    """Records as JSON, one after another: freely, under a mask, and with what is forced appended at once."""
    llm, guides, shape = lab.llm, lab.llm.engine.guides, {"json_schema": PERSON, "max_tokens": 160}

    def side(case: tuple[dict, bool]) -> Run:
        params, jumps = case
        scheduler, requests, before = lab.scheduler(), [], guides.jump_forward
        guides.jump_forward = jumps
        try:
            began = time.perf_counter()
            for text in PEOPLE[: lab.sizes.records]:
                requests.append(llm.add(EXAMPLE % text, SamplingParams(temperature=0, **params)))
                run_all(llm, requests)
            rate = len(requests) / (time.perf_counter() - began)
        finally:
            guides.jump_forward = before
        texts, ids = [request.answers[0].text for request in requests], tokens_of(requests)
        steps, tokens = scheduler.work["steps"], sum(map(len, ids))
        # an answer that runs alone draws one token a step
        counted = {"steps": steps, "tokens": tokens, "drawn": steps, "forced": tokens - steps}
        return Run(counted | {"valid": sum(map(is_person, texts)) / len(texts)}, {"records/s": rate}, ids)

    for jumps in (False, True):  # masks are cached, so the first answers would pay for those of the later ones
        side((shape, jumps))
    free = ({"max_tokens": 48}, True)
    sides = lab.alternate(side, {"free": free, "mask": (shape, False), "mask and jumps": (shape, True)})
    schemas = {"vocabulary": None} | {f"grammar of {name}": schema for name, schema in SCHEMAS.items()}
    sides |= lab.alternate(lambda schema: build_guide(llm, schema), schemas)
    plain, jumps = sides["mask"], sides["mask and jumps"]
    a, b = plain["counted"], jumps["counted"]
    builds = [middle(sides[f"grammar of {name}"], "build s") for name in SCHEMAS]
    person = sides["grammar of person"]
    return (
        sides,
        f"jumps {ratio(jumps, plain, 'records/s')} the speed of a mask alone, {b['steps']} steps instead of "
        f"{a['steps']}; valid {sides['free']['counted']['valid']:.0%} free, {a['valid']:.0%} and {b['valid']:.0%} with "
        f"the schema; a mask takes {middle(person, 'mask us'):,.0f} us; grammars build in {min(builds):.4f} to "
        f"{max(builds):.4f} s",
        f"only what is not forced is drawn: {a['drawn'] / b['drawn']:.2f}x fewer draws",
    )


def build_guide(llm: LLM, schema: dict | None) -> Run:
    """Index the vocabulary (None), or compile a schema and walk the tokens of a text along it."""
    guides, draw, seconds = llm.engine.guides, random.Random(0), []
    began = time.perf_counter()
    if schema is None:
        trie = TokenTrie.from_tokenizer(llm.tokenizer, llm.config.vocab_size)
        return Run({"states": trie.num_nodes}, {"build s": time.perf_counter() - began})
    guides.matcher("json_schema", "{}")  # the vocabulary is prepared before
    began = time.perf_counter()
    matcher, _ = guides.compile("json_schema", json.dumps(schema))
    build = time.perf_counter() - began
    while len(seconds) < 24:  # some text that the schema allows: of each mask a drawn token
        began = time.perf_counter()
        allowed = matcher.allowed()
        seconds.append(time.perf_counter() - began)
        if not allowed.any():
            break
        matcher.advance(int(draw.choice(allowed.nonzero()[0])))
    return Run({"masks": len(seconds)}, {"build s": build, "mask us": sum(seconds) / len(seconds) * 1e6})


EXPERIMENTS = {"speculation": speculation, "structured": structured}
