"""JSON extraction: a schema leaves the model only the values to write; what it forces is not even sampled.

python -m examples.json_extraction
"""

import json

from generate import LLM
from program import Program, gen

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "city": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
    },
    "required": ["name", "city", "year"],
    "additionalProperties": False,
}
TEXTS = (
    "Ada Lovelace was born in London in 1815 and wrote the first program.",
    "Wolfgang Amadeus Mozart was born in Salzburg in 1756.",
)


def extract(llm: LLM, texts=TEXTS) -> tuple[list[dict], Program]:
    """One record for each text, and the program that holds the trunk."""
    trunk = Program(llm, "Write who was born where and when as JSON.\n\n")
    trunk += "Text: Marie Curie was born in Warsaw in 1867.\n"
    trunk += 'JSON: {"name": "Marie Curie", "city": "Warsaw", "year": 1867}\n\n'
    branches = trunk.fork(len(texts))
    for branch, text in zip(branches, texts, strict=True):
        branch += f"Text: {text}\nJSON: "
        branch += gen("record", max_tokens=300, json_schema=SCHEMA)
    trunk.join(branches)
    return [json.loads(record) for record in trunk["record"]], trunk


if __name__ == "__main__":
    llm = LLM(quant="int4", compile=True)
    records, program = extract(llm)
    for record in records:
        print(record)
    print(f"{program.cached_tokens} of {program.prompt_tokens} prompt tokens came from the cache")
