// Attention over paged keys and values, for decode, chunks and any mixture of them.
//
// The keys of a sequence are cut into fixed tiles of 64 positions, counted from position 0. A tile gives every query
// row that sees any of it three things: the largest score m, the sum l of exp(score - m), and the values weighted by
// those. Tiles are then folded together from first to last, each side scaled by exp(its m - the common m):
//
//     keys   0 ......... 63 │ 64 ........ 127 │ 128 ... p        row at position p; a window hides tiles on the left
//               m l acc     │     m l acc     │   m l acc
//                    └─ fold ──────┘  └─ fold ──────┘ ──► acc / l
//
// Since tiles and fold order depend only on the row's own position, a row's result is the same bits in a decode step,
// in a chunk of 5 or 512 rows, and whether its tiles were computed by one thread in a row or by several at once.
// The heads of a group share every key and value that is loaded, and in a chunk so do neighbouring rows.
#pragma once
#include "arguments.h"
#include "pool.h"
#include "simd.h"
#include <algorithm>
#include <cmath>
#include <vector>

constexpr int KEYS = 64;   // positions of a tile
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of values beside 6 rows of sums: what the registers hold
constexpr int BLOCK_ROWS = 16;  // query tokens that share a pass over the keys

// Null, or what would make the kernel read outside its arguments.
inline const char* wrong(const Attention& p) {
    for (int64_t s = 0; s < p.sequences; s++) {
        const int64_t begin = p.query_start[s], end = p.query_start[s + 1], length = p.context_lens[s];
        if (p.query_start[0] || end < begin || end > p.rows)
            return "query_start must rise from 0 to at most the number of rows";
        if (begin == end) continue;
        if (length < end - begin) return "a context is shorter than the rows it is asked for";
        if (length > p.max_blocks * p.block_size) return "a context is longer than its block table";
        for (int64_t b = 0; b * p.block_size < length; b++) {
            const int64_t block = p.block_tables[s * p.max_blocks + b];
            if (block < 0 || block >= p.num_blocks) return "a block table names a block outside the cache";
        }
    }
    return nullptr;
}

// The part of the work that one item does: `count` query rows (token, head) of one sequence and kv head.
struct RowBlock {
    int64_t s, kv_head, first, tokens;  // first token of the block within the sequence's new rows
};

struct Range { int64_t begin, end; };  // visible keys of a row within a tile, half open

inline Range visible(const Attention& p, int64_t position, int64_t tile) {
    const int64_t low = p.window > 0 ? std::max<int64_t>(0, position - p.window + 1) : 0, start = tile * KEYS;
    const Range seen = {std::max<int64_t>(0, low - start), std::min<int64_t>(KEYS, position + 1 - start)};
    return seen.begin < seen.end ? seen : Range{0, 0};
}

inline int64_t padded_dim(int64_t head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

inline void hide(float* w, Range seen, float value) {
    std::fill(w, w + seen.begin, value);
    std::fill(w + seen.end, w + KEYS, value);
}

// One vector of a head; PART is the last one of a head_dim that is no multiple of LANES.
template <bool PART, class T> inline vf load_head(const T* p, int64_t dim) {
    if constexpr (PART) return load_part(p, dim % LANES);
    else return load(p);
}

// Scores of R rows against 4 keys; each (row, key) pair adds its components in the same order whatever R is.
template <bool PART, int R, class T>
inline void score_step(const float* const* q, const T* const* k, int64_t d, int64_t dim, vf (&sum)[R][4]) {
    vf key[4];
    for (int j = 0; j < 4; j++) key[j] = load_head<PART>(k[j] + d, dim);
    for (int r = 0; r < R; r++) {
        vf query = load(q[r] + d);
        for (int j = 0; j < 4; j++) sum[r][j] = fma(query, key[j], sum[r][j]);
    }
}
template <int R, class T>
inline void scores(const float* const* q, const T* const* k, int64_t dim, float (*out)[KEYS], int64_t at) {
    vf sum[R][4];
    for (auto& row : sum) for (auto& v : row) v = splat(0.0f);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) score_step<false, R>(q, k, d, dim, sum);
    if (d < dim) score_step<true, R>(q, k, d, dim, sum);
    for (int r = 0; r < R; r++) store_sums(&out[r][at], sum[r]);
}

