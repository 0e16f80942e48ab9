// Tasks that need the cache: things hidden in real text, asked for at its end.
//
// A context is text with two passages at each of several depths. One tells a number that belongs to
// a name (the needle), the other a list of words. At the end stands the beginning of a passage once
// more, and the model is to continue as the passage did. No name and no word is in two passages of
// a context: the beginning says which one is meant.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "evaluate/configuration.hpp"
#include "llama.hpp"
#include "tokenizer.hpp"

namespace evaluate {

// Where passages lie, in percent of the context's length.
inline constexpr std::array<std::uint32_t, 5> depths = {10, 30, 50, 70, 90};

enum class task { needle, copy };

// One question about a context.
struct probe {
    task kind;
    std::size_t depth;                    // index in `depths`
    std::vector<generate::token_id> cue;  // what is read behind the context
    std::vector<generate::token_id> answer;
};

struct task_context {
    std::vector<generate::token_id> tokens;
    std::vector<probe> probes;
    // Asks for the numbers of all names at once: what is read behind the context before the cues of
    // the needles and their answers, one after the other.
    std::vector<generate::token_id> joint_cue;
};

// About `length` tokens of text, taken from its lines beginning with the one at or behind byte
// `offset`. Passages are drawn by `seed`. An error if the text ends before.
outcome<task_context> make_context(const generate::tokenizer& words, std::string_view text,
                                   std::size_t offset, std::size_t length, std::uint64_t seed);

// By depth: of the needles, how many were told whole; of the copied tokens, how many were right.
struct task_scores {
    struct ratio {
        std::uint64_t right = 0;
        std::uint64_t all = 0;

        double share() const;
    };

    std::array<ratio, depths.size()> needle;
    std::array<ratio, depths.size()> copy;

    ratio all_needles() const;
    ratio all_copied() const;

    // `likeliest` are the tokens that the model found likeliest at each place of the answer, having
    // read the right ones before it. So a needle is told whole exactly if a greedy continuation of
    // the cue begins with it; a copied word that is wrong does not spoil those behind it.
    void add(const probe& asked, std::span<const generate::token_id> likeliest);
};

struct task_options {
    std::uint32_t chunk = 128;
    std::uint32_t threads = 0;                              // 0: one per processor
    std::vector<generate::channel_constants> key_channels;  // one a layer, where keys take them
};

// Reads each context once, then every probe behind it on a fork of its sequence, token by token and
// all probes of the context in one batch.
outcome<task_scores> run_tasks(const generate::llama_model& model,
                               std::span<const task_context> contexts, const configuration& one,
                               const task_options& options);

}  // namespace evaluate
