#include "evaluate/endless_results.hpp"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "evaluate/cells.hpp"
#include "report.hpp"

namespace evaluate {

namespace {

using generate::json_string;

// NaN of nothing.
double mean(double sum, std::uint64_t count) { return sum / static_cast<double>(count); }
double perplexity(double loss, std::uint64_t count) { return std::exp(mean(loss, count)); }

std::vector<std::string> cells_of(const endless_stretch& one) {
    std::vector<std::string> cells = {fmt::format("{}", one.end),
                                      fmt::format("{:.3f}", perplexity(one.loss, one.scored))};
    if (one.compared == 0) {
        cells.insert(cells.end(), 4, "-");
    } else {
        cells.push_back(fmt::format("{}", one.compared));
        cells.push_back(fmt::format("{:.3f}", perplexity(one.compared_loss, one.compared)));
        cells.push_back(fmt::format("{:.3f}", perplexity(one.first_loss, one.compared)));
        cells.push_back(short_number(mean(one.difference, one.compared)));
    }
    cells.push_back(fmt::format("{:.2f} MiB", static_cast<double>(one.most_bytes) / (1u << 20)));
    return cells;
}

std::string json_of(const endless_stretch& one) {
    return fmt::format(
        "    {{\"end\": {}, \"scored\": {}, \"perplexity\": {}, \"compared\": {}, "
        "\"compared_perplexity\": {}, \"first_pass_perplexity\": {}, \"mean_difference\": {}, "
        "\"most_bytes\": {}}}",
        one.end, one.scored, json_number(perplexity(one.loss, one.scored)), one.compared,
        json_number(perplexity(one.compared_loss, one.compared)),
        json_number(perplexity(one.first_loss, one.compared)),
        json_number(mean(one.difference, one.compared)), one.most_bytes);
}

}  // namespace

std::string table(const endless_found& found) {
    std::vector<std::vector<std::string>> rows = {{"tokens read", "perplexity", "tokens compared",
                                                   "their perplexity", "in the first pass",
                                                   "mean difference, nats", "bytes at most"}};
    for (const endless_stretch& one : found.scores.stretches) {
        rows.push_back(cells_of(one));
    }
    return markdown_table(rows, 0);
}

std::string report(const endless_found& found) {
    const endless_options& options = found.options;
    std::string json = fmt::format(
        "{{\n"
        "  \"model\": {},\n"
        "  \"text\": {},\n"
        "  \"positions\": \"{}\",\n"
        "  \"budget\": {},\n"
        "  \"sinks\": {},\n"
        "  \"chunk\": {},\n"
        "  \"score_every\": {},\n"
        "  \"tokens\": {},\n"
        "  \"pass_tokens\": {},\n"
        "  \"blocks_returned\": {},\n"
        "  \"bytes_returned\": {},\n"
        "  \"seconds\": {:.1f},\n"
        "  \"stretches\": [",
        json_string(found.model), json_string(found.text),
        options.cache_positions ? "cache" : "text", options.budget, options.sinks, options.chunk,
        options.score_every, options.tokens, found.scores.pass_tokens, found.scores.blocks_returned,
        found.scores.bytes_returned, found.seconds);
    for (const endless_stretch& one : found.scores.stretches) {
        json +=
            fmt::format("{}\n{}", &one == found.scores.stretches.data() ? "" : ",", json_of(one));
    }
    return json + "\n  ]\n}\n";
}

}  // namespace evaluate