// Weighted values of R rows, V vectors of components at a time.
template <int R, int V, bool PART, class T>
inline void weigh(const float (*weights)[KEYS], const T* const* v, Range range, int64_t d, int64_t dim,
                  float* const* acc) {
    vf sum[R][V];
    for (auto& row : sum) for (auto& x : row) x = splat(0.0f);
    for (int64_t j = range.begin; j < range.end; j++) {
        vf value[V];
        for (int i = 0; i < V; i++) value[i] = load_head<PART>(v[j] + d + i * LANES, dim);
        for (int r = 0; r < R; r++) {
            vf w = splat(weights[r][j]);
            for (int i = 0; i < V; i++) sum[r][i] = fma(w, value[i], sum[r][i]);
        }
    }
    for (int r = 0; r < R; r++) for (int i = 0; i < V; i++) store(acc[r] + d + i * LANES, sum[r][i]);
}

// softcap * tanh(score / softcap), by tanh z = 1 - 2 / (e^2z + 1).
inline vf capped(vf score, float softcap) {
    const vf e = exp(mul(score, splat(2 / softcap)));
    return mul(splat(softcap), sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f)))));
}

// What a tile leaves behind for one row: [m, l, -, ... | padded_dim values].
constexpr int HEADER = 16;

// R rows against one tile; a row that sees nothing of it gets m = -infinity and is skipped by the fold.
template <int R, class T>
void tile_rows(const Attention& p, const float* const* q, const T* const* k, const T* const* v, const Range* seen,
               float* const* out) {
    alignas(64) float weights[R][KEYS];
    Range all = {KEYS, 0};
    for (int r = 0; r < R; r++) {
        if (seen[r].begin >= seen[r].end) continue;
        all = {std::min(all.begin, seen[r].begin), std::max(all.end, seen[r].end)};
    }
    for (int r = 0; r < R; r++) out[r][0] = -INFINITY;
    if (all.begin >= all.end) return;
    for (int64_t j = all.begin / 4 * 4; j < all.end; j += 4) {
        const T* keys[4];
        for (int i = 0; i < 4; i++) {
            const int64_t at = std::min(std::max(j + i, all.begin), all.end - 1);
            keys[i] = k[at];
            for (int64_t d = 0; d < p.head_dim; d += 64 / sizeof(T)) __builtin_prefetch(v[at] + d);  // they are next
        }
        constexpr int S = R < 3 ? R : 3;
        for (int r = 0; r < R; r += S) scores<S>(q + r, keys, p.head_dim, weights + r, j);
    }
    float* acc[R];
    for (int r = 0; r < R; r++) {
        acc[r] = out[r] + HEADER;
        float* w = weights[r];
        if (p.softcap > 0) for (int j = 0; j < KEYS; j += LANES) store(w + j, capped(load(w + j), p.softcap));
        hide(w, seen[r], -INFINITY);
        vf top = load(w), sum = splat(0.0f);
        for (int j = LANES; j < KEYS; j += LANES) top = max(top, load(w + j));
        const float m = max_lanes(top);
        if (m == -INFINITY) { std::memset(w, 0, sizeof weights[r]); continue; }
        for (int j = 0; j < KEYS; j += LANES) store(w + j, exp(sub(load(w + j), splat(m))));
        hide(w, seen[r], 0.0f);
        for (int j = 0; j < KEYS; j += LANES) sum = add(sum, load(w + j));
        out[r][0] = m;
        out[r][1] = sum_lanes(sum);
    }
    int64_t d = 0;
    for (; d + WIDE * LANES <= p.head_dim; d += WIDE * LANES)
        weigh<R, WIDE, false>(weights, v, all, d, p.head_dim, acc);
    for (; d + LANES <= p.head_dim; d += LANES) weigh<R, 1, false>(weights, v, all, d, p.head_dim, acc);
    if (d < p.head_dim) weigh<R, 1, true>(weights, v, all, d, p.head_dim, acc);
}

