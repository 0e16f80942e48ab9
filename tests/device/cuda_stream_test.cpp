// A random stream of steps, forks, cancellations and releases against a device that runs late. The
// host's kernels put a number of its own into every slot of a step's new tokens, and read all slots
// that their queries see: each must hold what was meant for it when the step was enqueued.
//
// Kernels of one stream run in order, so a block that is reused too early would still be read in
// time. That is looked for by itself: a block that is new to a sequence may not be in the tables of
// any step that the device has not finished, but of those that the sequence has it from.
#include <algorithm>
#include <deque>
#include <random>
#include <set>

#include "cuda_pool.hpp"
#include "fake_kernels.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr uint32_t layers = 4;

using block_set = std::set<int64_t>;  ///< of a layer: id * layers + layer

struct tracked {
    kv_seq handle = 0;
    std::vector<uint16_t> stamps;  ///< by position
    block_set blocks;              ///< in its tables when it was last in a step
};

/// What a step's kernel does to a layer when it runs.
struct kernel_work {
    struct access {
        device_pointer row;
        uint16_t stamp;
    };
    std::vector<access> writes, reads;
    /// Words of the tables on the device, and what they are to be.
    struct table_part {
        device_pointer address;
        std::vector<int32_t> words;
    };
    std::vector<table_part> tables;
};

class stream_test {
  public:
    /// With `kernels`, plans of layers that have the same slots are copied on the device.
    stream_test(uint32_t seed, uint32_t flags, bool kernels)
        : random_(seed),
          images_(kernels ? std::make_unique<with_images>() : nullptr),
          host_(kernels),
          pool_(small_config(flags), layers / 2) {}

    void run(uint32_t rounds) {
        for (uint32_t round = 0; round < rounds; ++round) {
            CAPTURE(round);
            if (sequences_.size() < 10 && random_() % 3 == 0) create_or_fork();
            if (!sequences_.empty()) step();
            if (sequences_.size() > 7 || random_() % 12 == 0) release();
            if (random_() % 9 == 0) truncate();
            for (uint32_t i = random_() % 6; i > 0; --i) {
                host_.fake.run_one(random_() % 2 == 0 ? host_.stream : host_.other);
            }
            if (random_() % 6 == 0) host_.fake.run_all();
            if (round % 50 == 0) REQUIRE(kv_pool_check(pool_) == KV_OK);
            REQUIRE(host_.fake.violations.empty());
            REQUIRE(pool_.memory() == host_.fake.physical_bytes() - others_);
        }
        CHECK(host_.fake.synchronisations() == 0);
        host_.fake.run_all();
        CHECK(finished_ == ended_);
    }

    uint64_t launches() const { return host_.fake.calls("cuLaunchKernel"); }
    uint64_t copies() const { return host_.fake.calls("cuMemcpyDtoDAsync_v2"); }
    uint64_t reads() const { return reads_; }
    uint64_t refused() const { return refused_; }

  private:
    void create_or_fork() {
        if (sequences_.empty() || random_() % 2 == 0) {
            sequences_.push_back({pool_.create_sequence(), {}, {}});
            return;
        }
        tracked child = sequences_[random_() % sequences_.size()];
        const kv_seq parent = child.handle;
        REQUIRE(kv_seq_fork(pool_, parent, 1, &child.handle) == KV_OK);
        sequences_.push_back(child);
    }

