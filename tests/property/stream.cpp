#include "stream.hpp"

#include <algorithm>

namespace property {

kv_policy random_policy(world& world) {
    const std::vector<oracle_lane_shape>& lanes = world.model().lanes;
    const bool apart = std::all_of(lanes.begin(), lanes.end(), [&](const oracle_lane_shape& lane) {
        return !lane.evictable || lane.kv_heads == 1;
    });
    return random_policy(world.random(), apart);
}

namespace {

class stream {
  public:
    stream(const pool_spec& spec, const stream_options& options)
        : options_(options), world_(spec, options.filling, options.seed, options.defect) {}

    stream_result run() {
        try {
            while (world_.operations() < options_.operations) {
                operate();
                if (++rounds_ % 32 == 0) world_.check_pool();
                if (rounds_ % 512 == 0) world_.check_all();
            }
            drain();
        } catch (const mismatch& found) {
            throw mismatch(fmt::format(
                "{} [pool \"{}\", KVRT_STREAM_SEED={}, operation {}] after{}", found.what(),
                world_.model().spec.name, options_.seed, world_.operations(), world_.trail()));
        }
        const kv_pool_stats stats = world_.stats();
        result_.operations = world_.operations();
        result_.attention_rows = world_.attention_rows();
        result_.bytes_compared = world_.bytes_compared();
        result_.rounds = stats.compactions;
        result_.scored_rounds = world_.scored_rounds();
        result_.cancelled = stats.steps_cancelled;
        result_.tokens = stats.tokens_accepted;
        return result_;
    }

  private:
    uint64_t below(uint64_t bound) { return world_.below(bound); }

    oracle_sequence* any() {
        const std::vector<oracle_sequence*> alive = world_.alive();
        return alive.empty() ? nullptr : alive[below(alive.size())];
    }

    oracle_sequence* idle() {
        std::vector<oracle_sequence*> found;
        for (oracle_sequence* sequence : world_.alive()) {
            if (sequence->step < 0) found.push_back(sequence);
        }
        return found.empty() ? nullptr : found[below(found.size())];
    }

    void operate() {
        const uint64_t dice = below(100);
        if (dice < 66) {
            step_once();
        } else if (dice < 70) {
            create();
        } else if (dice < 74) {
            if (oracle_sequence* parent = any()) {
                world_.fork(*parent, 1 + static_cast<uint32_t>(below(3)));
            }
        } else if (dice < 79) {
            if (oracle_sequence* target = below(8) == 0 ? any() : idle()) truncate(*target);
        } else if (dice < 86) {
            if (oracle_sequence* target = below(5) == 0 ? any() : idle()) compress(*target);
        } else if (dice < 90) {
            if (oracle_sequence* target = any()) change_policy(*target);
        } else if (dice < 92) {
            if (oracle_sequence* target = any()) set_scores(*target);
        } else if (dice < 94) {
            if (oracle_sequence* target = any()) pin(*target);
        } else if (dice < 97) {
            release();
        } else {
            world_.pass_fences();
        }
    }

    void create() {
        if (below(2) == 0) {
            const kv_policy policy = random_policy(world_);
            world_.create(&policy, below(4) == 0);
        } else {
            world_.create(nullptr, below(4) == 0);
        }
    }

    void release() {
        oracle_sequence* target = any();
        if (target == nullptr) return;
        stale_ = target->handle;
        world_.release(*target);
        kv_seq unused = 0;
        world_.expect_error(kv_seq_fork(world_.pool(), stale_, 1, &unused), KV_STALE,
                            "kv_seq_fork of a released sequence");
        world_.expect_error(kv_compress(world_.pool(), stale_, nullptr, nullptr), KV_STALE,
                            "kv_compress of a released sequence");
    }

    void truncate(oracle_sequence& target) {
        const uint64_t seen = target.next_position;
        switch (below(6)) {
            case 0:
                world_.truncate(target, seen + 1 + below(3));
                break;
            case 1:
                world_.truncate(target, below(seen + 1));
                break;
            default:
                world_.truncate(target, seen - std::min<uint64_t>(seen, below(20)));
        }
    }

    void compress(oracle_sequence& target) {
        if (target.step < 0 && below(3) == 0) {
            kv_policy policy = random_policy(world_);
            policy.selection = KV_SELECT_PER_LAYER_PER_HEAD;
            policy.allocator = KV_ALLOCATE_UNIFORM;
            policy.skip_layers = 0;
            world_.compress_unevenly(target, policy);
        } else if (below(3) == 0) {
            const kv_policy policy = random_policy(world_);
            world_.compress(target, &policy);
        } else {
            world_.compress(target, nullptr);
        }
    }

    void change_policy(oracle_sequence& target) {
        if (below(4) == 0) {
            world_.set_policy(target, nullptr);
        } else {
            const kv_policy policy = random_policy(world_);
            world_.set_policy(target, &policy);
        }
    }

    /// Mostly for those who want them.
    void set_scores(oracle_sequence& target) {
        oracle_sequence* chosen = &target;
        for (oracle_sequence* other : world_.alive()) {
            if (below(4) != 0 && rules_of(*other).kind == observed_kind::given) chosen = other;
        }
        const uint64_t seen = chosen->next_position;
        const uint32_t layers = static_cast<uint32_t>(world_.model().spec.layers.size());
        if (below(3) == 0) {
            const uint64_t first = below(seen + 1);
            world_.set_scores(*chosen, static_cast<uint32_t>(below(layers)), first,
                              below(seen - first + 2));
            return;
        }
        for (uint32_t layer = 0; layer < layers; ++layer) {
            world_.set_scores(*chosen, layer, 0, seen);
        }
    }

