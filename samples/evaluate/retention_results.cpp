#include "evaluate/retention_results.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "evaluate/cells.hpp"
#include "report.hpp"

namespace evaluate {

namespace {

using generate::json_string;

task_scores::ratio sum(std::span<const tasks_found> tasks, task_answers tasks_found::*answers,
                       task_scores::ratio (task_scores::*which)() const) {
    task_scores::ratio all;
    for (const tasks_found& one : tasks) {
        const task_scores::ratio part = ((one.*answers).scores.*which)();
        all.right += part.right;
        all.all += part.all;
    }
    return all;
}

std::string json_shares(std::span<const task_scores::ratio> of_depths) {
    std::string list;
    for (const task_scores::ratio& one : of_depths) {
        list += fmt::format("{}{}", list.empty() ? "" : ", ", json_number(one.share()));
    }
    return "[" + list + "]";
}

std::string json_of(const logits_found& one) {
    return fmt::format(
        "{{\"scored\": {}, \"perplexity\": {}, \"reference_perplexity\": {}, \"mean_kl\": {}, "
        "\"percentile_99_kl\": {}, \"top1_agreement\": {}, \"steady_bytes\": {}, "
        "\"peak_bytes\": {}}}",
        one.scored, json_number(one.perplexity), json_number(one.reference_perplexity),
        json_number(one.mean_divergence), json_number(one.percentile_99_divergence),
        json_number(one.agreement), json_number(one.steady_bytes), json_number(one.peak_bytes));
}

std::string json_of(const task_answers& answers) {
    const task_scores& one = answers.scores;
    return fmt::format(
        "{{\"needle_recall\": {}, \"needle_recall_by_depth\": {}, \"copy_accuracy\": {}, "
        "\"copy_accuracy_by_depth\": {}, \"answer_loss\": {}}}",
        json_number(one.all_needles().share()), json_shares(one.needle),
        json_number(one.all_copied().share()), json_shares(one.copy),
        json_number(answers.mean_loss()));
}

std::string json_of(const contender_found& one) {
    std::string json = fmt::format("    {{\n      \"method\": {},\n      \"budget_percent\": {}",
                                   json_string(one.method), json_number(one.percent));
    if (one.text) {
        json += fmt::format(",\n      \"text\": {}", json_of(*one.text));
    }
    if (!one.tasks.empty()) {
        json += ",\n      \"tasks\": [";
        for (const tasks_found& of_length : one.tasks) {
            json += fmt::format(
                "{}\n        {{\"context_tokens\": {},\n         \"question_unseen\": {},\n"
                "         \"question_seen\": {}",
                &of_length == one.tasks.data() ? "" : ",", of_length.context_tokens,
                json_of(of_length.unseen), json_of(of_length.seen));
            if (of_length.unseen_together.tokens != 0) {
                json += fmt::format(
                    ",\n         \"together_unseen\": {},\n         \"together_seen\": {}",
                    json_of(of_length.unseen_together), json_of(of_length.seen_together));
            }
            json += "}";
        }
        json += "]";
    }
    if (one.drift) {
        std::string repeated;
        for (const double share : one.repeated_by_prompt) {
            repeated += fmt::format("{}{}", repeated.empty() ? "" : ", ", json_number(share));
        }
        json += fmt::format(
            ",\n      \"drift\": {},\n      \"repeated\": {},\n      \"repeated_by_prompt\": [{}]",
            json_of(*one.drift), json_number(one.repeated), repeated);
    }
    return json + "\n    }";
}

std::string ratio(const task_scores::ratio& one) {
    return fmt::format("{} of {}", one.right, one.all);
}

std::vector<std::string> cells_of(const contender_found& one, bool together) {
    std::vector<std::string> cells = {fmt::format("{:g} %", one.percent), one.method};
    if (one.text) {
        cells.insert(
            cells.end(),
            {percent(one.text->steady_bytes, 1), percent(one.text->peak_bytes, 1),
             fmt::format("{:.2f}", one.text->perplexity), short_number(one.text->mean_divergence),
             short_number(one.text->percentile_99_divergence), percent(one.text->agreement, 1)});
    }
    if (!one.tasks.empty()) {
        for (const bool seen : {false, true}) {
            cells.push_back(ratio(one.needles(seen)));
            cells.push_back(percent(one.copied(seen).share(), 1));
            cells.push_back(fmt::format("{:.2f}", one.answer_loss(seen)));
        }
        for (const bool seen : {false, true}) {
            if (together) {
                cells.push_back(ratio(one.needles_together(seen)));
            }
        }
    }
    if (one.drift) {
        cells.push_back(short_number(one.drift->mean_divergence));
        cells.push_back(percent(one.repeated, 1));
    }
    return cells;
}

}  // namespace

task_scores::ratio contender_found::needles(bool seen) const {
    return sum(tasks, seen ? &tasks_found::seen : &tasks_found::unseen, &task_scores::all_needles);
}

task_scores::ratio contender_found::needles_together(bool seen) const {
    return sum(tasks, seen ? &tasks_found::seen_together : &tasks_found::unseen_together,
               &task_scores::all_needles);
}

task_scores::ratio contender_found::copied(bool seen) const {
    return sum(tasks, seen ? &tasks_found::seen : &tasks_found::unseen, &task_scores::all_copied);
}

double contender_found::answer_loss(bool seen) const {
    task_answers all;
    for (const tasks_found& one : tasks) {
        const task_answers& part = seen ? one.seen : one.unseen;
        all.loss += part.loss;
        all.tokens += part.tokens;
    }
    return all.mean_loss();
}

std::string table(const retention_found& found) {
    std::vector<std::vector<std::string>> rows = {{"budget", "method"}};
    if (found.windows != 0) {
        rows.front().insert(rows.front().end(), {"bytes", "peak", "perplexity", "mean KL",
                                                 "99th percentile KL", "top-1 agreement"});
    }
    if (found.contexts != 0) {
        rows.front().insert(rows.front().end(),
                            {"needles, unseen", "copied, unseen", "nats, unseen", "needles, seen",
                             "copied, seen", "nats, seen"});
    }
    if (found.together) {
        rows.front().insert(rows.front().end(),
                            {"needles together, unseen", "needles together, seen"});
    }
    if (found.prompts != 0) {
        rows.front().insert(rows.front().end(), {"drift KL", "repeated"});
    }
    for (const contender_found& one : found.contenders) {
        rows.push_back(cells_of(one, found.together));
    }
    return markdown_table(rows, 2);
}

std::string report(const retention_found& found) {
    std::string json = fmt::format(
        "{{\n"
        "  \"model\": {},\n"
        "  \"text\": {},\n"
        "  \"stored\": {},\n"
        "  \"window\": {},\n"
        "  \"windows\": {},\n"
        "  \"chunk\": {},\n"
        "  \"task_contexts\": {},\n"
        "  \"task_context_tokens\": [{}],\n"
        "  \"task_depths\": [{}],\n"
        "  \"prompts\": {},\n"
        "  \"written\": {},\n"
        "  \"seconds\": {{\"text\": {:.1f}, \"tasks\": {:.1f}, \"writing\": {:.1f}}},\n"
        "  \"contenders\": [",
        json_string(found.model), json_string(found.text), json_string(found.stored), found.window,
        found.windows, found.chunk, found.contexts, fmt::join(found.context_tokens, ", "),
        fmt::join(depths, ", "), found.prompts, found.written, found.text_seconds,
        found.task_seconds, found.writing_seconds);
    for (const contender_found& one : found.contenders) {
        json += fmt::format("{}\n{}", &one == found.contenders.data() ? "" : ",", json_of(one));
    }
    return json + "\n  ]\n}\n";
}

}  // namespace evaluate
