#include "evaluate/retention_family.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace evaluate {

using generate::kv_cache;

namespace {

bool same_storage(const configuration& a, const configuration& b) {
    const auto same = [](const operand_storage& one, const operand_storage& other) {
        return one.format == other.format && one.flags == other.flags;
    };
    return same(a.storage.keys, b.storage.keys) && same(a.storage.values, b.storage.values);
}

// Whether both are in the same cache, and there see their attention observed alike.
bool same_cache(const retention_method& a, const retention_method& b) {
    return a.lane_per_head() == b.lane_per_head() && a.demoted_format == b.demoted_format;
}
bool same_kind(const retention_method& a, const retention_method& b) {
    return a.observes == b.observes && same_cache(a, b);
}

// A method of each kind, that of the full cache first.
std::vector<const retention_method*> kinds_of(std::span<const contender> contenders) {
    std::vector<const retention_method*> kinds = {&full_cache()};
    for (const contender& one : contenders) {
        if (std::none_of(kinds.begin(), kinds.end(), [&](const retention_method* other) {
                return same_kind(*other, *one.method);
            })) {
            kinds.push_back(one.method);
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
        return same_kind(*one.example, method);
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
    generate::cache_options limits;
    limits.most_tokens = static_cast<std::uint32_t>(room.tokens);
    limits.most_step_rows =
        static_cast<std::uint32_t>(room.rows + options.chunk * made.kinds_.size());
    limits.threads = options.threads;
    const auto add = [&](const configuration& stored,
                         const retention_method& example) -> outcome<nothing> {
        limits.storage = storage_of_layers(stored, model.config.layers);
        limits.key_channels = options.key_channels;
        limits.lane_per_head = example.lane_per_head();
        limits.demoted_format = example.demoted_format;
        limits.demote_after = example.demoted_format != 0 ? demote_after : 0;
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
    if (auto done = add(reference_configuration(), full_cache()); !done) {
        return done.failure();
    }
    if (!same_storage(options.stored, reference_configuration())) {
        made.stored_ = made.caches_.size();
        if (auto done = add(options.stored, full_cache()); !done) {
            return done.failure();
        }
    }
    for (const retention_method* one : made.kinds_) {
        if (made.cache_of(*one) < made.caches_.size()) {
            continue;
        }
        made.examples_.push_back(one);
        if (auto done = add(options.stored, *one); !done) {
            return done.failure();
        }
    }
    return made;
}

// The number of caches, if there is none for it yet.
std::size_t retention_caches::cache_of(const retention_method& method) const {
    if (same_cache(method, full_cache())) {
        return stored_;
    }
    const auto found =
        std::find_if(examples_.begin(), examples_.end(),
                     [&](const retention_method* other) { return same_cache(*other, method); });
    return stored_ + 1 + static_cast<std::size_t>(found - examples_.begin());
}

std::uint32_t retention_caches::tokens_of(const contender& one, std::size_t length) const {
    const std::uint32_t budget = one.budget(length);
    if (one.method->demoted_format == 0) {
        return budget;
    }
    const auto bytes = [&](std::size_t cache) {
        return static_cast<double>(caches_[cache].bytes_per_token());
    };
    return tokens_for(budget, bytes(cache_of(*one.method)) / bytes(stored_));
}

outcome<family> retention_caches::create_family() {
    family made;
    for (const retention_method* one : kinds_) {
        const std::size_t cache = cache_of(*one);
        kv_policy policy = KV_INIT(kv_policy);
        if (!one->keeps_all()) {
            policy = policy_of(*one, static_cast<std::uint32_t>(longest_), 0, 0, 0);
        }
        const auto sequence = caches_[cache].create_sequence(one->keeps_all() ? nullptr : &policy,
                                                             KV_SEQ_GATHER_STATISTICS);
        if (!sequence) {
            return sequence.failure();
        }
        made.members.push_back({one, {cache, *sequence}});
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
        made.members.push_back({one.example, {one.sequence.cache, child->front()}});
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
