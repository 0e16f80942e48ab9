// Reading the golden files: lines of a word and its content.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace golden {

struct line {
    std::string word;
    std::string content;
};

// All lines of golden/<name>; fails the test if there are none.
std::vector<line> read_lines(const std::string& name);

std::vector<std::uint32_t> numbers(const std::string& content);
std::vector<std::pair<std::uint32_t, float>> pairs(const std::string& content);  // "id:value ..."
std::vector<float> floats(const std::string& content);
std::string from_hex(const std::string& content);

// The path of the model that the tests run: KVRT_TEST_MODEL, or the one that scripts/fetch_model.sh
// leaves. Fails the test if there is none.
std::string model_path();

}  // namespace golden
