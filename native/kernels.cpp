// The C++ side of vitrine's hot operations: what kernels.py defines, over raw pointers.
//
// There is one way in: `vitrine_run(tape, words)`. A tape is a run of 64-bit words, one call after another:
//
//     | op | n | struct of n words | op | n | struct of n words | ...
//
// The structs (RmsNorm, Linear, ...) are declared in native/cpu.py; the build writes them to arguments.h. A single
// operation is a tape of one call; a whole decode step, recorded once (native/tape.py), is a tape of two hundred,
// replayed without returning to Python and without letting the helper threads fall asleep.
//
// The ideas are in the headers: simd.h (the machine's vectors), pool.h (threads), linear.h
// (quantised products), attention.h, sampling.h. Built without -ffast-math and with contraction off:
// every fused multiply-add is written out, so the order of operations is the one in the text.
#include "arguments.h"
#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "sampling.h"

namespace {

Pool& pool = *new Pool;  // never destroyed: a helper may still be watching when the process ends
std::mutex serial;       // the kernels share their buffers, so calls from several Python threads take turns

// Every operation returns null, or what is wrong with its arguments.
const char* run(const RmsNorm& a) {
    pool.parallel_for(a.rows < 8 ? 1 : a.rows, [&](int64_t item) {
        for (int64_t r = a.rows < 8 ? 0 : item; r < (a.rows < 8 ? a.rows : item + 1); r++)
            rms_norm_row(a.x + r * a.n, a.weight, a.n, a.eps, a.y + r * a.n);
    });
    return nullptr;
}

const char* run(const SiluMul& a) {
    pool.parallel_for(a.rows, [&](int64_t r) {
        silu_mul_row(a.x + 2 * r * a.n, a.x + (2 * r + 1) * a.n, a.n, a.y + r * a.n);
    });
    return nullptr;
}

const char* run(const Linear& a) {
    if (a.bits == 4) linear<Int4>(pool, a);
    else if (a.group_size) linear<Int8>(pool, a);
    else linear<Int8Channel>(pool, a);
    return nullptr;
}

// One row of a packed table: the code of (channel, input) is in step input / 4 % 8, byte 4 * channel + input % 4.
const char* run(const Embedding& a) {
    const int64_t block = a.bits == 4 ? Int4::BYTES : Int8::BYTES, step = a.group_size ? a.group_size : GROUP;
    const int64_t params = a.bits == 4 ? Int4::PARAMS : a.group_size ? Int8::PARAMS : Int8Channel::PARAMS;
    const int64_t codes = (a.k + step - 1) / step * step / GROUP * block;  // bytes before the scales
    for (int64_t r = 0; r < a.count; r++)
        if (a.ids[r] < 0 || a.ids[r] >= a.tiles * TILE) return "a token id lies outside the embedding table";
    pool.parallel_for(a.count, [&](int64_t r) {
        const uint8_t* tile = a.table + a.ids[r] / TILE * a.tile_bytes;
        const int channel = a.ids[r] % TILE;
        for (int64_t i = 0; i < a.k; i++) {
            const uint8_t* bytes = tile + i / GROUP * block;
            const int64_t s = i % GROUP / 4, at = 4 * channel + i % 4;
            const uint8_t* p = tile + codes + (a.group_size ? i / a.group_size : 0) * params;
            const fp16* half = (const fp16*)p;
            if (a.bits == 4) {
                const int code = bytes[s % 4 * STEP + at] >> (s < 4 ? 0 : 4) & 15;
                a.y[r * a.k + i] = float(code) * to_float(half[channel]) + to_float(half[TILE + channel]);
            } else {
                const float scale = a.group_size ? to_float(half[channel]) : ((const float*)p)[channel];
                a.y[r * a.k + i] = float(int8_t(bytes[s * STEP + at])) * scale;
            }
        }
    });
    return nullptr;
}

// y = x, its first `width` components rotated by the angles of cs: (a, b) -> (a cos - b sin, b cos + a sin) over their
// two halves.
inline void rotate(const float* x, const float* cs, int64_t width, int64_t dim, float* y) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i], c = cs[i], s = cs[half + i];
        y[i] = a * c - b * s;
        y[half + i] = b * c + a * s;
    }
    std::copy(x + width, x + dim, y + width);
}