    void pin(oracle_sequence& target) {
        if (below(3) == 0) {
            world_.unpin(target);
        } else {
            world_.pin(target, below(target.next_position + 4), below(12));
        }
    }

    /// Advances one of the open steps by one call, or opens one.
    void step_once() {
        const int place = world_.step(0).open() && world_.step(1).open()
                              ? static_cast<int>(below(2))
                          : world_.step(0).open() ? 0
                          : world_.step(1).open() ? 1
                                                  : -1;
        const bool both = world_.step(0).open() && world_.step(1).open();
        if (place < 0 || below(both ? 200 : 12) == 0) {
            world_.begin();
            return;
        }
        world_step& step = world_.step(place);
        if (!step.reserved) {
            build(place);
        } else if (!step.written) {
            if (below(40) == 0) {
                finish_badly(place);
                return;
            }
            attention_sample sample;
            sample.bytes = below(options_.filling == content::fingerprints ? 3 : 8) == 0;
            if (below(6) == 0) sample.out_type = KV_DTYPE_F16 + static_cast<uint32_t>(below(2));
            if (below(30) == 0) sample.rows = sample.heads = 0;
            const bool looked_at =
                std::any_of(step.items.begin(), step.items.end(), [](const world_item& item) {
                    return rules_of(*item.owner).kind != observed_kind::nothing;
                });
            world_.forward(place, below(4) < (looked_at ? 3u : 1u) ? &sample : nullptr);
        } else {
            finish(place);
        }
    }

    void build(int place) {
        world_step& step = world_.step(place);
        const uint64_t dice = below(20);
        if (dice < 12 || step.items.empty()) {
            oracle_sequence* owner = below(12) == 0 ? any() : idle();
            if (owner == nullptr) {
                create();
            } else {
                world_.append(place, *owner, rows());
            }
        } else if (dice == 12) {
            if (oracle_sequence* owner = any()) world_.remove(place, *owner);
        } else if (dice == 13 && below(3) == 0) {
            finish_badly(place);
        } else {
            reserve(place);
        }
    }

    uint32_t rows() {
        switch (below(10)) {
            case 0:
                return 17 + static_cast<uint32_t>(below(90));  // sometimes more than a step takes
            case 1:
            case 2:
                return 1 + static_cast<uint32_t>(below(30));
            case 3:
                return static_cast<uint32_t>(below(2));
            case 4:
            case 5:
                return 2 + static_cast<uint32_t>(below(5));  // a token and drafts behind it
            default:
                return 1;
        }
    }

    /// When the pool is full the host does what hosts do: takes items out, or drops sequences.
    void reserve(int place) {
        for (uint32_t tries = 0;; ++tries) {
            const kv_status found = world_.reserve(place);
            if (found == KV_OK || found == KV_INVALID) return;
            if (found == KV_AGAIN) ++result_.again;
            world_step& step = world_.step(place);
            std::vector<oracle_sequence*> owners;
            for (const world_item& item : step.items) {
                if (!item.owner->released) owners.push_back(item.owner);
            }
            if (owners.empty() || tries > 3) {
                world_.cancel(place);
                return;
            }
            if (found != KV_AGAIN || below(2) == 0) {
                oracle_sequence& owner = *owners[below(owners.size())];
                world_.remove(place, owner);
                if (found != KV_AGAIN && below(2) == 0) world_.release(owner);
            } else if (oracle_sequence* other = idle()) {
                world_.release(*other);
            }
        }
    }

    void finish(int place) {
        world_step& step = world_.step(place);
        const uint64_t dice = below(12);
        if (dice == 0) {
            world_.cancel(place);
        } else if (dice < 6) {
            world_item& item = step.items[below(step.items.size())];
            if (!item.owner->released) {
                const uint32_t most = item.rows + (below(10) == 0 ? 2 : 1);
                world_.accept(place, *item.owner, static_cast<uint32_t>(below(most)));
            }
        } else {
            world_.end(place);
        }
    }

    void finish_badly(int place) {
        if (below(2) == 0) {
            world_.end(place);  // not reserved or not written: cancelled
        } else {
            world_.cancel(place);
        }
    }

    /// Nothing may be held at the end.
    void drain() {
        for (int place = 0; place < 2; ++place) {
            if (world_.step(place).open()) world_.cancel(place);
        }
        for (oracle_sequence* sequence : world_.alive()) world_.release(*sequence);
        while (world_.model().fences.by_host && world_.stats().parked != 0) world_.pass_fences();
        world_.check_pool();
        const kv_pool_stats stats = world_.stats();
        require(stats.pinned == 0 && stats.parked == 0 && stats.slabs_free == stats.slabs_total,
                "{} blocks are pinned, {} parked, {} of {} slabs free after all was released",
                stats.pinned, stats.parked, stats.slabs_free, stats.slabs_total);
    }

    stream_options options_;
    world world_;
    stream_result result_;
    kv_seq stale_ = 0;
    uint64_t rounds_ = 0;
};

}  // namespace

stream_result run_stream(const pool_spec& spec, const stream_options& options) {
    return stream(spec, options).run();
}

}  // namespace property