// total <- total folded with the next tile of the same row.
inline void fold(float* total, const float* tile, int64_t dim) {
    if (tile[0] == -INFINITY) return;
    const float m = std::max(total[0], tile[0]);
    alignas(64) float d[LANES] = {total[0] - m, tile[0] - m}, e[LANES];
    store(e, exp(load(d)));
    const vf keep = splat(total[0] == -INFINITY ? 0.0f : e[0]), take = splat(e[1]);
    total[1] = total[1] * (total[0] == -INFINITY ? 0.0f : e[0]) + tile[1] * e[1];
    total[0] = m;
    for (int64_t i = HEADER; i < HEADER + dim; i += LANES)
        store(total + i, fma(load(tile + i), take, mul(load(total + i), keep)));
}

// One block of rows against tiles [first, last): each row's tile result goes to sink(row, tile, result).
template <class T, class Sink>
void block_tiles(const Attention& p, const RowBlock& b, int64_t first, int64_t last, Sink&& sink) {
    thread_local std::vector<float> queries, partial;
    const int64_t group = p.heads / p.kv_heads, rows = b.tokens * group, dim = padded_dim(p.head_dim);
    const int64_t start = p.query_start[b.s], count = p.query_start[b.s + 1] - start;
    const int64_t position = p.context_lens[b.s] - count + b.first;
    if (int64_t(queries.size()) < rows * dim) queries.resize(rows * dim);
    if (int64_t(partial.size()) < 6 * (HEADER + dim)) partial.resize(6 * (HEADER + dim));
    for (int64_t r = 0; r < rows; r++) {  // token-major: row r is token r / group, head r % group
        const int64_t token = start + b.first + r / group, head = b.kv_head * group + r % group;
        const float* from = p.q + (token * p.heads + head) * p.head_dim;
        for (int64_t i = 0; i < p.head_dim; i++) queries[r * dim + i] = from[i] * p.scale;
        std::memset(&queries[r * dim] + p.head_dim, 0, (dim - p.head_dim) * sizeof(float));
    }
    for (int64_t tile = first; tile < last; tile++) {
        const T *k[KEYS], *v[KEYS];
        const int64_t keys = std::min<int64_t>(KEYS, position + b.tokens - tile * KEYS);
        for (int64_t j = 0; j < keys;) {  // block by block: the keys of a head are neighbours within one
            const int64_t at = tile * KEYS + j, index = at / p.block_size, slot = at - index * p.block_size;
            const int64_t block = p.block_tables[b.s * p.max_blocks + index];
            int64_t offset = ((block * p.kv_heads + b.kv_head) * p.block_size + slot) * p.head_dim;
            for (const int64_t end = std::min(keys, j + p.block_size - slot); j < end; j++, offset += p.head_dim) {
                k[j] = static_cast<const T*>(p.k_cache) + offset;
                v[j] = static_cast<const T*>(p.v_cache) + offset;
            }
        }
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r, n = left >= 6 ? 6 : std::min<int64_t>(3, left);
            const float* q[6];
            float* out[6];
            Range seen[6];
            for (int64_t i = 0; i < n; i++) {
                q[i] = &queries[(r + i) * dim];
                out[i] = &partial[i * (HEADER + dim)];
                seen[i] = visible(p, position + (r + i) / group, tile);
            }
            if (n == 6) tile_rows<6>(p, q, k, v, seen, out);
            else if (n == 3) tile_rows<3>(p, q, k, v, seen, out);
            else if (n == 2) tile_rows<2>(p, q, k, v, seen, out);
            else tile_rows<1>(p, q, k, v, seen, out);
            for (int64_t i = 0; i < n; i++) sink(r + i, tile, out[i]);
            r += n;
        }
    }
}

inline Range tiles_of(const Attention& p, const RowBlock& b) {
    const int64_t n = p.query_start[b.s + 1] - p.query_start[b.s], position = p.context_lens[b.s] - n + b.first;
    const int64_t low = p.window > 0 ? std::max<int64_t>(0, position - p.window + 1) : 0;
    return {low / KEYS, (position + b.tokens + KEYS - 1) / KEYS};
}

