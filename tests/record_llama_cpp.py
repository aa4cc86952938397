"""Record what llama.cpp answers, greedily and in float32, to 20 varied prompts: the oracle of test_llama_cpp.py.

    pip install llama-cpp-python==0.3.36            (in an environment of its own)
    python tests/record_llama_cpp.py F32.gguf > tests/data/smollm2_greedy.json

F32.gguf is the default model's GGUF with every tensor dequantised (llama_model_quantize with ftype ALL_F32). On the
quantised file itself llama.cpp rounds activations to 8 bits and leaves the float path within a few tokens.
"""

import json
import sys

CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics state that",
    "Question: What is 12 times 12?\nAnswer:",
    "Dear Sir or Madam,\n\nI am writing to",
    "A list of the planets of the solar system, in order:\n1. Mercury\n2.",
    "In 1969, the first humans",
    "def fibonacci(n):\n    ",
    'import json\n\ndef load(path):\n    """Read a JSON file."""\n',
    "for (int i = 0; i < n; i++) {\n    sum +=",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "中国的首都是",
    "人工智能是",
    "I love pizza 🍕 and sushi 🍣! My favourite emoji is",
    "Los gatos son animales que",
    CHAT + "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    CHAT + "<|im_start|>user\nWrite a haiku about the autumn.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer in one sentence.<|im_end|>\n<|im_start|>user\nWho wrote Hamlet? 🤔<|im_end|>\n"
    "<|im_start|>assistant\n",
    CHAT + "<|im_start|>user\nReverse the list [1, 2, 3] in Python.<|im_end|>\n<|im_start|>assistant\n",
]
NEW_TOKENS = 64


def main() -> None:
    import llama_cpp as C

    C.llama_backend_init()
    model = C.llama_model_load_from_file(sys.argv[1].encode(), C.llama_model_default_params())
    vocab = C.llama_model_get_vocab(model)
    size = C.llama_vocab_n_tokens(vocab)
    params = C.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 2, 2
    params.type_k = params.type_v = C.GGML_TYPE_F32
    params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = C.llama_init_from_model(model, params)

    records = []
    for prompt in PROMPTS:
        text = prompt.encode()
        buffer = (C.llama_token * 512)()
        count = C.llama_tokenize(vocab, text, len(text), buffer, 512, True, True)
        prompt_ids, output = list(buffer[:count]), []
        C.llama_memory_clear(C.llama_get_memory(context), True)
        feed = prompt_ids
        for _ in range(NEW_TOKENS):
            array = (C.llama_token * len(feed))(*feed)
            assert C.llama_decode(context, C.llama_batch_get_one(array, len(feed))) == 0
            logits = C.llama_get_logits_ith(context, -1)[:size]
            feed = [max(range(size), key=logits.__getitem__)]
            output += feed  # past the end of text too: 64 tokens each
        records.append({"prompt": prompt, "prompt_ids": prompt_ids, "output_ids": output})
        print(len(records), "of", len(PROMPTS), file=sys.stderr)
    json.dump(records, sys.stdout, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
