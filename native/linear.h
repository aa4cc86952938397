// y = x W^T over packed int4 or int8 weights, for one row, few rows and many rows, in one order of additions.
//
// A product tile is R rows by 16 channels. Walking the groups of 32 inputs, it loads 256 bytes of weights once, makes
// the integer dot products of the group for all R rows (simd.h), and then adds, in float,
//
//     sum[row][channel] += dot * (weight_scale * activation_scale)  +  weight_min * activation_sum
//
// R only decides how often a loaded weight is used: 6 rows when there are many, 1 when there is one. Every row adds its
// groups from first to last with the same operations, so its result is the same bits whatever R was.
//
//     rows ──►  ┌────────────── K ──────────────┐      one item of work = one block of rows (24 KB of codes)
//               │ group 0 │ group 1 │ ...       │      x a run of channel tiles; codes and a tile's weights (6 KB
//               └───────────────────────────────┘      for 576 inputs) stay in L1 while they meet
//
// The activations of a call are prepared once, before the product: normalised if asked, rounded to 8 bits per group of
// 32 with a float scale (or kept in float), and summed per group for the minima.
#pragma once
#include "arguments.h"
#include "pool.h"
#include "simd.h"
#include <algorithm>
#include <vector>

constexpr int TILE = 16, GROUP = 32, STEP = 4 * TILE;  // channels, inputs, bytes of one 4-input step of a tile
constexpr int HALVES = TILE / LANES;                   // vectors across the channels of a tile

inline int64_t padded(const Linear& p) {
    const int64_t step = p.group_size ? p.group_size : GROUP;
    return (p.k + step - 1) / step * step;
}

// The prepared activations, one entry per row and group.
struct Activations {
    std::vector<int8_t> codes;   // [rows, padded]
    std::vector<float> values;   // [rows, padded], instead of codes when the activations stay in float
    std::vector<float> scales, sums;  // [rows, groups]: code -> value, and the sum of the values
    std::vector<int32_t> code_sums;   // [rows, groups]
    int64_t padded, groups;
    void reserve(int64_t rows, int64_t k, bool floats) {
        padded = k;
        groups = k / GROUP;
        auto grow = [](auto& v, size_t n) { if (v.size() < n) v.resize(n); };
        if (floats) grow(values, rows * k);
        else grow(codes, rows * k);
        grow(scales, rows * groups);
        grow(sums, rows * groups);
        grow(code_sums, rows * groups);
    }
};

inline float inverse_rms(const float* x, int64_t n, float eps) {
    vf sum = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = fma(load(x + i), load(x + i), sum);
    if (i < n) { vf v = load_part(x + i, n - i); sum = fma(v, v, sum); }
    return 1.0f / std::sqrt(sum_lanes(sum) / float(n) + eps);
}

inline void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* y) {
    vf inverse = splat(inverse_rms(x, n, eps));
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, mul(mul(load(x + i), inverse), load(weight + i)));
    if (i < n) store_part(y + i, mul(mul(load_part(x + i, n - i), inverse), load_part(weight + i, n - i)), n - i);
}

// One group of 32 floats -> codes, scale and sum; a group of zeros gets scale 0.
inline void round_group(const float* v, int8_t* codes, float& scale, float& sum, int32_t& code_sum) {
    constexpr int PARTS = GROUP / LANES;
    vf part[PARTS], amax = splat(0.0f), total = splat(0.0f);
    for (int i = 0; i < PARTS; i++) amax = max(amax, abs(part[i] = load(v + i * LANES)));
    float top = max_lanes(amax);
    vf inverse = splat(top > 0 ? 127.0f / top : 0.0f);
    for (int i = 0; i < PARTS; i++) {
        vf code = round(mul(part[i], inverse));
        total = add(total, code);  // whole numbers below 2^24: exact
        store_s8(codes + i * LANES, code);
    }
    float whole = sum_lanes(total);
    scale = top / 127.0f + (whole - whole);  // an infinity or NaN among the inputs makes the whole group NaN
    sum = scale * whole;
    code_sum = whole == whole ? int32_t(whole) : 0;
}