inline void write_rows(const Attention& p, const RowBlock& b, const float* totals) {
    const int64_t group = p.heads / p.kv_heads, stride = HEADER + padded_dim(p.head_dim);
    for (int64_t r = 0; r < b.tokens * group; r++) {
        const float* total = totals + r * stride;
        const int64_t token = p.query_start[b.s] + b.first + r / group, head = b.kv_head * group + r % group;
        float* to = p.out + (token * p.heads + head) * p.head_dim;
        for (int64_t i = 0; i < p.head_dim; i++) to[i] = total[HEADER + i] / total[1];
    }
}

template <class T> void attention(Pool& pool, const Attention& p) {
    static std::vector<RowBlock> blocks;  // calls are serialised
    static std::vector<float> scratch;
    static std::vector<int64_t> first_part;
    const int64_t group = p.heads / p.kv_heads, stride = HEADER + padded_dim(p.head_dim);
    blocks.clear();
    int64_t covered = p.sequences ? p.query_start[p.sequences] : 0, widest = 0;
    for (int64_t s = 0; s < p.sequences; s++) {
        const int64_t n = p.query_start[s + 1] - p.query_start[s];
        for (int64_t i = 0; i < n; i += BLOCK_ROWS)
            for (int64_t h = 0; h < p.kv_heads; h++) blocks.push_back({s, h, i, std::min<int64_t>(BLOCK_ROWS, n - i)});
    }
    std::memset(p.out + covered * p.heads * p.head_dim, 0, (p.rows - covered) * p.heads * p.head_dim * sizeof(float));
    auto reset = [&](float* total) { std::memset(total, 0, stride * sizeof(float)); total[0] = -INFINITY; };
    for (auto& b : blocks) widest = std::max(widest, b.tokens);
    if (widest > 1 || int64_t(blocks.size()) >= 4 * pool.threads()) {  // enough items: fold as the tiles come
        pool.parallel_for(blocks.size(), [&](int64_t i) {
            // The last blocks of a chunk see the most keys: they go first, so that no thread is left with one alone.
            const RowBlock& b = blocks[blocks.size() - 1 - i];
            thread_local std::vector<float> totals;
            if (int64_t(totals.size()) < b.tokens * group * stride) totals.resize(b.tokens * group * stride);
            for (int64_t r = 0; r < b.tokens * group; r++) reset(&totals[r * stride]);
            const Range tiles = tiles_of(p, b);
            block_tiles<T>(p, b, tiles.begin, tiles.end, [&](int64_t r, int64_t, const float* part) {
                fold(&totals[r * stride], part, stride - HEADER);
            });
            write_rows(p, b, totals.data());
        });
        return;
    }
    // Few rows with long contexts: every tile is an item, folded in order once all are there.
    first_part.assign(1, 0);
    for (auto& b : blocks) { Range t = tiles_of(p, b); first_part.push_back(first_part.back() + t.end - t.begin); }
    const int64_t parts = first_part.back();
    if (int64_t(scratch.size()) < (parts + 1) * group * stride) scratch.resize((parts + 1) * group * stride);
    pool.parallel_for(parts, [&](int64_t part) {
        const int64_t i = std::upper_bound(first_part.begin(), first_part.end(), part) - first_part.begin() - 1;
        const int64_t tile = tiles_of(p, blocks[i]).begin + part - first_part[i];
        block_tiles<T>(p, blocks[i], tile, tile + 1, [&](int64_t r, int64_t, const float* from) {
            std::memcpy(&scratch[(part * group + r) * stride], from, stride * sizeof(float));
        });
    });
    float* totals = &scratch[parts * group * stride];
    for (size_t i = 0; i < blocks.size(); i++) {
        for (int64_t r = 0; r < group; r++) {
            reset(totals + r * stride);
            for (int64_t part = first_part[i]; part < first_part[i + 1]; part++)
                fold(totals + r * stride, &scratch[(part * group + r) * stride], stride - HEADER);
        }
        write_rows(p, blocks[i], totals);
    }
}
