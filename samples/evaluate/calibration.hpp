// Constants of a model, of keys or queries, that are measured beforehand: on a part of the
// text that is not scored, with a cache in f16, as an engine would measure them once for a model.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "evaluate/configuration.hpp"
#include "llama.hpp"

namespace evaluate {

using generate::channel_constants;

// How many tokens they are measured on.
inline constexpr std::uint32_t calibration_tokens = 1024;

// Whether one of the configurations needs them.
bool needs_key_channels(std::span<const configuration> configurations);

// One a layer, from reading `tokens` as one sequence, `chunk` of them a step.
outcome<std::vector<channel_constants>> measure_key_channels(
    const generate::llama_model& model, std::span<const generate::token_id> tokens,
    std::uint32_t chunk, std::uint32_t threads);

// The same for what methods of eviction want to know of queries.
outcome<std::vector<generate::query_statistics>> measure_queries(
    const generate::llama_model& model, std::span<const generate::token_id> tokens,
    std::uint32_t chunk, std::uint32_t threads);

}  // namespace evaluate
