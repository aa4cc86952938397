// Drawing a token from a row of logits, as sampling.py defines it, in few passes over the row where torch takes ten.
//
// Weights are whole numbers, FULL_WEIGHT for the likeliest token, so sums of them are exact in any order. That is what
// lets the sums of blocks be kept beside the weights, and a uniform sample u be followed block by block:
//
//     weights  | 5 2 1 8 | 0 3 3 0 | 9 1 1 0 |       u = 0.62 is 20.5 of 33
//     blocks       16         6        11            16 are passed, then 4.5 of block 1: its third token
//
// top_k and top_p ask for the best tokens first. Mostly it is enough to look at those with a thousandth of the weight of
// the likeliest one, or a 262,144th, and to pass over whole blocks whose sum is less; if not, all are counted into the
// 2,577 buckets that the upper bits of a float make. Then one bucket holds the border between kept and dropped, and only
// that one is sorted.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

constexpr float FULL_WEIGHT = 17179869184.0f;   // 2^34, as in sampling.py
constexpr int BUCKETS = ((127 + 34) << 4) + 1;  // of floats from 0 to FULL_WEIGHT by exponent and 4 bits of mantissa
constexpr int64_t DRAW_BLOCK = 512;

struct Drawing {  // one row; the layout that native/cpu.py writes
    double best, temperature, min_p, top_k, top_p, u;
};

