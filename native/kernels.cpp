// The C++ side of vitrine's hot operations: what kernels.py defines, over raw pointers.
//
// There is one way in: `vitrine_run(tape, words)`. A tape is a run of 64-bit words, one call after another:
//
//     | op | number of arguments | argument ... | op | number of arguments | argument ... |
//
// where an argument is a pointer, a whole number, or the bits of a double. A single operation is a tape of one call; a
// whole decode step, recorded once (native/tape.py), is a tape of two hundred, replayed without returning to
// Python and without letting the helper threads fall asleep: the CPU's counterpart of a CUDA graph.
//
// The ideas are in the headers: simd.h (the machine's vectors), pool.h (threads), linear.h
// (quantised products), attention.h, sampling.h. Built without -ffast-math and with contraction off:
// every fused multiply-add is written out, so the order of operations is the one in the text.
#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "sampling.h"

namespace {

Pool& pool = *new Pool;  // never destroyed: a helper may still be watching when the process ends
std::mutex serial;       // the kernels share their buffers, so calls from several Python threads take turns

struct Arguments {
    const int64_t* word;
    int64_t integer() { return *word++; }
    float real() { double d; std::memcpy(&d, word++, 8); return float(d); }
    template <class T> T* pointer() { return reinterpret_cast<T*>(*word++); }
};

const char* run_rms_norm(Arguments a) {
    auto *x = a.pointer<const float>(), *weight = a.pointer<const float>();
    auto* y = a.pointer<float>();
    const int64_t rows = a.integer(), n = a.integer();
    const float eps = a.real();
    pool.parallel_for(rows < 8 ? 1 : rows, [&](int64_t item) {
        for (int64_t r = rows < 8 ? 0 : item; r < (rows < 8 ? rows : item + 1); r++)
            rms_norm_row(x + r * n, weight, n, eps, y + r * n);
    });
    return nullptr;
}

const char* run_silu_mul(Arguments a) {
    auto* x = a.pointer<const float>();
    auto* y = a.pointer<float>();
    const int64_t rows = a.integer(), n = a.integer();  // x is [rows, 2 * n]
    pool.parallel_for(rows, [&](int64_t r) { silu_mul_row(x + 2 * r * n, x + (2 * r + 1) * n, n, y + r * n); });
    return nullptr;
}

const char* run_linear(Arguments a) {
    const int64_t bits = a.integer();
    Linear p;
    p.x = a.pointer<const float>();
    p.w = a.pointer<const uint8_t>();
    p.bias = a.pointer<const float>();
    p.norm = a.pointer<const float>();
    p.residual = a.pointer<const float>();
    p.y = a.pointer<float>();
    p.rows = a.integer(), p.k = a.integer(), p.n = a.integer(), p.group_size = a.integer();
    p.silu_gate = a.integer(), p.float_activation = a.integer();
    p.eps = a.real();
    if (bits == 4) linear<Int4>(pool, p);
    else if (p.group_size) linear<Int8>(pool, p);
    else linear<Int8Channel>(pool, p);
    return nullptr;
}

// One row of a packed table: the code of (channel, input) is in step input / 4 % 8, byte 4 * channel + input % 4.
const char* run_embedding(Arguments a) {
    const int64_t bits = a.integer();
    auto* ids = a.pointer<const int64_t>();
    auto* table = a.pointer<const uint8_t>();
    auto* y = a.pointer<float>();
    const int64_t count = a.integer(), k = a.integer(), group_size = a.integer(), tile_bytes = a.integer();
    const int64_t tiles = a.integer();
    const int64_t block = bits == 4 ? Int4::BYTES : Int8::BYTES, step = group_size ? group_size : GROUP;
    const int64_t params = bits == 4 ? Int4::PARAMS : group_size ? Int8::PARAMS : Int8Channel::PARAMS;
    const int64_t codes = (k + step - 1) / step * step / GROUP * block;  // bytes before the scales
    for (int64_t r = 0; r < count; r++)
        if (ids[r] < 0 || ids[r] >= tiles * TILE) return "a token id lies outside the embedding table";
    pool.parallel_for(count, [&](int64_t r) {
        const uint8_t* tile = table + ids[r] / TILE * tile_bytes;
        const int channel = ids[r] % TILE;
        for (int64_t i = 0; i < k; i++) {
            const uint8_t* bytes = tile + i / GROUP * block;
            const int64_t s = i % GROUP / 4, at = 4 * channel + i % 4;
            const uint8_t* p = tile + codes + (group_size ? i / group_size : 0) * params;
            const fp16* half = (const fp16*)p;
            if (bits == 4) {
                const int code = bytes[s % 4 * STEP + at] >> (s < 4 ? 0 : 4) & 15;
                y[r * k + i] = float(code) * to_float(half[channel]) + to_float(half[TILE + channel]);
            } else {
                const float scale = group_size ? to_float(half[channel]) : ((const float*)p)[channel];
                y[r * k + i] = float(int8_t(bytes[s * STEP + at])) * scale;
            }
        }
    });
    return nullptr;
}

struct Rope {
    const float* qkv;  // [rows, (heads + 2 * kv_heads) * head_dim]
    const int64_t* positions;
    const float* cos_sin;  // [max_pos, head_dim]
    void *k_cache, *v_cache;
    const int64_t* slots;
    const float *q_norm, *k_norm;  // [head_dim] or null
    float* q;
    int64_t rows, heads, kv_heads, num_blocks, block_size, head_dim, max_positions;
    float eps;
};

// y = x rotated by the angles of cs, (a, b) -> (a cos - b sin, b cos + a sin) over the two halves of the head.
inline void rotate(const float* x, const float* cs, int64_t dim, float* y) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i], c = cs[i], s = cs[half + i];
        y[i] = a * c - b * s;
        y[half + i] = b * c + a * s;
    }
}