inline void prepare_row(const Linear& p, Activations& a, int64_t row) {
    thread_local std::vector<float> buffer;
    if (int64_t(buffer.size()) < a.padded) buffer.resize(a.padded);
    float* v = p.float_activation ? &a.values[row * a.padded] : buffer.data();
    const float* x = p.x + row * p.k;
    if (p.norm) rms_norm_row(x, p.norm, p.k, p.eps, v);
    else std::memcpy(v, x, p.k * sizeof(float));
    std::memset(v + p.k, 0, (a.padded - p.k) * sizeof(float));
    for (int64_t g = 0; g < a.groups; g++) {
        int64_t at = row * a.groups + g;
        if (!p.float_activation) {
            round_group(v + g * GROUP, &a.codes[row * a.padded + g * GROUP], a.scales[at], a.sums[at], a.code_sums[at]);
            continue;
        }
        vf total = splat(0.0f);
        for (int i = 0; i < GROUP; i += LANES) total = add(total, load(v + g * GROUP + i));
        a.sums[at] = sum_lanes(total);
    }
}

// Weights are asked for this many bytes early. With one row the processor's own prefetching is not enough to overlap
// the reading with the arithmetic.
constexpr int64_t AHEAD = 8192;

// The scales of one group of a tile: fp16 per group, with minima for int4; or one float per channel.
struct Int4 {
    static constexpr int BYTES = 4 * STEP, PARAMS = 2 * TILE * sizeof(fp16);
    static vf scale(const uint8_t* p, int h) { return load((const fp16*)p + h * LANES); }
    static vf low(const uint8_t* p, int h) { return load((const fp16*)p + TILE + h * LANES); }
};
struct Int8 {
    static constexpr int BYTES = 8 * STEP, PARAMS = TILE * sizeof(fp16);
    static vf scale(const uint8_t* p, int h) { return load((const fp16*)p + h * LANES); }
};
struct Int8Channel {
    static constexpr int BYTES = 8 * STEP, PARAMS = TILE * sizeof(float);
    static vf scale(const uint8_t* p, int h) { return load((const float*)p + h * LANES); }
};

// The integer dots of one group: R rows x H vectors of channels.
template <int R, int H, class W>
inline void group_dots(const uint8_t* w, const int8_t* const* x, const int32_t* const* sums, int64_t g,
                       vf (&out)[R][H]) {
    dot d[R][H];
    if constexpr (W::BYTES == 4 * STEP) {
        for (auto& row : d) for (auto& v : row) v = dot_zero();
        for (int c = 0; c < 4; c++) {
            vb raw[H];
            for (int h = 0; h < H; h++) raw[h] = load_bytes(w + c * STEP + h * 4 * LANES);
            for (int half = 0; half < 2; half++) {
                vb codes[H];
                for (int h = 0; h < H; h++) codes[h] = half ? high_nibbles(raw[h]) : low_nibbles(raw[h]);
                for (int r = 0; r < R; r++) {
                    vb v = splat4(x[r] + g * GROUP + 16 * half + 4 * c);
                    for (int h = 0; h < H; h++) d[r][h] = dot_u4(d[r][h], codes[h], v);
                }
            }
        }
        for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) out[r][h] = dot_sum(d[r][h]);
    } else {
        for (int r = 0; r < R; r++) for (auto& v : d[r]) v = dot_s8_start(sums[r][g]);
        for (int c = 0; c < 8; c++) {
            vb raw[H];
            for (int h = 0; h < H; h++) raw[h] = load_bytes(w + c * STEP + h * 4 * LANES);
            for (int r = 0; r < R; r++) {
                vb v = splat4(x[r] + g * GROUP + 4 * c);
                for (int h = 0; h < H; h++) d[r][h] = dot_s8(d[r][h], raw[h], v);
            }
        }
        for (int r = 0; r < R; r++) for (int h = 0; h < H; h++) out[r][h] = dot_s8_sum(d[r][h]);
    }
}

