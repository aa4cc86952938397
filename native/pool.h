// A handful of threads that are there within a fraction of a microsecond.
//
// A decode step is about 200 parallel regions of 5 to 30 microseconds each, so handing out work must cost far less
// than waking a thread does (5 microseconds and more). Between regions the helpers therefore watch one atomic for a
// while before they go to sleep; the caller works too, and never waits for a helper that did not come in time.
//
// Every thread begins with a share of its own, a run of neighbouring items: the weights that a kernel asks for ahead of
// their use are then mostly its own. Whoever is done with his share helps with the others':
//
//     items   0 1 2 3 4 5 | 6 7 8 9 10 11       each share has a ticket  | job number (32 bits) | next item (32 bits) |
//             caller ─►     helper ─►           and items are taken by compare-and-swap
//
// A helper that wakes late finds the job number changed or the items gone, and leaves; the caller waits only for items
// that were taken and are not finished. Which thread computes an item never changes the result.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <vector>

#if defined(__x86_64__)
inline void cpu_relax() { __builtin_ia32_pause(); }
#else
inline void cpu_relax() {}
#endif

class Pool {
public:
    using Task = void (*)(void*, int64_t);

    // Runs f(i) for i in 0..n, on the caller's thread and on the helpers.
    template <class F> void parallel_for(int64_t n, F&& f) {
        if (n == 1 || helpers_.empty()) {
            for (int64_t i = 0; i < n; i++) f(i);
        } else if (n > 1) {
            start([](void* c, int64_t i) { (*static_cast<std::remove_reference_t<F>*>(c))(i); }, &f, n);
        }
    }

    int threads() const { return int(shares_.size()); }

    void resize(int threads) {
        stop_ = true;
        wake();
        for (auto& t : helpers_) t.join();
        helpers_.clear();
        stop_ = false;
        shares_ = std::vector<Share>(threads);
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this, i] { help(i); });
    }

private:
    static constexpr uint64_t NONE_LEFT = 0xffffffff;
    static constexpr int SPINS = 4000;  // about 50 to 150 microseconds of watching before sleep

    struct alignas(64) Share {
        std::atomic<uint64_t> ticket{0};
        std::atomic<int64_t> end{0};
    };

    void start(Task task, void* context, int64_t n) {
        task_.store(task, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const int64_t all = threads();
        const uint64_t job = uint64_t(++job_) << 32;
        for (int64_t t = 0; t < all; t++) shares_[t].end.store(n * (t + 1) / all, std::memory_order_release);
        for (int64_t t = 0; t < all; t++)
            shares_[t].ticket.store(job | uint64_t(n * t / all), std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) wake();
        take_items(0);
        for (int spin = 0; done_.load(std::memory_order_acquire) < n; spin++)
            spin < SPINS ? cpu_relax() : std::this_thread::yield();
        for (auto& share : shares_) share.ticket.store(job | NONE_LEFT, std::memory_order_release);
    }

    void take_items(int me) {
        for (int k = 0, all = threads(); k < all; k++) {
            Share& share = shares_[(me + k) % all];
            uint64_t t = share.ticket.load(std::memory_order_acquire);
            for (;;) {
                // These may already belong to the next job; then the ticket passed through NONE_LEFT and the swap fails.
                // (`end` is acquired: whoever sees the next job's sees that NONE_LEFT too, whatever the processor.)
                Task task = task_.load(std::memory_order_relaxed);
                void* context = context_.load(std::memory_order_relaxed);
                int64_t item = t & NONE_LEFT;
                if (item >= share.end.load(std::memory_order_acquire)) break;
                if (!share.ticket.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel)) continue;
                task(context, item);
                done_.fetch_add(1, std::memory_order_release);
                t = share.ticket.load(std::memory_order_acquire);
            }
        }
    }

    void help(int me) {
        uint64_t seen = 0;
        auto& ticket = shares_[me].ticket;
        while (!stop_) {
            for (int spin = 0; spin < SPINS && ticket.load(std::memory_order_acquire) >> 32 == seen && !stop_; spin++)
                cpu_relax();
            if (ticket.load(std::memory_order_acquire) >> 32 == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1, std::memory_order_seq_cst);
                condition_.wait(lock, [&] { return stop_ || ticket.load(std::memory_order_seq_cst) >> 32 != seen; });
                sleeping_.fetch_sub(1, std::memory_order_seq_cst);
            }
            seen = ticket.load(std::memory_order_acquire) >> 32;
            take_items(me);
        }
    }

    void wake() {
        { std::lock_guard<std::mutex> lock(mutex_); }
        condition_.notify_all();
    }

    std::vector<std::thread> helpers_;
    std::vector<Share> shares_{1};
    uint32_t job_ = 0;
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable condition_;
};
