// Writing a text: prefill in chunks, then token by token, each forward pass one step of the cache.
// With drafts, a pass takes several tokens: the newest, and behind it guesses of the next ones, of
// which those stay that the sampler would have picked.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llama.hpp"
#include "outcome.hpp"
#include "recorder.hpp"
#include "tokenizer.hpp"

namespace generate {

// What the user says next: its words, and its tokens with the template's around them.
struct turn {
    std::string text;
    std::vector<token_id> tokens;
};

struct writing_options {
    std::uint32_t tokens = 200;   // to write at most
    std::string policy = "full";  // full, triattention, streaming, key-norm, random
    std::uint32_t budget = 512;   // tokens retained per layer and head after a round
    std::uint32_t every = 128;    // tokens between rounds
    std::string format = "f16";   // f16, bf16, f32
    std::string preset = "none";  // none, near-lossless, balanced, smallest
    std::string device = "cpu";   // cpu, cuda: where the cache is
    std::uint64_t seed = 1;
    double temperature = 0.0;
    double top_p = 0.95;
    double repeat_penalty = 1.0;
    std::uint32_t threads = 0;     // 0: one per processor
    std::uint32_t chunk = 128;     // tokens of the prompt in a step
    std::uint32_t drafts = 0;      // at most so many in a step
    bool evict_prompt = false;     // a policy may drop tokens of the prompt too
    bool cache_positions = false;  // rotate by places in the cache, so that it alone is to fit
    // What is asked where the model ends its answer before `tokens` are written.
    std::vector<turn> follow_ups;
    bool stop_at_end = true;  // or write on behind the last turn: its end is never drawn
};

// Names that the options accept.
inline constexpr std::string_view policy_names[] = {"full", "triattention", "streaming", "key-norm",
                                                    "random"};
inline constexpr std::string_view format_names[] = {"f16", "bf16", "f32"};
inline constexpr std::string_view preset_names[] = {"none", "near-lossless", "balanced",
                                                    "smallest"};
inline constexpr std::string_view device_names[] = {"cpu", "cuda"};

// What is known after each written token.
struct writing_progress {
    std::uint32_t written;
    std::uint32_t wanted;
    double tokens_per_second;
    std::uint64_t live_bytes;  // of the cache
    std::string_view bytes;    // of the newest token: may end inside a UTF-8 character
};

struct writing_result {
    std::string policy;
    std::string format;
    std::uint32_t prompt_tokens = 0;  // all that the model was given, follow-ups included
    std::uint32_t generated_tokens = 0;
    std::uint32_t drafted_tokens = 0;   // guesses that were verified
    std::uint32_t accepted_drafts = 0;  // of those, right
    std::uint64_t peak_blocks = 0;
    std::uint64_t final_blocks = 0;
    std::uint64_t blocks_returned = 0;  // to the allocator, while the text was being written
    std::uint64_t bytes_returned = 0;
    std::uint64_t final_bytes = 0;
    double tokens_per_second = 0;         // of writing, without the prompt
    std::vector<std::uint64_t> retained;  // tokens per layer, at the end
    std::string text;
};

// `observe` may be empty. The recorder may be NULL; it gets the text as a request.
outcome<writing_result> write_text(const llama_model& model, const tokenizer& words,
                                   std::span<const token_id> prompt, const writing_options& options,
                                   const std::function<void(const writing_progress&)>& observe,
                                   trace_recorder* recorder = nullptr);

}  // namespace generate