    void release() {
        if (sequences_.empty()) return;
        const std::size_t index = random_() % sequences_.size();
        REQUIRE(kv_seq_release(pool_, sequences_[index].handle) == KV_OK);
        sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(index));
    }

    void truncate() {
        if (sequences_.empty()) return;
        tracked& target = sequences_[random_() % sequences_.size()];
        const std::size_t keep = target.stamps.size() - target.stamps.size() % 16 / 2;
        const kv_status verdict = kv_seq_truncate(pool_, target.handle, keep);
        if (verdict == KV_OK) target.stamps.resize(keep);
    }

    void step() {
        // Steps stay on a stream for a while, and then move to the other.
        if (random_() % 10 == 0) std::swap(stream_, other_);
        kv_step* step = pool_.begin(stream_);
        std::vector<tracked*> items;
        for (tracked& candidate : sequences_) {
            if (items.size() == 6 || random_() % 3 == 0) continue;
            const uint32_t count = random_() % 6 == 0 ? 1 + random_() % 40 : 1 + random_() % 3;
            if (candidate.stamps.size() + count > 400) continue;
            REQUIRE(kv_seq_append(step, candidate.handle, nullptr, count, nullptr) == KV_OK);
            for (uint32_t i = 0; i < count; ++i) candidate.stamps.push_back(next_stamp_++);
            items.push_back(&candidate);
            counts_.push_back(count);
        }
        std::vector<block_set> before;
        for (const tracked* item : items) before.push_back(item->blocks);
        const auto forget = [&] {
            for (std::size_t i = 0; i < items.size(); ++i) {
                items[i]->stamps.resize(items[i]->stamps.size() - counts_[i]);
                items[i]->blocks = before[i];
            }
        };
        const kv_status verdict = items.empty() ? KV_AGAIN : kv_step_reserve(step, nullptr);
        if (verdict < 0) {
            REQUIRE(verdict == KV_AGAIN);
            ++refused_;
            REQUIRE(kv_step_cancel(step) == KV_OK);
            forget();
        } else {
            kernel_work work;
            block_set used;
            for (tracked* item : items) item->blocks.clear();
            for (uint32_t layer = 0; layer < layers; ++layer) {
                look(step, layer, items, before, work, used);
            }
            enqueue(std::move(work), std::move(used));
            const bool cancels = random_() % 8 == 0;
            REQUIRE((cancels ? kv_step_cancel(step) : kv_step_end(step, nullptr)) == KV_OK);
            if (cancels) forget();
        }
        counts_.clear();
    }

    /// The step's tables of a layer, and what its kernel will do with them.
    void look(kv_step* step, uint32_t layer, const std::vector<tracked*>& items,
              const std::vector<block_set>& before, kernel_work& work, block_set& used) {
        layer_tables of;
        of.fill(step, layer);
        for (std::size_t i = 0; i < items.size(); ++i) {
            const int32_t* table = of.block_table.data() + i * of.tables.block_table_stride;
            const int32_t* positions = of.slot_positions.data() + of.slot_indptr[i];
            const uint32_t slots = static_cast<uint32_t>(of.kv_len[i]);
            const uint32_t rows = static_cast<uint32_t>(of.query_start[i + 1] - of.query_start[i]);
            for (uint32_t slot = 0; slot < slots; ++slot) {
                const int64_t id = table[slot / 16];
                const kernel_work::access access{
                    of.row(id, slot % 16),
                    items[i]->stamps.at(static_cast<std::size_t>(positions[slot]))};
                (slot + rows >= slots ? work.writes : work.reads).push_back(access);
                if (slot + rows >= slots) work.reads.push_back(access);
            }
            look_at_row(step, layer, static_cast<uint32_t>(i), of, work);
            for (uint32_t block = 0; block * 16 < slots; ++block) {
                const int64_t key = int64_t{table[block]} * layers + layer;
                used.insert(key);
                items[i]->blocks.insert(key);
                if (before[i].count(key) != 0) continue;
                for (const auto& [number, blocks] : in_flight_) REQUIRE(blocks.count(key) == 0);
            }
        }
    }

    /// The same tables, as they are to be on the device when the kernel runs there.
    void look_at_row(kv_step* step, uint32_t layer, uint32_t item, const layer_tables& of,
                     kernel_work& work) {
        kv_cuda_tables on_device = KV_INIT(kv_cuda_tables);
        REQUIRE(kv_cuda_step_tables(step, layer, &on_device) == KV_OK);
        const auto expect = [&](const void* address, std::vector<int32_t> words) {
            work.tables.push_back({reinterpret_cast<device_pointer>(address), std::move(words)});
        };
        const int32_t* row = of.block_table.data() + item * of.tables.block_table_stride;
        const uint64_t stride =
            std::min(on_device.block_table_stride, of.tables.block_table_stride);
        expect(on_device.block_table + item * on_device.block_table_stride, {row, row + stride});
        expect(on_device.kv_len + item, {of.kv_len[item]});
        const int32_t begin = of.query_start[item], end = of.query_start[item + 1];
        expect(on_device.query_start + item, {begin, end});
        expect(on_device.positions + begin,
               {of.positions.begin() + begin, of.positions.begin() + end});
        std::vector<int32_t> mapping(2 * static_cast<std::size_t>(end - begin));
        std::memcpy(mapping.data(), of.slot_mapping.data() + begin, mapping.size() * 4);
        expect(on_device.slot_mapping + begin, std::move(mapping));
        if (item + 1 < of.tables.item_count) return;
        // Behind the last item and row there is nothing.
        expect(on_device.kv_len + item + 1, std::vector<int32_t>(6 - item - 1, 0));
        expect(on_device.query_start + item + 1, std::vector<int32_t>(6 - item, end));
        expect(on_device.slot_mapping + end,
               std::vector<int32_t>(2 * (256 - static_cast<std::size_t>(end)), -1));
    }

    void enqueue(kernel_work work, block_set used) {
        const uint64_t number = ++ended_;
        in_flight_.emplace_back(number, std::move(used));
        stream_->queue.push_back(
            {"the host's kernel", [this, number, work = std::move(work)] {
                 for (const kernel_work::access& write : work.writes) {
                     *host_.fake.memory_of<uint16_t>(write.row) = write.stamp;
                 }
                 for (const kernel_work::access& read : work.reads) {
                     REQUIRE(*host_.fake.memory_of<uint16_t>(read.row) == read.stamp);
                 }
                 for (const kernel_work::table_part& part : work.tables) {
                     const int32_t* words =
                         host_.fake.memory_of<int32_t>(part.address, part.words.size());
                     REQUIRE(std::equal(part.words.begin(), part.words.end(), words));
                 }
                 reads_ += work.reads.size();
                 ++finished_;
                 const auto is_this = [&](const auto& step) { return step.first == number; };
                 in_flight_.erase(std::find_if(in_flight_.begin(), in_flight_.end(), is_this));
             }});
    }

    struct host_with_kernels : cuda_host {
        kernel_faults faults;
        explicit host_with_kernels(bool kernels) {
            if (kernels) add_kernels(fake, faults);
        }
    };

    std::mt19937 random_;
    std::unique_ptr<with_images> images_;
    host_with_kernels host_;
    cuda_pool pool_;
    uint64_t others_ = host_.fake.physical_bytes() - pool_.memory();  ///< tables, staging
    stream_handle stream_ = host_.stream;
    stream_handle other_ = host_.other;
    std::vector<tracked> sequences_;
    std::vector<uint32_t> counts_;
    std::deque<std::pair<uint64_t, block_set>> in_flight_;
    uint16_t next_stamp_ = 1;
    uint64_t ended_ = 0, finished_ = 0, reads_ = 0, refused_ = 0;
};

/// Operations at random, in a pool of fixed memory and an elastic one. `kernels`: those of the
/// library run behind the launches.
void run_streams(uint32_t seed, bool kernels) {
    for (const uint32_t flags : {0u, uint32_t{KV_POOL_ELASTIC}}) {
        CAPTURE(flags);
        stream_test test(seed, flags, kernels);
        test.run(600);
        CHECK((test.launches() > 400) == kernels);
        CHECK(test.copies() > 50);
        CHECK(test.reads() > 100000);
    }
}

}  // namespace

TEST_CASE("whenever the device runs, every kernel reads what was meant for it") {
    run_streams(1, false);
}

TEST_CASE("whenever the device runs, the library's own kernels do, too") { run_streams(2, true); }