template <class T> void rope_row(const Rope& p, int64_t row) {
    thread_local std::vector<float> buffer;
    buffer.resize(2 * p.head_dim);
    float *normed = buffer.data(), *rotated = normed + p.head_dim;
    const float* x = p.qkv + row * (p.heads + 2 * p.kv_heads) * p.head_dim;
    const float* cs = p.cos_sin + p.positions[row] * p.rotary_dim;
    for (int64_t h = 0; h < p.heads; h++, x += p.head_dim) {
        if (p.q_norm) rms_norm_row(x, p.q_norm, p.head_dim, p.eps, normed);
        rotate(p.q_norm ? normed : x, cs, p.rotary_dim, p.head_dim, p.q + (row * p.heads + h) * p.head_dim);
    }
    const int64_t slot = p.slots[row];
    if (slot < 0) return;  // a padding row
    for (int64_t h = 0; h < p.kv_heads; h++, x += p.head_dim) {
        const int64_t at = ((slot / p.block_size * p.kv_heads + h) * p.block_size + slot % p.block_size) * p.head_dim;
        if (p.k_norm) rms_norm_row(x, p.k_norm, p.head_dim, p.eps, normed);
        rotate(p.k_norm ? normed : x, cs, p.rotary_dim, p.head_dim, rotated);
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

const char* run(const Rope& p) {
    for (int64_t r = 0; r < p.rows; r++) {
        if (p.positions[r] < 0 || p.positions[r] >= p.max_positions) return "a position lies outside the rotary table";
        if (p.slots[r] >= p.num_blocks * p.block_size) return "a slot lies outside the cache";
    }
    if (p.cache_type == 0) rope<float>(p);
    else if (p.cache_type == 1) rope<bf16>(p);
    else rope<fp16>(p);
    return nullptr;
}

const char* run(const Attention& p) {
    if (const char* error = wrong(p)) return error;
    if (p.cache_type == 0) attention<float>(pool, p);
    else if (p.cache_type == 1) attention<bf16>(pool, p);
    else attention<fp16>(pool, p);
    return nullptr;
}

const char* run(const Gather& a) {
    for (int64_t i = 0; i < a.count; i++) {
        const int64_t row = a.rows ? a.rows[i] : i;
        if (row < 0 || row >= a.limit) return "a row index lies outside the tensor";
        std::memcpy(a.y + i * a.bytes, a.x + row * a.bytes, a.bytes);
    }
    return nullptr;
}

const char* run(const Draw& a) {
    for (int64_t i = 0; i < a.count; i++)
        if (a.rows[i] < 0 || a.rows[i] >= a.limit) return "a row index lies outside the tensor";
    pool.parallel_for(a.count, [&](int64_t i) {
        thread_local Drawer drawer;
        a.tokens[i] = drawer.draw(a.x + a.rows[i] * a.n, a.n, static_cast<const Drawing*>(a.drawings)[i]);
    });
    return nullptr;
}

template <class A> const char* run_words(const int64_t* words) {
    A arguments;
    std::memcpy(&arguments, words, sizeof arguments);
    return run(arguments);
}

#define VITRINE_ENTRY(A) run_words<A>,
constexpr const char* (*OPS[])(const int64_t*) = {VITRINE_OPERATIONS(VITRINE_ENTRY)};

}  // namespace

extern "C" {

// Null, or what is wrong with the arguments of the call at which the tape stopped.
const char* vitrine_run(const int64_t* tape, int64_t words) {
    std::lock_guard<std::mutex> lock(serial);
    for (const int64_t* end = tape + words; tape < end; tape += 2 + tape[1])
        if (const char* error = OPS[tape[0]](tape + 2)) return error;
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
