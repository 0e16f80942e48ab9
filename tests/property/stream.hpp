// A seeded random stream of operations over one pool and its oracle: sequences come and go, grow by
// prefill chunks, single tokens and drafts in up to two open steps, fork at any offset, truncate,
// compress, pin, are cancelled and released in the middle, and run the pool full.
#pragma once

#include "world.hpp"

namespace property {

struct stream_options {
    uint64_t seed = 1;
    uint64_t operations = 1000;
    content filling = content::real_numbers;
    mutation defect = mutation::none;
};

struct stream_result {
    uint64_t operations = 0;
    uint64_t attention_rows = 0;
    uint64_t bytes_compared = 0;
    uint64_t rounds = 0;         // compactions that removed something
    uint64_t scored_rounds = 0;  // by what was observed, or the host gave
    uint64_t again = 0;          // reserves that the pool was too full for
    uint64_t cancelled = 0;
    uint64_t tokens = 0;
};

/// Runs until `operations` are done. A mismatch is thrown with its place in the stream.
stream_result run_stream(const pool_spec& spec, const stream_options& options);

/// A random policy that suits the pool.
kv_policy random_policy(world& world);

}  // namespace property
