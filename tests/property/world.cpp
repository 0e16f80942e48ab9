#include "world.hpp"

#include <algorithm>

namespace property {

world::world(const pool_spec& spec, content filling, uint64_t seed, mutation defect,
             const kv_hooks* hooks)
    : model_(spec, defect), filling_(filling), random_(seed), tenant_(seed % 100) {
    pool_ = create_pool(spec, hooks);
    check_accounting();
}

world::~world() { kv_pool_release(pool_); }

std::string world::trail() const {
    std::string text;
    for (std::size_t i = 0; i < trail_.size(); ++i) {
        const std::string& line = trail_[(noted_ + i) % trail_.size()];
        if (!line.empty()) text += "\n    " + line;
    }
    return text;
}

std::vector<oracle_sequence*> world::alive() const {
    std::vector<oracle_sequence*> found;
    for (const std::unique_ptr<oracle_sequence>& sequence : sequences_) {
        if (!sequence->released) found.push_back(sequence.get());
    }
    return found;
}

void world::operated() {
    ++operations_;
    check_accounting();
}

void world::bury() {
    std::erase_if(sequences_, [](const std::unique_ptr<oracle_sequence>& sequence) {
        return sequence->released && sequence->step < 0;
    });
}

oracle_sequence* world::create(const kv_policy* policy, bool gathers) {
    note("create {}", next_serial_);
    kv_seq_config config = KV_INIT(kv_seq_config);
    config.flags = gathers ? uint32_t{KV_SEQ_GATHER_STATISTICS} : 0u;
    config.policy = policy;
    config.user_data = random_();
    kv_seq handle = 0;
    const kv_status found = kv_seq_create(pool_, &config, &handle);
    if (sequences_.size() == model_.spec.max_sequences) {
        expect_error(found, KV_LIMIT, "kv_seq_create");
        return nullptr;
    }
    if (policy != nullptr && rules_of(*policy).kind != observed_kind::nothing &&
        places_left() == 0) {
        expect_error(found, KV_LIMIT, "kv_seq_create without a place for observations");
        return nullptr;
    }
    require_ok(found, "kv_seq_create");
    auto sequence = std::make_unique<oracle_sequence>(model_.empty_sequence());
    sequence->handle = handle;
    sequence->serial = next_serial_++;
    sequence->gathers = gathers;
    sequence->user_data = config.user_data;
    sequence->has_policy = policy != nullptr;
    if (policy != nullptr) sequence->policy = *policy;
    sequences_.push_back(std::move(sequence));
    operated();
    check_sequence(*sequences_.back());
    return sequences_.back().get();
}

void world::release(oracle_sequence& target) {
    note("release {} (step {})", target.serial, target.step);
    const kv_seq handle = target.handle;
    require_ok(kv_seq_release(pool_, handle), "kv_seq_release");
    target.released = true;
    if (target.step < 0) model_.release(target);
    bury();
    operated();
    kv_seq_info info = KV_INIT(kv_seq_info);
    require_status(kv_seq_get_info(pool_, handle, &info), KV_STALE, "kv_seq_get_info, released");
    require_ok(kv_seq_release(pool_, handle), "kv_seq_release, again");
}

std::vector<oracle_sequence*> world::fork(oracle_sequence& parent, uint32_t count) {
    note("fork {} into {} from {} (step {})", parent.serial, count, next_serial_, parent.step);
    std::vector<kv_seq> handles(count, 0);
    const kv_status found = kv_seq_fork(pool_, parent.handle, count, handles.data());
    std::vector<oracle_sequence*> children;
    if (sequences_.size() + count > model_.spec.max_sequences) {
        expect_error(found, KV_LIMIT, "kv_seq_fork");
        return children;
    }
    if (rules_of(parent).kind != observed_kind::nothing && places_left() < count) {
        expect_error(found, KV_LIMIT, "kv_seq_fork without places for observations");
        return children;
    }
    require_ok(found, "kv_seq_fork");
    for (const kv_seq handle : handles) {
        auto child = std::make_unique<oracle_sequence>(model_.fork(parent));
        child->handle = handle;
        child->serial = next_serial_++;
        children.push_back(child.get());
        sequences_.push_back(std::move(child));
    }
    operated();
    for (const oracle_sequence* child : children) check_sequence(*child);
    check_sequence(parent);
    return children;
}

kv_status world::truncate(oracle_sequence& target, uint64_t tokens_seen) {
    note("truncate {} from {} to {}", target.serial, target.next_position, tokens_seen);
    const kv_status found = kv_seq_truncate(pool_, target.handle, tokens_seen);
    if (target.step >= 0) {
        expect_error(found, KV_INVALID, "kv_seq_truncate in a step");
        return found;
    }
    const kv_status expected = model_.truncate(target, tokens_seen);
    if (expected != KV_OK) {
        expect_error(found, expected, "kv_seq_truncate");
        return found;
    }
    require_ok(found, "kv_seq_truncate");
    operated();
    check_sequence(target);
    return found;
}

void world::set_policy(oracle_sequence& target, const kv_policy* policy) {
    note("policy of {}: {}", target.serial, policy != nullptr ? policy->scorer : 0);
    const kv_status found = kv_seq_set_policy(pool_, target.handle, policy);
    const observed_rules before = rules_of(target);
    if (policy != nullptr && rules_of(*policy).kind != observed_kind::nothing &&
        before.kind == observed_kind::nothing && places_left() == 0) {
        expect_error(found, KV_LIMIT, "kv_seq_set_policy without a place for observations");
        return;
    }
    require_ok(found, "kv_seq_set_policy");
    const auto ends_prompt = [](const kv_policy& one) {
        return (one.flags & KV_POLICY_AT_PROMPT_END) != 0 ? one.prompt_tokens : 0;
    };
    const uint32_t prompt = policy != nullptr ? ends_prompt(*policy) : 0;
    const uint32_t asked = target.has_policy ? ends_prompt(target.policy) : 0;
    if (prompt == 0 || prompt > target.next_position) {
        target.prompt_was_in = false;
    } else if (prompt != asked) {
        target.prompt_was_in = true;
    }
    target.has_policy = policy != nullptr;
    if (policy != nullptr) target.policy = *policy;
    if (model_.defect != mutation::kept_scores) change_rules(target, before);
    operated();
}

void world::pin(oracle_sequence& target, uint64_t first, uint64_t count) {
    note("pin {}: {} + {}", target.serial, first, count);
    const kv_status found = kv_seq_pin(pool_, target.handle, first, count);
    if (count == 0) {
        expect_error(found, KV_INVALID, "kv_seq_pin of nothing");
        return;
    }
    if (target.pins.size() == 16) {
        expect_error(found, KV_LIMIT, "kv_seq_pin");
        return;
    }
    require_ok(found, "kv_seq_pin");
    target.pins.push_back({first, count});
    operated();
}

void world::unpin(oracle_sequence& target) {
    note("unpin {}", target.serial);
    require_ok(kv_seq_unpin(pool_, target.handle), "kv_seq_unpin");
    target.pins.clear();
    operated();
}

void world::pass_fences() {
    note("pass fences");
    oracle_fences& fences = model_.fences;
    uint64_t first_open = fences.last_begun + 1;
    for (const uint64_t open : fences.open) {
        if (open != 0) first_open = std::min(first_open, open);
    }
    if (!fences.by_host) {
        expect_error(kv_pool_pass_fence(pool_, fences.last_begun + 1), KV_INVALID,
                     "kv_pool_pass_fence without host fences");
        return;
    }
    expect_error(kv_pool_pass_fence(pool_, first_open), KV_INVALID,
                 "kv_pool_pass_fence of an open or future step");
    if (first_open == 1) return;
    const uint64_t low = std::min(fences.host_passed, first_open - 1);
    const uint64_t fence = std::max<uint64_t>(1, low + below(first_open - low));
    require_ok(kv_pool_pass_fence(pool_, fence), "kv_pool_pass_fence");
    fences.host_passed = std::max(fences.host_passed, fence);
    operated();
}

}  // namespace property
