// The machine's vectors behind a dozen inline functions, so that every kernel is written once.
//
// Three versions: AVX-512 with VNNI (16 lanes), AVX2 with FMA and F16C (8 lanes), and plain C++ (8 lanes as arrays,
// which a compiler turns into whatever the machine has). A lane is one output channel in the products, and one
// component of a head in attention. The names:
//
//   vf   LANES floats                vb   4 * LANES bytes: four consecutive inputs of LANES channels
//   dot  the running integer sums    dot_u4: weights 0..15, at most 8 calls before dot_sum; dot_s8: weights -128..127
//
// dot_u4 on AVX2 keeps 16-bit sums: 8 calls * 2 products * 15 * 127 = 30480 < 32768, so a group of 32 inputs cannot
// overflow and pays for the widening once. dot_s8 moves the sign of the weight onto the activation, since maddubs wants
// one unsigned side: 2 * 128 * 127 = 32512 fits too. VNNI wants the unsigned side as well: there the weight is offset
// by 128 and the sum starts at -128 * (sum of the activations).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(VITRINE_PLAIN) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VITRINE_AVX512 1
#elif !defined(VITRINE_PLAIN) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VITRINE_AVX2 1
#endif
#if defined(VITRINE_AVX512) || defined(VITRINE_AVX2)
#include <immintrin.h>
#endif

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline float bits_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t float_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline int32_t load_i32(const void* p) { int32_t v; std::memcpy(&v, p, 4); return v; }

// One element from and to the storage types of the caches.
inline float to_float(float v) { return v; }
inline float to_float(bf16 v) { return bits_float(uint32_t(v.bits) << 16); }
inline float to_float(fp16 v) {
    uint32_t sign = uint32_t(v.bits & 0x8000) << 16, rest = v.bits & 0x7fff;
    if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // Shifting the exponent field and multiplying by 2^112 re-biases it, subnormals included.
    return bits_float(sign | float_bits(bits_float(rest << 13) * 0x1p112f));
}
inline void put(float* p, float v) { *p = v; }
inline void put(bf16* p, float v) {
    uint32_t u = float_bits(v);
    p->bits = v != v ? 0x7fc0 : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);  // round half to even
}
inline void put(fp16* p, float v) {
    uint32_t u = float_bits(v), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest >= 0x477ff000) p->bits = uint16_t(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));  // NaN, or too large
    else if (rest < 0x38800000) p->bits = uint16_t(sign | (float_bits(bits_float(rest) + 0.5f) - 0x3f000000));
    else p->bits = uint16_t(sign | (((rest + 0xfff + (rest >> 13 & 1)) >> 13) - (112 << 10)));
}

#if defined(VITRINE_AVX512)
constexpr int LANES = 16;
using vf = __m512;
using vb = __m512i;
using dot = __m512i;
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline vf load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vf load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline void store_sums(float* p, const vf (&v)[4]) {  // the sums over the lanes of four vectors
    __m256 half[4];
    for (int i = 0; i < 4; i++) half[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
inline vf splat(float v) { return _mm512_set1_ps(v); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf abs(vf a) { return _mm512_abs_ps(a); }
inline vf round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
inline vb load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline vb low_nibbles(vb v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline vb high_nibbles(vb v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline vb splat4(const int8_t* p) { return _mm512_set1_epi32(load_i32(p)); }
inline dot dot_zero() { return _mm512_setzero_si512(); }
inline dot dot_u4(dot d, vb w, vb x) { return _mm512_dpbusd_epi32(d, w, x); }
inline vf dot_sum(dot d) { return _mm512_cvtepi32_ps(d); }
inline dot dot_s8_start(int sum) { return _mm512_set1_epi32(-128 * sum); }
inline dot dot_s8(dot d, vb w, vb x) { return _mm512_dpbusd_epi32(d, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x); }
inline vf dot_s8_sum(dot d) { return _mm512_cvtepi32_ps(d); }
template <int I> inline vf byte_u(vb v) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8 * I), _mm512_set1_epi32(255)));
}
template <int I> inline vf byte_s(vb v) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * I), 24));
}
inline void store_s8(int8_t* p, vf v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v))); }

#elif defined(VITRINE_AVX2)
constexpr int LANES = 8;
using vf = __m256;
using vb = __m256i;
using dot = __m256i;
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline vf load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline vf load(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline void store_sums(float* p, const vf (&v)[4]) {  // the sums over the lanes of four vectors
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
inline vf splat(float v) { return _mm256_set1_ps(v); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf scale2(vf a, vf n) {  // a * 2^n for whole n in -126..127
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline vb load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vb low_nibbles(vb v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline vb high_nibbles(vb v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline vb splat4(const int8_t* p) { return _mm256_set1_epi32(load_i32(p)); }
inline dot dot_zero() { return _mm256_setzero_si256(); }
// Left alone, g++ makes every product first and adds them in a tree, through memory: a third slower for many rows.
inline dot in_register(dot d) { asm("" : "+x"(d)); return d; }
inline dot dot_u4(dot d, vb w, vb x) { return in_register(_mm256_add_epi16(d, _mm256_maddubs_epi16(w, x))); }
inline vf dot_sum(dot d) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(d, _mm256_set1_epi16(1))); }
inline dot dot_s8_start(int) { return _mm256_setzero_si256(); }
inline dot dot_s8(dot d, vb w, vb x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return in_register(_mm256_add_epi32(d, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
inline vf dot_s8_sum(dot d) { return _mm256_cvtepi32_ps(d); }
template <int I> inline vf byte_u(vb v) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v, 8 * I), _mm256_set1_epi32(255)));
}
template <int I> inline vf byte_s(vb v) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * I), 24));
}
inline void store_s8(int8_t* p, vf v) {
    __m256i i = _mm256_cvtps_epi32(v);
    __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(h, h));
}

