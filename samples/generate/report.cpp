#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>

#include "unicode.hpp"

namespace generate {

std::string json_string(std::string_view text) {
    std::string quoted = "\"";
    for (const char character : valid_utf8(text)) {
        switch (character) {
            case '"':
                quoted += "\\\"";
                break;
            case '\\':
                quoted += "\\\\";
                break;
            case '\n':
                quoted += "\\n";
                break;
            case '\t':
                quoted += "\\t";
                break;
            default:
                if (static_cast<unsigned char>(character) < 0x20) {
                    quoted += fmt::format("\\u{:04x}", static_cast<unsigned>(character));
                } else {
                    quoted += character;
                }
        }
    }
    return quoted + "\"";
}

std::string report_json(std::span<const writing_result> runs) {
    std::string json = "[";
    for (const writing_result& run : runs) {
        json += json.size() > 1 ? ",\n" : "\n";
        std::string retained;
        for (const std::uint64_t count : run.retained) {
            retained += fmt::format("{}{}", retained.empty() ? "" : ", ", count);
        }
        json += fmt::format(
            "  {{\n"
            "    \"policy\": {},\n"
            "    \"format\": {},\n"
            "    \"prompt_tokens\": {},\n"
            "    \"generated_tokens\": {},\n"
            "    \"drafted_tokens\": {},\n"
            "    \"accepted_drafts\": {},\n"
            "    \"retained_per_layer\": [{}],\n"
            "    \"peak_blocks\": {},\n"
            "    \"final_blocks\": {},\n"
            "    \"final_bytes\": {},\n"
            "    \"blocks_returned\": {},\n"
            "    \"bytes_returned\": {},\n"
            "    \"tokens_per_second\": {:.3f},\n"
            "    \"text\": {}\n"
            "  }}",
            json_string(run.policy), json_string(run.format), run.prompt_tokens,
            run.generated_tokens, run.drafted_tokens, run.accepted_drafts, retained,
            run.peak_blocks, run.final_blocks, run.final_bytes, run.blocks_returned,
            run.bytes_returned, run.tokens_per_second, json_string(run.text));
    }
    return json + "\n]\n";
}

outcome<nothing> write_report(const std::string& path, std::span<const writing_result> runs) {
    const std::string json = report_json(runs);
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) {
        return error{fmt::format("cannot write '{}': {}", path, std::strerror(errno))};
    }
    const bool written = std::fwrite(json.data(), 1, json.size(), file) == json.size();
    const bool closed = std::fclose(file) == 0;
    if (!written || !closed) {
        return error{fmt::format("cannot write all of '{}': {}", path, std::strerror(errno))};
    }
    return nothing{};
}

std::string retained_summary(std::span<const std::uint64_t> per_layer) {
    if (per_layer.empty()) {
        return "no layers";
    }
    const auto [least, most] = std::minmax_element(per_layer.begin(), per_layer.end());
    if (*least == *most) {
        return fmt::format("{}", *least);
    }
    return fmt::format("{} to {}", *least, *most);
}

std::string readable_bytes(std::uint64_t bytes) {
    return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
}

std::string report_table(std::span<const writing_result> runs) {
    using cell_of = std::function<std::string(const writing_result&)>;
    const std::pair<const char*, cell_of> rows[] = {
        {"", [](const auto& run) { return run.policy; }},
        {"cache format", [](const auto& run) { return run.format; }},
        {"prompt tokens", [](const auto& run) { return fmt::format("{}", run.prompt_tokens); }},
        {"written tokens", [](const auto& run) { return fmt::format("{}", run.generated_tokens); }},
        {"drafts accepted",
         [](const auto& run) {
             return fmt::format("{} of {}", run.accepted_drafts, run.drafted_tokens);
         }},
        {"retained tokens per layer",
         [](const auto& run) { return retained_summary(run.retained); }},
        {"blocks held at the peak",
         [](const auto& run) { return fmt::format("{}", run.peak_blocks); }},
        {"blocks held at the end",
         [](const auto& run) { return fmt::format("{}", run.final_blocks); }},
        {"bytes held at the end", [](const auto& run) { return readable_bytes(run.final_bytes); }},
        {"blocks returned to the allocator",
         [](const auto& run) { return fmt::format("{}", run.blocks_returned); }},
        {"bytes returned to the allocator",
         [](const auto& run) { return readable_bytes(run.bytes_returned); }},
        {"tokens per second",
         [](const auto& run) { return fmt::format("{:.1f}", run.tokens_per_second); }},
    };
    std::string table;
    for (const auto& [name, cell] : rows) {
        table += fmt::format("{:<34}", name);
        for (const writing_result& run : runs) {
            table += fmt::format("{:>16}", cell(run));
        }
        table += '\n';
    }
    return table;
}

}  // namespace generate
