// What the program reads and writes.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "evaluate/configuration.hpp"
#include "gguf.hpp"
#include "llama.hpp"
#include "mapped_file.hpp"
#include "tokenizer.hpp"
#include "trace/output_file.hpp"

namespace evaluate {

struct inputs {
    generate::mapped_file text_file;
    generate::gguf_file file;
    generate::tokenizer words;
    generate::llama_model model;

    std::string_view text() const {
        return {reinterpret_cast<const char*>(text_file.bytes().data()), text_file.bytes().size()};
    }
};

// A model in GGUF and a text in UTF-8.
outcome<inputs> open_inputs(const std::string& model, const std::string& text);

// A file that is opened before anything is computed for it. Without a path, none.
using output = std::unique_ptr<trace::output_file>;

outcome<output> open_output(const std::string& path);
outcome<nothing> write(const output& file, const std::string& content);

}  // namespace evaluate
