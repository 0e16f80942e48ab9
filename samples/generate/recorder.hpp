// Recording: what some layers of the model hand to the cache, and get back, as a trace that
// programs without the model can replay (docs/trace.md).
//
// The recorder stands between the forward pass and the cache. Recorded layers hand over queries,
// keys and values rounded to f16, so that the trace holds exactly what the library got.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv_cache.hpp"
#include "llama.hpp"
#include "outcome.hpp"
#include "trace/output_file.hpp"
#include "trace/trace.hpp"

namespace generate {

class trace_recorder : public attention_cache {
  public:
    // Opens the file at once, so that one that cannot be written is noticed before the model runs.
    static outcome<std::unique_ptr<trace_recorder>> open(const std::string& path);

    // `layers` ascending; empty: two, after a quarter and three quarters of the model.
    outcome<nothing> describe_model(const llama_config& config,
                                    std::span<const std::uint32_t> layers);

    // One sequence of the cache from its creation on. The policy, but its prompt_tokens, and the
    // format are the same for all requests. The cache must stay where it is until end_request.
    void begin_request(kv_cache& cache, const kv_policy& policy, std::uint32_t format);
    void begin_turn(std::span<const token_id> tokens);
    outcome<nothing> attend(std::uint32_t layer, const attention_rows& rows) override;
    void end_turn(std::size_t accepted);
    outcome<nothing> end_request(kv_seq sequence);

    // Writes the file. Without it there is none.
    outcome<nothing> save();

    const trace::recording& content() const { return content_; }

  private:
    explicit trace_recorder(const std::string& path) : file_(path) {}

    outcome<std::vector<std::uint16_t>> rounded(const float* first, const attention_rows& rows,
                                                std::size_t row_size, std::uint32_t layer) const;

    trace::output_file file_;
    trace::recording content_;
    kv_cache* cache_ = nullptr;
};

}  // namespace generate
