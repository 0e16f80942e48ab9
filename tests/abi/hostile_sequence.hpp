// A pool whose sequences are attacked with wrong input.
#pragma once

#include "abi/world.hpp"

namespace abi {

inline constexpr uint64_t absent_index = 9;  // small_config has 8 sequences

inline kv_policy good_policy() {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 16;
    return policy;
}

/// A pool with a sequence of 40 tokens, an empty one and handles that lead nowhere.
struct populated {
    live_pool pool;
    kv_seq full, empty, stale;
    target attacked;

    explicit populated(const kv_pool_config& config = small_config()) : pool(config) {
        full = pool.create_sequence();
        empty = pool.create_sequence();
        stale = pool.create_sequence();
        REQUIRE(kv_seq_release(pool, stale) == KV_OK);
        pool.append(full, 40);
        attacked = {pool, {full, empty}};
    }

    /// Calls `call(handle)` with every handle that must be refused.
    template <class callable>
    void refuses_handles(const callable& call) const {
        REFUSES(attacked, KV_STALE, "seq", call(stale));
        for (const kv_seq wrong : {kv_seq{0}, kv_seq{1}, kv_seq{UINT32_MAX}, kv_seq{1} << 32,
                                   full & 0xffffffffu, (kv_seq{1} << 32) | absent_index,
                                   (kv_seq{UINT32_MAX} << 32) | UINT32_MAX, UINT64_MAX - 1}) {
            CAPTURE(wrong);
            REFUSES(attacked, KV_INVALID, "seq", call(wrong));
        }
        // A generation that the index does not have now.
        REFUSES(attacked, KV_STALE, "seq", call(full + (kv_seq{1} << 32)));
    }
};

}  // namespace abi