template <class T> void rope_row(const Rope& p, int64_t row) {
    thread_local std::vector<float> buffer;
    buffer.resize(2 * p.head_dim);
    float *normed = buffer.data(), *rotated = normed + p.head_dim;
    const float* x = p.qkv + row * (p.heads + 2 * p.kv_heads) * p.head_dim;
    const float* cs = p.cos_sin + p.positions[row] * p.head_dim;
    for (int64_t h = 0; h < p.heads; h++, x += p.head_dim) {
        if (p.q_norm) rms_norm_row(x, p.q_norm, p.head_dim, p.eps, normed);
        rotate(p.q_norm ? normed : x, cs, p.head_dim, p.q + (row * p.heads + h) * p.head_dim);
    }
    const int64_t slot = p.slots[row];
    if (slot < 0) return;  // a padding row
    for (int64_t h = 0; h < p.kv_heads; h++, x += p.head_dim) {
        const int64_t at = ((slot / p.block_size * p.kv_heads + h) * p.block_size + slot % p.block_size) * p.head_dim;
        if (p.k_norm) rms_norm_row(x, p.k_norm, p.head_dim, p.eps, normed);
        rotate(p.k_norm ? normed : x, cs, p.head_dim, rotated);
        T *k = static_cast<T*>(p.k_cache) + at, *v = static_cast<T*>(p.v_cache) + at;
        for (int64_t i = 0; i < p.head_dim; i++) put(k + i, rotated[i]), put(v + i, x[p.kv_heads * p.head_dim + i]);
    }
}

template <class T> void rope(const Rope& p) {
    constexpr int64_t CHUNK = 8;  // rows of an item: one row takes well under a microsecond
    pool.parallel_for((p.rows + CHUNK - 1) / CHUNK, [&](int64_t c) {
        for (int64_t r = c * CHUNK; r < std::min(p.rows, (c + 1) * CHUNK); r++) rope_row<T>(p, r);
    });
}