// The same sums over float activations: the four bytes of a lane become four float vectors, inputs in order.
template <int I, int R, int H, bool SIGNED>
inline void float_step(const vb (&w)[H], const float* const* x, int64_t k, vf (&out)[R][H]) {
    for (int h = 0; h < H; h++) {
        vf wide = SIGNED ? byte_s<I>(w[h]) : byte_u<I>(w[h]);
        for (int r = 0; r < R; r++) out[r][h] = fma(wide, splat(x[r][k + I]), out[r][h]);
    }
}
template <int R, int H, bool SIGNED>
inline void float_steps(const vb (&w)[H], const float* const* x, int64_t k, vf (&out)[R][H]) {
    float_step<0, R, H, SIGNED>(w, x, k, out);
    float_step<1, R, H, SIGNED>(w, x, k, out);
    float_step<2, R, H, SIGNED>(w, x, k, out);
    float_step<3, R, H, SIGNED>(w, x, k, out);
}
template <int R, int H, class W>
inline void group_floats(const uint8_t* w, const float* const* x, int64_t g, vf (&out)[R][H]) {
    for (auto& row : out) for (auto& v : row) v = splat(0.0f);
    constexpr bool SIGNED = W::BYTES == 8 * STEP;
    for (int c = 0; c < W::BYTES / STEP; c++) {
        vb raw[H];
        for (int h = 0; h < H; h++) raw[h] = load_bytes(w + c * STEP + h * 4 * LANES);
        if constexpr (SIGNED) {
            float_steps<R, H, true>(raw, x, g * GROUP + 4 * c, out);
        } else {
            vb half[H];
            for (int h = 0; h < H; h++) half[h] = low_nibbles(raw[h]);
            float_steps<R, H, false>(half, x, g * GROUP + 4 * c, out);
            for (int h = 0; h < H; h++) half[h] = high_nibbles(raw[h]);
            float_steps<R, H, false>(half, x, g * GROUP + 16 + 4 * c, out);
        }
    }
}

// R rows x one tile of 16 channels -> out [R][TILE].
template <int R, class W, bool FLOATS>
void product_tile(const Linear& p, const Activations& a, const uint8_t* tile, int64_t row, float (*out)[TILE]) {
    const int8_t* codes[R];
    const float *values[R], *scales[R], *sums[R];
    const int32_t* code_sums[R];
    for (int r = 0; r < R; r++) {
        codes[r] = a.codes.data() + (row + r) * a.padded;
        values[r] = a.values.data() + (row + r) * a.padded;
        scales[r] = a.scales.data() + (row + r) * a.groups;
        sums[r] = a.sums.data() + (row + r) * a.groups;
        code_sums[r] = a.code_sums.data() + (row + r) * a.groups;
    }
    const int64_t repeat = p.group_size ? p.group_size / GROUP : a.groups;  // groups of 32 that share their scales
    const uint8_t* params = tile + a.groups * W::BYTES;
    const int64_t share = W::BYTES + W::PARAMS / repeat;  // bytes of a tile for each of its groups
    vf total[R][HALVES];
    for (auto& row_total : total) for (auto& v : row_total) v = splat(0.0f);
    for (int64_t g = 0, left = repeat; g < a.groups; g++) {
        vf sum[R][HALVES];
        for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(tile + AHEAD + g * share + i);
        if constexpr (FLOATS) group_floats<R, HALVES, W>(tile + g * W::BYTES, values, g, sum);
        else group_dots<R, HALVES, W>(tile + g * W::BYTES, codes, code_sums, g, sum);
        for (int h = 0; h < HALVES; h++) {
            vf scale = W::scale(params, h);
            for (int r = 0; r < R; r++)
                total[r][h] = fma(sum[r][h], FLOATS ? scale : mul(scale, splat(scales[r][g])), total[r][h]);
            if constexpr (W::BYTES == 4 * STEP) {
                vf low = W::low(params, h);
                for (int r = 0; r < R; r++) total[r][h] = fma(low, splat(sums[r][g]), total[r][h]);
            }
        }
        if (--left == 0) params += W::PARAMS, left = repeat;
    }
    for (int r = 0; r < R; r++) for (int h = 0; h < HALVES; h++) store(out[r] + h * LANES, total[r][h]);
}