class Drawer {
public:
    int64_t draw(const float* row, int64_t n, const Drawing& d) {
        weigh(row, n, d);
        const bool few = d.top_k > 0 && d.top_k < double(n);
        if (!few && d.top_p >= 1) return hit(d.u);
        const int64_t most = few ? int64_t(d.top_k) : 0;
        count(most, few ? 0.0 : d.top_p * total_);
        if (few) keep_count(row, most);
        if (d.top_p < 1) keep_mass(row, d.top_p * (few ? mass_of_ids() : total_));
        return hit_ids(d.u);
    }

private:
    // weight = round(e^((x - best) / temperature) * FULL_WEIGHT), 0 for what min_p drops; and their sums by block.
    void weigh(const float* row, int64_t n, const Drawing& d) {
        weights_.resize(n);
        const vf best = splat(float(d.best)), temperature = splat(float(d.temperature)), all = splat(FULL_WEIGHT);
        const vf zero = splat(0.0f), least_negative = splat(-FULL_WEIGHT);
        const auto weight = [&](vf x) {
            const vf w = round(mul(exp(div(sub(x, best), temperature)), all));
            return sub(zero, max(sub(zero, w), least_negative));  // FULL_WEIGHT at most, whatever is said of best
        };
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) store(&weights_[i], weight(load(row + i)));
        if (i < n) store_part(&weights_[i], weight(load_part(row + i, int(n - i))), int(n - i));
        const float least = float(d.min_p * FULL_WEIGHT);
        if (d.min_p > 0)
            for (float& t : weights_) t = t >= least ? t : 0.0f;
        sums_.clear();
        total_ = 0;
        for (int64_t b = 0; b < n; b += DRAW_BLOCK) {
            sums_.push_back(sum(b, std::min(n, b + DRAW_BLOCK)));
            total_ += sums_.back();
        }
    }

    double sum(int64_t i, int64_t end) const {
        double parts[8] = {};
        for (; i + 8 <= end; i += 8)
            for (int j = 0; j < 8; j++) parts[j] += weights_[i + j];
        for (; i < end; i++) parts[0] += weights_[i];
        return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    }

    // Fills ids_, in order, with the tokens of at least this weight.
    void collect(float least) {
        ids_.clear();
        for (int64_t b = 0, n = weights_.size(); b < int64_t(sums_.size()); b++) {
            if (sums_[b] < least) continue;
            for (int64_t i = b * DRAW_BLOCK; i < std::min(n, (b + 1) * DRAW_BLOCK); i++)
                if (weights_[i] >= least) ids_.push_back(i);
        }
    }

    // Counts tokens and their mass by bucket: of the best, in ids_, if those are enough, else of all.
    void count(int64_t most, double mass) {
        counts_.assign(BUCKETS, 0);
        mass_.assign(BUCKETS, 0.0);
        const auto add = [&](int64_t i) { counts_[bucket(i)]++, mass_[bucket(i)] += weights_[i]; };
        collected_ = false;
        for (float least = FULL_WEIGHT / 1024; !collected_ && least > 1024; least /= 256) {
            collect(least);
            collected_ = int64_t(ids_.size()) >= most && mass_of_ids() >= mass;
        }
        if (collected_) for (int64_t i : ids_) add(i);
        else for (int64_t i = 0; i < int64_t(weights_.size()); i++) add(i);
    }

    int bucket(int64_t i) const { return int(float_bits(weights_[i]) >> 19); }

    double mass_of_ids() const {
        double mass = 0;
        for (int64_t i : ids_) mass += weights_[i];
        return mass;
    }

    // Keeps the `most` best tokens.
    void keep_count(const float* row, int64_t most) {
        int b = BUCKETS - 1;
        for (; b > 0 && counts_[b] < most; b--) most -= counts_[b];
        cut(row, b, [&](auto better) {
            const auto first = inside_.begin();
            most = std::min(most, int64_t(inside_.size()));
            std::nth_element(first, first + most, inside_.end(), better);
            return most;
        });
    }

    // Keeps the shortest run of best tokens that reaches the mass `goal`.
    void keep_mass(const float* row, double goal) {
        double reach = 0;
        int b = BUCKETS - 1;
        for (; b > 0 && reach + mass_[b] < goal; b--) reach += mass_[b];
        cut(row, b, [&](auto better) {
            std::sort(inside_.begin(), inside_.end(), better);
            int64_t kept = 0;
            while (kept < int64_t(inside_.size()) && (kept == 0 || reach < goal)) reach += weights_[inside_[kept++]];
            return kept;
        });
    }

    // Drops the buckets below `border`, and of that one all but the first, as many as order(better) says once it has
    // put the best in front.
    template <class F> void cut(const float* row, int border, F&& order) {
        if (!collected_) collect(std::max(1.0f, bits_float(uint32_t(border) << 19)));
        collected_ = true;
        inside_.clear();
        for (int64_t i : ids_)
            if (bucket(i) == border) inside_.push_back(i);
        const int64_t kept = order([&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
        mass_[border] = 0;
        for (int64_t k = 0; k < int64_t(inside_.size()); k++) {
            if (k >= kept) weights_[inside_[k]] = 0;  // which is bucket 0
            mass_[border] += weights_[inside_[k]];
        }
        ids_.erase(std::remove_if(ids_.begin(), ids_.end(), [&](int64_t i) { return bucket(i) < border; }), ids_.end());
    }

    // The token on whose weight u in [0, 1) falls.
    int64_t hit(double u) const {
        const double goal = u * total_;
        double reach = 0;
        size_t b = 0;
        for (; b + 1 < sums_.size() && reach + sums_[b] <= goal; b++) reach += sums_[b];
        int64_t i = b * DRAW_BLOCK;
        for (; i + 1 < int64_t(weights_.size()) && (reach += weights_[i]) <= goal; i++) {}
        return i;
    }

    int64_t hit_ids(double u) const {
        const double goal = u * mass_of_ids();
        double reach = 0;
        size_t k = 0;
        for (; k + 1 < ids_.size() && (reach += weights_[ids_[k]]) <= goal; k++) {}
        return ids_.empty() ? 0 : ids_[k];
    }

    std::vector<float> weights_;  // [n]
    std::vector<double> sums_, mass_;  // of blocks, of buckets
    std::vector<int64_t> counts_, ids_, inside_;
    double total_ = 0;
    bool collected_ = false;  // ids_ holds every token that may be kept
};
