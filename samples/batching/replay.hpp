// An engine with continuous batching, whose model is a trace: prompts, decode tokens and drafts of
// several requests in one step, as many requests at once as there are slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "library.hpp"
#include "results.hpp"
#include "trace/trace.hpp"

namespace batching {

struct limits {
    std::uint32_t slots = 3;
    std::uint32_t arena_mib = 8;
    std::uint32_t threads = 1;
};

class replay {
  public:
    // The trace and the results must outlive the object.
    replay(const trace::recording& model, const limits& given, results& found);

    // Until all requests are done.
    void run();

  private:
    // A request with a slot: oldest first in `running_`.
    struct running_request {
        std::size_t index;
        kv_seq sequence;
        std::size_t next_turn;
    };

    const trace::turn& turn_of(const running_request& one) const {
        return model_.requests[one.index].turns[one.next_turn];
    }
    void admit();
    void step();
    void gather();
    void reserve(kv_step* step);
    void run_layer(kv_step* step, std::size_t layer);
    void retire();

    const trace::recording& model_;
    results& found_;
    pool_handle pool_;
    std::size_t slots_ = 0;
    std::size_t waiting_ = 0;  // the next request to get a slot
    std::vector<running_request> running_;

    // Of one step, in the order of the rows; capacities are the pool's limits, so that nothing is
    // allocated while it runs.
    std::vector<kv_seq> sequences_;
    std::vector<std::uint32_t> counts_;
    std::vector<std::uint32_t> accepted_;
    std::vector<std::uint32_t> token_ids_;

    // What the model computes for a layer: [rows, heads, head_dim].
    std::vector<std::uint16_t> queries_, keys_, values_;  // f16
    std::vector<float> outputs_;
};

}  // namespace batching
