#include "evaluate/retention_writing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "sampler.hpp"

namespace evaluate {

namespace {

using generate::token_id;

constexpr std::size_t repeated_run = 4;  // tokens

struct writer {
    cached_sequence sequence;
    std::vector<token_id> written;
};

token_id likeliest_but(std::optional<token_id> end, std::span<const float> logits,
                       std::vector<float>& room) {
    if (!end || *end >= logits.size()) {
        return generate::greedy_token(logits);
    }
    room.assign(logits.begin(), logits.end());
    room[*end] = -std::numeric_limits<float>::infinity();
    return generate::greedy_token(room);
}

// The writers of one prompt, which has been read and is continued with `first`.
outcome<std::vector<writer>> begin_writers(retention_caches& caches, const family& members,
                                           std::size_t prompt, std::size_t length, token_id first,
                                           std::span<const contender> contenders,
                                           std::uint64_t seed) {
    std::vector<writer> writers;
    for (const contender& one : contenders) {
        const cached_sequence& parent = members.parent_of(*one.method);
        if (one.method->keeps_all()) {
            const auto child = caches.all()[parent.cache].fork(parent.sequence, 1);
            if (!child) {
                return child.failure();
            }
            writers.push_back({{parent.cache, child->front()}, {first}});
            continue;
        }
        const std::uint32_t budget = caches.tokens_of(one, prompt + length);
        const auto policy = policy_of(*one.method, budget, static_cast<std::uint32_t>(prompt),
                                      writing_interval, seed);
        const auto fork = caches.fork(parent, policy, prompt > budget);
        if (!fork) {
            return fork.failure();
        }
        writers.push_back({*fork, {first}});
    }
    return writers;
}

}  // namespace

double repeated_share(std::span<const token_id> tokens, std::size_t length) {
    if (tokens.size() < length) {
        return 0;
    }
    std::set<std::vector<token_id>> seen;
    const std::size_t runs = tokens.size() - length + 1;
    for (std::size_t i = 0; i < runs; ++i) {
        const auto run = tokens.subspan(i, length);
        seen.emplace(run.begin(), run.end());
    }
    return static_cast<double>(runs - seen.size()) / static_cast<double>(runs);
}

outcome<std::vector<std::vector<written_text>>> write_texts(
    const generate::llama_model& model, std::span<const std::vector<token_id>> prompts,
    std::size_t length, std::optional<token_id> end, std::span<const contender> contenders,
    const retention_options& options, const observe_writing& observe) {
    std::vector<std::vector<written_text>> texts(contenders.size());
    if (length == 0) {
        return texts;
    }
    std::size_t longest = 0;
    for (const auto& prompt : prompts) {
        longest = std::max(longest, prompt.size());
    }
    retention_room room;
    room.tokens = longest + length;
    room.forks = (contenders.size() + family_size(contenders)) * prompts.size();
    room.rows = std::max<std::size_t>(contenders.size() * prompts.size(), options.chunk);
    if (room.tokens > model.config.context) {
        return error{fmt::format("texts of {} tokens, the model takes {}", room.tokens,
                                 model.config.context)};
    }
    auto caches = retention_caches::create(model, contenders, options, room);
    if (!caches) {
        return caches.failure();
    }
    generate::set_matrix_threads(static_cast<int>(options.threads));
    batch_reader reader(model, caches->all(), room.rows);
    std::vector<float> logits_room;

    std::vector<writer> writers;  // [prompts][contenders]
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        const auto members = caches->create_family();
        if (!members) {
            return members.failure();
        }
        const auto prompt = std::span<const token_id>(prompts[i]);
        const auto others = members->others();
        if (auto done = read_in_chunks(reader, members->full(), others,
                                       prompt.first(prompt.size() - 1), options.chunk);
            !done) {
            return done.failure();
        }
        const batch_item last = {members->full(), others, prompt.last(1), 0, 1};
        const auto logits = reader.read({&last, 1});
        if (!logits) {
            return logits.failure();
        }
        auto made = begin_writers(*caches, *members, prompt.size(), length,
                                  likeliest_but(end, *logits, logits_room), contenders, 1 + i);
        if (!made) {
            return made.failure();
        }
        writers.insert(writers.end(), made->begin(), made->end());
        if (auto done = caches->release(*members); !done) {
            return done.failure();
        }
    }

    std::vector<batch_item> items(writers.size());
    for (std::size_t written = 1; written < length; ++written) {
        for (std::size_t i = 0; i < writers.size(); ++i) {
            items[i] = {writers[i].sequence, {}, std::span(writers[i].written).last(1), 0, 1};
        }
        auto done = read_all(
            reader, items,
            [&](std::size_t first, std::size_t count,
                std::span<const float> logits) -> outcome<nothing> {
                for (std::size_t i = 0; i < count; ++i) {
                    const auto row = logits.subspan(i * reader.vocabulary(), reader.vocabulary());
                    writers[first + i].written.push_back(likeliest_but(end, row, logits_room));
                }
                return nothing{};
            });
        if (!done) {
            return done.failure();
        }
        if (written % 64 == 0) {
            observe(written, length);
        }
    }
    for (std::size_t i = 0; i < writers.size(); ++i) {
        written_text text = {std::move(writers[i].written), 0};
        text.repeated = repeated_share(text.tokens, repeated_run);
        texts[i % contenders.size()].push_back(std::move(text));
    }
    return texts;
}

}  // namespace evaluate