const char* run_rope(Arguments a) {
    const int64_t type = a.integer();
    Rope p;
    p.qkv = a.pointer<const float>(), p.positions = a.pointer<const int64_t>(), p.cos_sin = a.pointer<const float>();
    p.k_cache = a.pointer<void>(), p.v_cache = a.pointer<void>(), p.slots = a.pointer<const int64_t>();
    p.q_norm = a.pointer<const float>(), p.k_norm = a.pointer<const float>(), p.q = a.pointer<float>();
    p.rows = a.integer(), p.heads = a.integer(), p.kv_heads = a.integer(), p.num_blocks = a.integer();
    p.block_size = a.integer(), p.head_dim = a.integer(), p.max_positions = a.integer(), p.eps = a.real();
    for (int64_t r = 0; r < p.rows; r++) {
        if (p.positions[r] < 0 || p.positions[r] >= p.max_positions) return "a position lies outside the rotary table";
        if (p.slots[r] >= p.num_blocks * p.block_size) return "a slot lies outside the cache";
    }
    if (type == 0) rope<float>(p);
    else if (type == 1) rope<bf16>(p);
    else rope<fp16>(p);
    return nullptr;
}

const char* run_attention(Arguments a) {
    const int64_t type = a.integer();
    Attention p;
    p.q = a.pointer<const float>(), p.k_cache = a.pointer<const void>(), p.v_cache = a.pointer<const void>();
    p.block_tables = a.pointer<const int32_t>(), p.query_start = a.pointer<const int32_t>();
    p.context_lens = a.pointer<const int32_t>(), p.out = a.pointer<float>();
    p.rows = a.integer(), p.sequences = a.integer(), p.max_blocks = a.integer(), p.heads = a.integer();
    p.kv_heads = a.integer(), p.num_blocks = a.integer(), p.block_size = a.integer(), p.head_dim = a.integer();
    p.window = a.integer(), p.scale = a.real();
    if (const char* error = wrong(p)) return error;
    if (type == 0) attention<float>(pool, p);
    else if (type == 1) attention<bf16>(pool, p);
    else attention<fp16>(pool, p);
    return nullptr;
}

const char* run_gather(Arguments a) {
    auto *rows = a.pointer<const int64_t>();
    auto *x = a.pointer<const char>();
    auto *y = a.pointer<char>();
    const int64_t count = a.integer(), limit = a.integer(), bytes = a.integer();
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows ? rows[i] : i;
        if (row < 0 || row >= limit) return "a row index lies outside the tensor";
        std::memcpy(y + i * bytes, x + row * bytes, bytes);
    }
    return nullptr;
}

const char* run_draw(Arguments a) {
    auto* x = a.pointer<const float>();
    auto* rows = a.pointer<const int64_t>();
    auto* drawings = a.pointer<const Drawing>();
    auto* tokens = a.pointer<int64_t>();
    const int64_t count = a.integer(), limit = a.integer(), n = a.integer();
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= limit) return "a row index lies outside the tensor";
    pool.parallel_for(count, [&](int64_t i) {
        thread_local Drawer drawer;
        tokens[i] = drawer.draw(x + rows[i] * n, n, drawings[i]);
    });
    return nullptr;
}

using Op = const char* (*)(Arguments);  // null, or what is wrong with the arguments
constexpr Op OPS[] = {
    run_rms_norm, run_silu_mul, run_linear, run_embedding, run_rope, run_attention, run_gather, run_draw,
};

}  // namespace

extern "C" {

// Null, or what is wrong with the arguments of the call at which the tape stopped.
const char* vitrine_run(const int64_t* tape, int64_t words) {
    std::lock_guard<std::mutex> lock(serial);
    for (const int64_t* end = tape + words; tape < end; tape += 2 + tape[1])
        if (const char* error = OPS[tape[0]](Arguments{tape + 2})) return error;
    return nullptr;
}

void vitrine_set_threads(int64_t threads) {
    std::lock_guard<std::mutex> lock(serial);
    if (threads != pool.threads()) pool.resize(int(threads));
}

// Which of the three vector versions this build holds.
const char* vitrine_isa() {
#if defined(VITRINE_AVX512)
    return "avx512-vnni";
#elif defined(VITRINE_AVX2)
    return "avx2";
#else
    return "plain";
#endif
}
}
