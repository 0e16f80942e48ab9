#include "results.hpp"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <span>

#include "library.hpp"

namespace batching {

namespace {

// The kernels of another machine may round otherwise. A NaN is near nothing.
bool near(float found, float expected) {
    const double distance = std::fabs(static_cast<double>(found) - static_cast<double>(expected));
    return distance <= 1e-5 + 1e-5 * std::fabs(static_cast<double>(expected));
}

}  // namespace

void results::compare(std::size_t request, const trace::turn& turn, std::size_t layer,
                      const float* first) {
    request_result& result = requests_[request];
    if (layer == 0) {
        result.rows += turn.rows();
        result.dropped += turn.rows() - turn.accepted;
    }
    const std::vector<float>& expected = turn.layers[layer].outputs;
    const std::size_t skipped = (turn.rows() - turn.output_rows) * expected_.query_size();
    const std::span<const float> found(first + skipped, expected.size());
    result.checksum.add(std::as_bytes(found));
    result.equal = result.equal && std::equal(found.begin(), found.end(), expected.begin(), near);
}

void results::finish(std::size_t request, kv_pool* pool, kv_seq sequence) {
    const trace::request& expected = expected_.requests[request];
    request_result& result = requests_[request];
    kv_seq_info info = KV_INIT(kv_seq_info);
    check(kv_seq_get_info(pool, sequence, &info));
    result.seen = info.accepted;
    result.rounds = info.compactions;
    result.blocks = info.blocks;
    result.equal = result.equal && result.seen == expected.seen && result.rounds == expected.rounds;
    for (std::size_t layer = 0; layer < expected.retained.size(); ++layer) {
        kv_seq_layer_info of_layer = KV_INIT(kv_seq_layer_info);
        check(kv_seq_get_layer_info(pool, sequence, static_cast<std::uint32_t>(layer), &of_layer));
        result.retained += of_layer.retained;
        result.equal = result.equal && of_layer.retained == expected.retained[layer];
    }
}

void results::end(kv_pool* pool) { check(kv_pool_get_stats(pool, &totals_)); }

bool results::all_equal() const {
    return std::all_of(requests_.begin(), requests_.end(),
                       [](const request_result& result) { return result.equal; });
}

void results::print(std::FILE* target) const {
    std::fprintf(target,
                 "request prompt  rows dropped  seen retained rounds blocks checksum         "
                 "outputs\n");
    for (std::size_t i = 0; i < requests_.size(); ++i) {
        const request_result& result = requests_[i];
        std::fprintf(target,
                     "%7zu %6" PRIu32 " %5" PRIu64 " %7" PRIu64 " %5" PRIu64 " %8" PRIu64
                     " %6" PRIu64 " %6" PRIu64 " %016" PRIx64 " %s\n",
                     i, expected_.requests[i].prompt_tokens, result.rows, result.dropped,
                     result.seen, result.retained, result.rounds, result.blocks,
                     result.checksum.value(), result.equal ? "equal" : "DIFFERENT");
    }
    std::fprintf(target,
                 "steps %" PRIu64 ", tokens %" PRIu64 ", rounds %" PRIu64
                 ", blocks at most %" PRIu64 ", returned %" PRIu64 ", bytes returned %" PRIu64 "\n",
                 steps_, totals_.tokens_accepted, totals_.compactions, totals_.peak_live_blocks,
                 totals_.blocks_returned, totals_.bytes_returned);
}

}  // namespace batching
