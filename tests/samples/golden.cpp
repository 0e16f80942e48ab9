#include "golden.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace golden {

std::vector<line> read_lines(const std::string& name) {
    std::ifstream file(std::string(KVRT_TEST_DIR) + "/samples/golden/" + name);
    std::vector<line> lines;
    for (std::string text; std::getline(file, text);) {
        const std::size_t cut = text.find(' ');
        lines.push_back({text.substr(0, cut), cut == text.npos ? "" : text.substr(cut + 1)});
    }
    REQUIRE_MESSAGE(!lines.empty(), "golden file missing: ", name);
    return lines;
}

std::vector<std::uint32_t> numbers(const std::string& content) {
    std::istringstream stream(content);
    std::vector<std::uint32_t> values;
    for (std::uint32_t value = 0; stream >> value;) {
        values.push_back(value);
    }
    return values;
}

std::vector<std::pair<std::uint32_t, float>> pairs(const std::string& content) {
    std::istringstream stream(content);
    std::vector<std::pair<std::uint32_t, float>> values;
    for (std::string item; stream >> item;) {
        const std::size_t colon = item.find(':');
        values.emplace_back(std::stoul(item.substr(0, colon)), std::stof(item.substr(colon + 1)));
    }
    return values;
}

std::vector<float> floats(const std::string& content) {
    std::istringstream stream(content);
    std::vector<float> values;
    for (std::string item; stream >> item;) {
        values.push_back(std::strtof(item.c_str(), nullptr));
    }
    return values;
}

std::string from_hex(const std::string& content) {
    std::string bytes;
    for (std::size_t i = 0; i + 1 < content.size(); i += 2) {
        bytes.push_back(static_cast<char>(std::stoi(content.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

std::string model_path() {
    if (const char* given = std::getenv("KVRT_TEST_MODEL")) {
        return given;
    }
    const std::string fetched =
        std::string(KVRT_TEST_DIR) + "/../build/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    REQUIRE_MESSAGE(std::filesystem::exists(fetched),
                    "no model: run scripts/fetch_model.sh, or set KVRT_TEST_MODEL");
    return fetched;
}

}  // namespace golden
