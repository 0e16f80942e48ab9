// Operations at random on a pool on the GPU and one on the CPU, over the geometries and with the
// policies of the property tests' streams: sequences come and go, fork, truncate, compress and
// change policies between steps of prompts, drafts and tokens. Statuses and reports must be alike,
// stored words, positions and tables the same, outputs within their bounds.
//
// Most scores round otherwise on the GPU, so that of two tokens as near as that the one or the
// other stays. A sequence that keeps others is given up; more of them than chance has would be a
// defect. So it is where the device refuses a round that the CPU runs (what only the device knows).
#include "device/round_pools.hpp"
#include "gpu_twin_device.hpp"
#include "property/geometry.hpp"
#include "property/policies.hpp"
#include "test_length.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr uint32_t most_tokens = 440, most_sequences = 8;

struct layers_of_spec : twin_model {
    property::pool_spec spec;
    std::vector<kv_rope> ropes;

    explicit layers_of_spec(const property::pool_spec& of) : spec(of) {
        layers = property::layers_of(spec, ropes);
        layout = spec.layout;
        block_tokens = spec.block_tokens;
        arena_bytes = uint64_t{128} << 20;  // of which copies always find some
        max_observed_sequences = most_sequences;
    }
};

struct member {
    twin_sequence sequence;
    uint64_t rounds = 0;  ///< of its own, so far
    kv_policy policy = KV_INIT(kv_policy);
};

class twin_stream {
  public:
    twin_stream(const property::pool_spec& spec, uint64_t seed)
        : random_(seed),
          spec_(spec),
          pools_(device_, flags_of(spec), std::make_unique<layers_of_spec>(spec)) {
        pools_.random.seed(static_cast<uint32_t>(seed));
    }

    void run(uint32_t operations) {
        for (uint32_t i = 0; i < operations; ++i) {
            CAPTURE(i);
            operate();
            if (i % 16 == 15) compare();
        }
        compare();
    }

    uint64_t rounds = 0, apart = 0, undecided = 0, tables = 0;
    const twin_pools_on& pools() const { return pools_; }

  private:
    static uint32_t flags_of(const property::pool_spec& spec) {
        return spec.flags & (KV_POOL_ELASTIC | KV_POOL_HOST_FENCES | KV_POOL_THREAD_SAFE);
    }
    uint32_t below(uint64_t bound) { return static_cast<uint32_t>(random_() % bound); }
    member* any() { return members_.empty() ? nullptr : &members_[below(members_.size())]; }
    void drop(twin_sequence gone) {
        pools_.release(gone);
        std::erase_if(members_,
                      [&](const member& each) { return each.sequence.of[0] == gone.of[0]; });
    }

    void operate() {
        const uint32_t dice = below(100);
        member* const target = any();
        if (members_.size() < 2 || (dice < 8 && members_.size() < most_sequences)) {
            members_.push_back({pools_.create()});
            if (below(3) != 0) set_policy(members_.back());
        } else if (dice < 14 && members_.size() < most_sequences) {
            fork(*target);
        } else if (dice < 20) {
            truncate(*target);
        } else if (dice < 28) {
            compress(*target);
        } else if (dice < 34) {
            set_policy(*target);
        } else if (dice < 37) {
            pin(*target);
        } else if (dice < 41) {
            drop(target->sequence);
        } else {
            step();
        }
    }

    /// What the device refuses by name is none of the stream's.
    void set_policy(member& target) {
        for (;;) {
            const kv_policy policy = property::random_policy(random_, false);
            const kv_status there =
                kv_seq_set_policy(pools_.pools[0], target.sequence.of[0], &policy);
            if (there == KV_UNSUPPORTED) continue;
            const kv_status here =
                kv_seq_set_policy(pools_.pools[1], target.sequence.of[1], &policy);
            REQUIRE_MESSAGE(there == here, std::string(message_buffer()));
            if (there == KV_OK) target.policy = policy;
            return;
        }
    }
    void fork(const member& parent) {
        member child = parent;
        kv_status verdicts[2];
        for (uint32_t i = 0; i < 2; ++i) {
            verdicts[i] =
                kv_seq_fork(pools_.pools[i], parent.sequence.of[i], 1, &child.sequence.of[i]);
        }
        REQUIRE_MESSAGE(verdicts[0] == verdicts[1], std::string(message_buffer()));
        if (verdicts[0] == KV_OK) members_.push_back(child);
    }
    void truncate(const member& target) {
        twin_sequence sequence = target.sequence;
        const uint32_t tokens = below(6) == 0
                                    ? below(sequence.tokens + 1)
                                    : sequence.tokens - std::min(sequence.tokens, below(20));
        kv_status verdicts[2];
        for (uint32_t i = 0; i < 2; ++i) {
            verdicts[i] = kv_seq_truncate(pools_.pools[i], sequence.of[i], tokens);
        }
        if (verdicts[0] != verdicts[1]) {
            REQUIRE(verdicts[0] == KV_NO_SNAPSHOT);
            REQUIRE(verdicts[1] == KV_OK);
            ++undecided;
            drop(sequence);
        } else if (verdicts[0] == KV_OK) {
            find(sequence)->sequence.tokens = tokens;
        }
    }
    void pin(const member& target) {
        const uint32_t first = below(target.sequence.tokens + 4);
        for (uint32_t i = 0; i < 2; ++i) {
            REQUIRE(kv_seq_unpin(pools_.pools[i], target.sequence.of[i]) == KV_OK);
            REQUIRE(kv_seq_pin(pools_.pools[i], target.sequence.of[i], first, 1 + first % 11) ==
                    KV_OK);
        }
    }