#else
constexpr int LANES = 8;
struct vf { float v[LANES]; };
struct vb { uint8_t v[4 * LANES]; };
struct dot { int32_t v[LANES]; };
template <class F> inline vf lanes(F f) { vf r; for (int i = 0; i < LANES; i++) r.v[i] = f(i); return r; }
template <class T> inline vf load(const T* p) { return lanes([&](int i) { return to_float(p[i]); }); }
inline void store(float* p, vf a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_sums(float* p, const vf (&v)[4]) {  // the sums over the lanes of four vectors
    for (int i = 0; i < 4; i++) {
        const float* s = v[i].v;
        p[i] = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
    }
}
inline vf splat(float s) { return lanes([&](int) { return s; }); }
inline vf add(vf a, vf b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
inline vf sub(vf a, vf b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
inline vf mul(vf a, vf b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
inline vf div(vf a, vf b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
inline vf fma(vf a, vf b, vf c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline vf max(vf a, vf b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline vf abs(vf a) { return lanes([&](int i) { return std::fabs(a.v[i]); }); }
inline vf round(vf a) { return lanes([&](int i) { return std::nearbyint(a.v[i]); }); }
inline vf scale2(vf a, vf n) {
    return lanes([&](int i) { return a.v[i] * bits_float(uint32_t(int(n.v[i]) + 127) << 23); });
}
inline vb load_bytes(const uint8_t* p) { vb r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline vb low_nibbles(vb a) { for (auto& b : a.v) b &= 15; return a; }
inline vb high_nibbles(vb a) { for (auto& b : a.v) b >>= 4; return a; }
inline vb splat4(const int8_t* p) { vb r; for (int i = 0; i < 4 * LANES; i++) r.v[i] = uint8_t(p[i % 4]); return r; }
inline dot dot_zero() { return dot{}; }
inline dot dot_u4(dot d, vb w, vb x) {
    for (int i = 0; i < 4 * LANES; i++) d.v[i / 4] += int(w.v[i]) * int8_t(x.v[i]);
    return d;
}
inline vf dot_sum(dot d) { return lanes([&](int i) { return float(d.v[i]); }); }
inline dot dot_s8_start(int) { return dot{}; }
inline dot dot_s8(dot d, vb w, vb x) {
    for (int i = 0; i < 4 * LANES; i++) d.v[i / 4] += int(int8_t(w.v[i])) * int8_t(x.v[i]);
    return d;
}
inline vf dot_s8_sum(dot d) { return dot_sum(d); }
template <int I> inline vf byte_u(vb a) { return lanes([&](int i) { return float(a.v[4 * i + I]); }); }
template <int I> inline vf byte_s(vb a) { return lanes([&](int i) { return float(int8_t(a.v[4 * i + I])); }); }
inline void store_s8(int8_t* p, vf a) { for (int i = 0; i < LANES; i++) p[i] = int8_t(std::nearbyint(a.v[i])); }
#endif

// Shared by all three. The order of a sum over lanes is fixed, so it cannot depend on the shape of the call.
inline float sum_lanes(vf v) {
    float t[LANES];
    store(t, v);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
}
inline float max_lanes(vf v) {
    float t[LANES];
    store(t, v);
    float m = t[0];
    for (int i = 1; i < LANES; i++) m = t[i] > m ? t[i] : m;
    return m;
}
template <class T> inline vf load_part(const T* p, int n) {  // the first n < LANES elements, zeros after them
    float t[LANES] = {};
    for (int i = 0; i < n; i++) t[i] = to_float(p[i]);
    return load(t);
}
inline void store_part(float* p, vf v, int n) {
    float t[LANES];
    store(t, v);
    std::memcpy(p, t, n * sizeof(float));
}

// e^x within 2 units in the last place for -87 <= x <= 88, clamped outside: x = n ln 2 + r, e^r by its Taylor series.
inline vf exp(vf x) {
    x = max(splat(-87.0f), x);  // in this order a NaN stays a NaN
    x = sub(splat(0.0f), max(splat(-88.0f), sub(splat(0.0f), x)));
    vf n = round(mul(x, splat(1.44269504f)));
    vf r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
    return scale2(p, n);
}
