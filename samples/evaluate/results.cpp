#include "evaluate/results.hpp"

#include <fmt/format.h>

#include "evaluate/cells.hpp"
#include "report.hpp"

namespace evaluate {

namespace {

using generate::json_string;

std::string json_shares(std::span<const task_scores::ratio> of_depths) {
    std::string list;
    for (const task_scores::ratio& one : of_depths) {
        list += fmt::format("{}{}", list.empty() ? "" : ", ", json_number(one.share()));
    }
    return "[" + list + "]";
}

std::string json_of(const evaluation& done, const result& one) {
    std::string json = fmt::format(
        "{{\n"
        "      \"configuration\": {},\n"
        "      \"bytes_per_token\": {},\n"
        "      \"relative_bytes\": {},\n"
        "      \"perplexity\": {},\n"
        "      \"mean_kl\": {},\n"
        "      \"percentile_99_kl\": {},\n"
        "      \"top1_agreement\": {},\n",
        json_string(one.configuration), json_number(one.bytes_per_token),
        json_number(relative_bytes(done, one)), json_number(one.perplexity),
        json_number(one.mean_divergence), json_number(one.percentile_99_divergence),
        json_number(one.agreement));
    if (one.tasks) {
        json += fmt::format(
            "      \"needle_recall\": {},\n"
            "      \"needle_recall_by_depth\": {},\n"
            "      \"copy_accuracy\": {},\n"
            "      \"copy_accuracy_by_depth\": {},\n",
            json_number(one.tasks->all_needles().share()), json_shares(one.tasks->needle),
            json_number(one.tasks->all_copied().share()), json_shares(one.tasks->copy));
    }
    return json + fmt::format("      \"seconds\": {}\n    }}", json_number(one.seconds));
}

std::vector<std::string> cells_of(const evaluation& done, const result& one) {
    std::vector<std::string> cells = {
        one.configuration,
        fmt::format("{:.0f}", one.bytes_per_token),
        fmt::format("{:.3f}", relative_bytes(done, one)),
        fmt::format("{:.3f}", one.perplexity),
        short_number(one.mean_divergence),
        short_number(one.percentile_99_divergence),
        percent(one.agreement),
    };
    if (one.tasks) {
        const task_scores::ratio needles = one.tasks->all_needles();
        cells.push_back(fmt::format("{} of {}", needles.right, needles.all));
        cells.push_back(percent(one.tasks->all_copied().share()));
    }
    return cells;
}

}  // namespace

double relative_bytes(const evaluation& done, const result& one) {
    return one.bytes_per_token / done.reference.bytes_per_token;
}

std::string table(const evaluation& done) {
    std::vector<std::vector<std::string>> rows = {{"stored as", "bytes per token", "of f16's",
                                                   "perplexity", "mean KL", "99th percentile KL",
                                                   "top-1 agreement"}};
    if (done.reference.tasks) {
        rows.front().insert(rows.front().end(), {"needles recalled", "copied right"});
    }
    for (const result& one : done.results) {
        rows.push_back(cells_of(done, one));
    }
    return markdown_table(rows, 1);
}

std::string report(const evaluation& done) {
    std::string json = fmt::format(
        "{{\n"
        "  \"model\": {},\n"
        "  \"text\": {},\n"
        "  \"tokens\": {},\n"
        "  \"scored\": {},\n"
        "  \"window\": {},\n"
        "  \"chunk\": {},\n"
        "  \"task_contexts\": {},\n"
        "  \"task_context_tokens\": {},\n"
        "  \"task_depths\": [{}],\n"
        "  \"reference\": {},\n"
        "  \"results\": [",
        json_string(done.model), json_string(done.text), done.tokens, done.scored, done.window,
        done.chunk, done.contexts, done.context_tokens, fmt::join(depths, ", "),
        json_of(done, done.reference));
    for (const result& one : done.results) {
        json +=
            fmt::format("{}\n    {}", &one == done.results.data() ? "" : ",", json_of(done, one));
    }
    return json + "\n  ]\n}\n";
}

}  // namespace evaluate
