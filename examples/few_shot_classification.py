"""Few-shot classification: the examples are the trunk, every line to classify is a branch that computes only itself.

python -m examples.few_shot_classification
"""

from generate import LLM
from program import Program, select

EXAMPLES = (
    ("The soup was cold and the waiter rude.", "negative"),
    ("What a wonderful evening, we laughed all night!", "positive"),
    ("I want my money back.", "negative"),
    ("The best coffee in town, and friendly people too.", "positive"),
)
LINES = (
    "I loved every minute of it.",
    "The room was dirty and it smelled.",
    "Great value, I will come again!",
    "It broke after two days.",
    "My children adore this game.",
)


def classify(llm: LLM, lines=LINES) -> tuple[list[str], Program]:
    """The label of each line, and the program that holds the trunk."""
    trunk = Program(llm)
    for text, label in EXAMPLES:
        trunk += f"Review: {text}\nSentiment: {label}\n\n"
    branches = trunk.fork(len(lines))
    for branch, line in zip(branches, lines, strict=True):
        branch += f"Review: {line}\nSentiment:"
        branch += select("label", [" positive", " negative"])
    trunk.join(branches)
    return [label.strip() for label in trunk["label"]], trunk


if __name__ == "__main__":
    labels, program = classify(LLM(quant="int4", compile=True))
    for line, label in zip(LINES, labels, strict=True):
        print(f"{label:9} {line}")
    print(f"{program.cached_tokens} of {program.prompt_tokens} prompt tokens came from the cache")