    void compress(const member& target) {
        kv_policy policy = property::random_policy(random_, false);
        kv_compress_options options = KV_INIT(kv_compress_options);
        if (below(2) == 0) options.policy = &policy;
        kv_compress_report told[2] = {KV_INIT(kv_compress_report), KV_INIT(kv_compress_report)};
        kv_status verdicts[2] = {KV_OK, KV_OK};
        for (uint32_t i = 0; i < 2; ++i) {
            const auto call = [&] {
                return kv_compress(pools_.pools[i], target.sequence.of[i], &options, &told[i]);
            };
            verdicts[i] = call();
            if (i == 1 || verdicts[0] != KV_AGAIN) continue;
            device_.catch_up();  // lists had no room to go up
            verdicts[0] = call();
        }
        if (verdicts[0] == KV_UNSUPPORTED) {
            // By name, or what the host cannot know of positions.
            if (verdicts[1] == KV_OK && told[1].outcome == KV_COMPRESS_DONE) {
                ++undecided;
                drop(target.sequence);
            }
            return;
        }
        REQUIRE_MESSAGE(verdicts[0] == verdicts[1], std::string(message_buffer()));
        CHECK(told[0].outcome == told[1].outcome);
        CHECK(told[0].tokens_after == told[1].tokens_after);
        look_for_rounds({target.sequence}, options.policy);
    }

    void step() {
        std::vector<twin_append> items;
        uint32_t left = 250;
        for (member& each : members_) {
            twin_sequence& sequence = each.sequence;
            if (items.size() == 6 || below(4) == 0) continue;
            uint32_t rows = below(5) == 0 ? 1 + below(80) : 1 + below(2) * below(6);
            rows = std::min({rows, left, most_tokens - std::min(most_tokens, sequence.tokens)});
            if (rows == 0) continue;
            left -= rows;
            items.push_back({&sequence, rows, below(3) != 0 ? rows : below(rows + 1)});
        }
        if (items.empty()) {
            drop(any()->sequence);
            return;
        }
        kv_step* steps[2];
        pools_.begin(items, steps);
        if (below(3) == 0) look_at_tables(steps[0], static_cast<uint32_t>(items.size()));
        pools_.run_layers(items, steps);
        if (below(10) == 0) {
            pools_.cancel(steps);
            return;
        }
        pools_.end(items, steps);
        const bool by_host = (flags_of(spec_) & KV_POOL_HOST_FENCES) != 0;
        for (uint32_t i = 0; i < 2 && by_host; ++i) {
            REQUIRE(kv_pool_pass_fence(pools_.pools[i], pools_.reports[i].fence) == KV_OK);
        }
        std::vector<twin_sequence> stepped;
        for (const twin_append& item : items) stepped.push_back(*item.sequence);
        look_for_rounds(stepped, nullptr);
    }

    /// Where both have run a round, they keep the same; where one alone has, it is the CPU.
    void look_for_rounds(const std::vector<twin_sequence>& of, const kv_policy* given) {
        for (const twin_sequence& each : of) {
            kv_seq_info info[2] = {KV_INIT(kv_seq_info), KV_INIT(kv_seq_info)};
            for (uint32_t i = 0; i < 2; ++i) {
                REQUIRE(kv_seq_get_info(pools_.pools[i], each.of[i], &info[i]) == KV_OK);
            }
            member& known = *find(each);
            const bool ran = info[0].compactions != known.rounds;
            if (info[0].compactions != info[1].compactions) {
                CHECK(info[0].compactions < info[1].compactions);
                ++undecided;
                drop(each);
                continue;
            }
            known.rounds = info[0].compactions;
            if (!ran) continue;
            ++rounds;
            if (same_positions(each)) continue;
            const uint32_t scorer = given != nullptr ? given->scorer : known.policy.scorer;
            // These have the CPU's bits.
            CHECK(scorer != KV_SCORER_STREAMING);
            CHECK(scorer != KV_SCORER_RANDOM);
            CHECK(scorer != KV_SCORER_KEY_NORM);
            ++apart;
            drop(each);
        }
    }
    bool same_positions(const twin_sequence& sequence) {
        for (uint32_t l = 0; l < pools_.layers(); ++l) {
            for (uint32_t head = 0; head < pools_.kinds.layers[l].kv_heads; ++head) {
                std::vector<uint32_t> found[2];
                for (uint32_t i = 0; i < 2; ++i) {
                    uint64_t count = 0;
                    found[i].resize(512);
                    REQUIRE(kv_seq_get_positions(pools_.pools[i], sequence.of[i], l, head, 512,
                                                 found[i].data(), &count) == KV_OK);
                    found[i].resize(count);
                }
                REQUIRE(found[0].size() == found[1].size());
                if (found[0] != found[1]) return false;
            }
        }
        return true;
    }

