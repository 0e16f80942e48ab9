#include "evaluate/retention_family.hpp"

#include <algorithm>

#include "text.hpp"

namespace evaluate {

using generate::kv_cache;

namespace {

bool same_storage(const configuration& a, const configuration& b) {
    const auto same = [](const operand_storage& one, const operand_storage& other) {
        return one.format == other.format && one.flags == other.flags;
    };
    return same(a.storage.keys, b.storage.keys) && same(a.storage.values, b.storage.values);
}

// The full cache first.
std::vector<retention_caches::kind> kinds_of(std::span<const contender> contenders) {
    std::vector<retention_caches::kind> kinds = {{observation::nothing, false, nullptr}};
    for (const contender& one : contenders) {
        const retention_method& method = *one.method;
        const bool known =
            std::any_of(kinds.begin(), kinds.end(), [&](const retention_caches::kind& other) {
                return other.observes == method.observes &&
                       other.lane_per_head == method.lane_per_head();
            });
        if (!known) {
            kinds.push_back({method.observes, method.lane_per_head(), &method});
        }
    }
    return kinds;
}

}  // namespace

std::size_t family_size(std::span<const contender> contenders) {
    return kinds_of(contenders).size() + 1;  // the f16 cache, where it is not among them
}

std::vector<cached_sequence> family::others() const {
    std::vector<cached_sequence> all;
    for (const member& one : std::span(members).subspan(1)) {
        all.push_back(one.sequence);
    }
    return all;
}

const cached_sequence& family::parent_of(const retention_method& method) const {
    const auto found = std::find_if(members.begin(), members.end(), [&](const member& one) {
        return one.observes == method.observes && one.lane_per_head == method.lane_per_head();
    });
    return (found == members.end() ? members.front() : *found).sequence;
}

outcome<retention_caches> retention_caches::create(const generate::llama_model& model,
                                                   std::span<const contender> contenders,
                                                   const retention_options& options,
                                                   const retention_room& room) {
    retention_caches made;
    made.longest_ = room.tokens;
    made.kinds_ = kinds_of(contenders);
    const bool lane_per_head = std::any_of(made.kinds_.begin(), made.kinds_.end(),
                                           [](const kind& one) { return one.lane_per_head; });

    generate::cache_options limits;
    limits.most_tokens = static_cast<std::uint32_t>(room.tokens);
    limits.most_step_rows =
        static_cast<std::uint32_t>(room.rows + options.chunk * made.kinds_.size());
    limits.threads = options.threads;
    const auto add = [&](const configuration& stored, bool per_head) -> outcome<nothing> {
        limits.storage = storage_of_layers(stored, model.config.layers);
        limits.key_channels = options.key_channels;
        limits.lane_per_head = per_head;
        limits.most_sequences = static_cast<std::uint32_t>(room.forks + family_size(contenders));
        limits.most_observed = limits.most_sequences;
        auto cache = kv_cache::create(model.config, limits);
        if (!cache) {
            return error{fmt::format("'{}': {}", stored.name, cache.message())};
        }
        for (std::uint32_t layer = 0; layer < options.statistics.size(); ++layer) {
            auto statistics = options.statistics[layer];
            if (auto done = cache->set_statistics(layer, statistics); !done) {
                return done;
            }
        }
        made.caches_.push_back(std::move(*cache));
        return nothing{};
    };
    made.caches_.reserve(3);
    if (auto done = add(reference_configuration(), false); !done) {
        return done.failure();
    }
    if (!same_storage(options.stored, reference_configuration())) {
        made.stored_ = made.caches_.size();
        if (auto done = add(options.stored, false); !done) {
            return done.failure();
        }
    }
    if (lane_per_head) {
        made.per_head_ = made.caches_.size();
        if (auto done = add(options.stored, true); !done) {
            return done.failure();
        }
    }
    return made;
}

outcome<family> retention_caches::create_family() {
    family made;
    for (const kind& one : kinds_) {
        const std::size_t cache = one.lane_per_head ? per_head_ : stored_;
        kv_policy policy = KV_INIT(kv_policy);
        if (one.example != nullptr) {
            policy = policy_of(*one.example, static_cast<std::uint32_t>(longest_), 0, 0, 0);
        }
        const auto sequence = caches_[cache].create_sequence(
            one.example != nullptr ? &policy : nullptr, KV_SEQ_GATHER_STATISTICS);
        if (!sequence) {
            return sequence.failure();
        }
        made.members.push_back({one.observes, one.lane_per_head, {cache, *sequence}});
    }
    made.reference = made.full();
    if (!is_reference()) {
        const auto sequence = caches_.front().create_sequence(nullptr);
        if (!sequence) {
            return sequence.failure();
        }
        made.reference = {0, *sequence};
    }
    return made;
}

outcome<family> retention_caches::fork(const family& parent) {
    family made;
    for (const family::member& one : parent.members) {
        const auto child = caches_[one.sequence.cache].fork(one.sequence.sequence, 1);
        if (!child) {
            return child.failure();
        }
        made.members.push_back(
            {one.observes, one.lane_per_head, {one.sequence.cache, child->front()}});
    }
    made.reference = made.full();
    if (!is_reference()) {
        const auto child = caches_.front().fork(parent.reference.sequence, 1);
        if (!child) {
            return child.failure();
        }
        made.reference = {0, child->front()};
    }
    return made;
}

outcome<nothing> retention_caches::release(const family& one) {
    for (const family::member& member : one.members) {
        if (auto done = release(member.sequence); !done) {
            return done;
        }
    }
    return is_reference() ? outcome<nothing>(nothing{}) : release(one.reference);
}

outcome<cached_sequence> retention_caches::fork(const cached_sequence& parent,
                                                const kv_policy& policy, bool compress) {
    kv_cache& cache = caches_[parent.cache];
    const auto child = cache.fork(parent.sequence, 1);
    if (!child) {
        return child.failure();
    }
    const cached_sequence made = {parent.cache, child->front()};
    if (auto done = cache.set_policy(made.sequence, policy); !done) {
        return done.failure();
    }
    if (compress) {
        const auto round = cache.compress(made.sequence);
        if (!round) {
            return round.failure();
        }
        if (round->outcome != KV_COMPRESS_DONE && round->outcome != KV_COMPRESS_NOTHING) {
            return error{fmt::format("a round of scorer {} came to nothing: outcome {}",
                                     policy.scorer, round->outcome)};
        }
    }
    return made;
}

outcome<nothing> retention_caches::release(const cached_sequence& one) {
    return caches_[one.cache].release_sequence(one.sequence);
}

}  // namespace evaluate