// silu(gate) * up for n values, the tail included.
inline vf silu_mul(vf gate, vf up) { return mul(div(gate, add(splat(1.0f), exp(sub(splat(0.0f), gate)))), up); }
inline void silu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, silu_mul(load(gate + i), load(up + i)));
    if (i < n) store_part(y + i, silu_mul(load_part(gate + i, n - i), load_part(up + i, n - i)), n - i);
}
inline void add_row(float* y, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

// The channels of one tile for R rows: product, bias, and the gate with the tile n / 2 channels further.
template <int R, class W, bool FLOATS>
void finish_tile(const Linear& p, const Activations& a, int64_t tile_bytes, int64_t tile, int64_t row) {
    alignas(64) float out[R][TILE], up[R][TILE];
    const int64_t half = p.n / 2, width = p.silu_gate ? half : p.n, first = tile * TILE;
    const int64_t n = std::min<int64_t>(TILE, width - first);
    product_tile<R, W, FLOATS>(p, a, p.w + tile * tile_bytes, row, out);
    if (p.silu_gate) product_tile<R, W, FLOATS>(p, a, p.w + (tile + half / TILE) * tile_bytes, row, up);
    for (int r = 0; r < R; r++) {
        float* y = p.y + (row + r) * width + first;
        if (p.bias) add_row(out[r], p.bias + first, n);
        if (p.silu_gate) {
            if (p.bias) add_row(up[r], p.bias + half + first, n);
            silu_mul_row(out[r], up[r], TILE, out[r]);
        }
        if (p.residual) add_row(out[r], p.residual + (row + r) * width + first, n);
        std::memcpy(y, out[r], n * sizeof(float));
    }
}

template <class W, bool FLOATS> void linear_tiles(Pool& pool, const Linear& p, const Activations& a) {
    const int64_t tile_bytes = a.groups * W::BYTES + (p.group_size ? padded(p) / p.group_size : 1) * W::PARAMS;
    const int64_t width = p.silu_gate ? p.n / 2 : p.n, tiles = (width + TILE - 1) / TILE;
    const int64_t run = std::max<int64_t>(1, tiles / (pool.threads() * 16)), runs = (tiles + run - 1) / run;
    const int64_t block = std::max<int64_t>(6, (24 << 10) / a.padded / 6 * 6);  // rows whose codes stay in L1
    const int64_t blocks = (p.rows + block - 1) / block;
    pool.parallel_for(runs * blocks, [&](int64_t item) {
        const int64_t first = item % runs * run, begin = item / runs * block, end = std::min(p.rows, begin + block);
        for (int64_t tile = first; tile < std::min(tiles, first + run); tile++) {
            int64_t row = begin;
            for (; row + 6 <= end; row += 6) finish_tile<6, W, FLOATS>(p, a, tile_bytes, tile, row);
            for (; row + 3 <= end; row += 3) finish_tile<3, W, FLOATS>(p, a, tile_bytes, tile, row);
            if (end - row == 2) finish_tile<2, W, FLOATS>(p, a, tile_bytes, tile, row);
            if (end - row == 1) finish_tile<1, W, FLOATS>(p, a, tile_bytes, tile, row);
        }
    });
}

template <class W> void linear(Pool& pool, Linear p) {
    static Activations a;  // calls are serialised (kernels.cpp), so one set of buffers serves them all
    static std::vector<float> gate_up;
    a.reserve(p.rows, padded(p), p.float_activation);
    if (p.rows < 4) for (int64_t r = 0; r < p.rows; r++) prepare_row(p, a, r);
    else pool.parallel_for(p.rows, [&](int64_t r) { prepare_row(p, a, r); });
    const bool split = p.silu_gate && p.n / 2 % TILE;  // gate and up share a tile: gate in a pass of its own
    Linear q = p;
    if (split) {
        gate_up.resize(p.rows * p.n);
        q.silu_gate = false, q.residual = nullptr, q.y = gate_up.data();
    }
    if (p.float_activation) linear_tiles<W, true>(pool, q, a);
    else linear_tiles<W, false>(pool, q, a);
    if (!split) return;
    const int64_t half = p.n / 2;
    pool.parallel_for(p.rows, [&](int64_t r) {
        silu_mul_row(&gate_up[r * p.n], &gate_up[r * p.n + half], half, p.y + r * half);
        if (p.residual) add_row(p.y + r * half, p.residual + r * half, half);
    });
}