    /// The tables that the host's own kernels would read, when the stream gets to them.
    void look_at_tables(kv_step* step, uint32_t items) {
        for (uint32_t l = 0; l < pools_.layers(); ++l) {
            layer_tables expected;
            expected.fill(step, l, false);
            kv_cuda_tables there = KV_INIT(kv_cuda_tables);
            REQUIRE(kv_cuda_step_tables(step, l, &there) == KV_OK);
            const auto expect = [&](const void* address, const auto* words, std::size_t count) {
                using word = std::remove_cv_t<std::remove_reference_t<decltype(*words)>>;
                device_.look(
                    "tables", reinterpret_cast<device_pointer>(address), count * sizeof(word),
                    [this,
                     known = std::vector<word>(words, words + count)](const std::byte* found) {
                        wrong_tables_ +=
                            std::memcmp(found, known.data(), known.size() * sizeof(word)) != 0;
                    });
                ++tables;
            };
            const auto rows = static_cast<std::size_t>(expected.tables.token_count);
            expect(there.kv_len, expected.kv_len.data(), items);
            expect(there.query_start, expected.query_start.data(), items + 1);
            expect(there.positions, expected.positions.data(), rows);
            expect(there.slot_mapping, expected.slot_mapping.data(), rows);
            for (uint32_t item = 0; item < items; ++item) {
                const auto blocks = static_cast<std::size_t>(
                    (expected.kv_len[item] + static_cast<int32_t>(spec_.block_tokens) - 1) /
                    static_cast<int32_t>(spec_.block_tokens));
                expect(there.block_table + item * there.block_table_stride,
                       expected.block_table.data() + item * expected.tables.block_table_stride,
                       blocks);
            }
        }
    }

    void compare() {
        for (const member& each : members_) {
            pools_.compare_stored(each.sequence);
            if (!same_positions(each.sequence)) FAIL_CHECK("positions");
        }
        CHECK(pools_.differences == 0);
        CHECK(wrong_tables_ == 0);
        for (kv_pool* pool : pools_.pools) {
            const kv_status verdict = kv_pool_check(pool);
            REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
        }
    }
    member* find(const twin_sequence& sequence) {
        return &*std::find_if(members_.begin(), members_.end(), [&](const member& each) {
            return each.sequence.of[0] == sequence.of[0];
        });
    }

    std::mt19937_64 random_;
    property::pool_spec spec_;
    gpu_twin_device device_;
    twin_pools_on pools_;
    std::deque<member> members_;
    uint64_t wrong_tables_ = 0;
};

}  // namespace

TEST_CASE("streams of operations at random, over the geometries and policies of the CPU's") {
    uint64_t rounds = 0, apart = 0, undecided = 0, tables = 0, outputs = 0, words = 0;
    for (uint64_t seed = 1; seed <= (whole_length() ? 4 : 1); ++seed) {
        const std::vector<property::pool_spec> specs = property::stream_specs(seed);
        for (std::size_t i = 0; i < specs.size(); ++i) {
            // Short: of each third geometry.
            if (!whole_length() && i % 3 != 0) continue;
            CAPTURE(seed);
            CAPTURE(specs[i].name);
            twin_stream stream(specs[i], seed * 100 + i);
            stream.run(whole_length() ? 120 : 8);
            rounds += stream.rounds;
            apart += stream.apart;
            undecided += stream.undecided;
            tables += stream.tables;
            outputs += stream.pools().compared_outputs;
            words += stream.pools().compared_words;
        }
    }
    MESSAGE(rounds, " rounds, ", apart, " that keep others, ", undecided,
            " that the device refused or cannot know; ", outputs, " outputs, ", words,
            " stored words, ", tables, " tables compared");
    CHECK(outputs > (whole_length() ? 5000 : 20));
    CHECK(words > (whole_length() ? 500000 : 5000));
    CHECK(tables > (whole_length() ? 1000 : 4));
    if (!whole_length()) return;
    CHECK(rounds > 200);
    CHECK(apart <= rounds / 20);
    CHECK(undecided <= rounds / 10);
}
