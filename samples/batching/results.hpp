// What a replay came to: each request compared with the recording, and the table of docs/trace.md.
#pragma once

#include <kvrt/kvrt.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "trace/checksum.hpp"
#include "trace/trace.hpp"

namespace batching {

class results {
  public:
    // The trace must outlive the object.
    explicit results(const trace::recording& expected)
        : expected_(expected), requests_(expected.requests.size()) {}

    // The outputs of a turn in a layer, all its rows from `first` on: [rows, query_heads,
    // head_dim].
    void compare(std::size_t request, const trace::turn& turn, std::size_t layer,
                 const float* first);
    // The sequence as its last turn left it.
    void finish(std::size_t request, kv_pool* pool, kv_seq sequence);
    void count_step() { ++steps_; }
    // The pool, with all sequences released.
    void end(kv_pool* pool);

    bool all_equal() const;
    void print(std::FILE* target) const;

  private:
    struct request_result {
        std::uint64_t rows = 0;
        std::uint64_t dropped = 0;
        std::uint64_t seen = 0;
        std::uint64_t retained = 0;  // sum over layers
        std::uint64_t rounds = 0;
        std::uint64_t blocks = 0;
        trace::checksum checksum;  // of the outputs
        bool equal = true;
    };

    const trace::recording& expected_;
    std::vector<request_result> requests_;
    std::uint64_t steps_ = 0;
    kv_pool_stats totals_ = KV_INIT(kv_pool_stats);
};

}  // namespace batching
