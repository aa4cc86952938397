"""Record what llama.cpp answers, greedily and in float32, to 20 varied prompts: the oracle of test_llama_cpp.py.

    pip install llama-cpp-python==0.3.36            (in an environment of its own)
    python tests/record_llama_cpp.py F32.gguf       answers the prompts of tests/data/smollm2_greedy.json anew

F32.gguf is the default model's GGUF with every tensor dequantised (llama_model_quantize with ftype ALL_F32). On the
quantised file itself llama.cpp rounds activations to 8 bits and leaves the float path within a few tokens.
"""

import json
import sys
from pathlib import Path

RECORDS = Path(__file__).parent / "data" / "smollm2_greedy.json"
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
    for prompt in (record["prompt"] for record in json.loads(RECORDS.read_text(encoding="utf-8"))):
        text, buffer = prompt.encode(), (C.llama_token * 512)()
        count = C.llama_tokenize(vocab, text, len(text), buffer, 512, True, True)
        feed, output = list(buffer[:count]), []
        records.append({"prompt": prompt, "prompt_ids": feed, "output_ids": output})
        C.llama_memory_clear(C.llama_get_memory(context), True)
        for _ in range(NEW_TOKENS):
            array = (C.llama_token * len(feed))(*feed)
            assert C.llama_decode(context, C.llama_batch_get_one(array, len(feed))) == 0
            logits = C.llama_get_logits_ith(context, -1)[:size]
            feed = [max(range(size), key=logits.__getitem__)]
            output += feed  # past the end of text too: 64 tokens each
    RECORDS.write_text(json.dumps(records, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
