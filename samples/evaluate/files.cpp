#include "evaluate/files.hpp"

#include <fmt/format.h>

#include <span>
#include <utility>

#include "trace/trace.hpp"

namespace evaluate {

outcome<inputs> open_inputs(const std::string& model_path, const std::string& text_path) {
    auto text = generate::mapped_file::open(text_path);
    if (!text) {
        return text.failure();
    }
    auto file = generate::gguf_file::open(model_path);
    if (!file) {
        return file.failure();
    }
    auto words = generate::tokenizer::from_gguf(*file);
    if (!words) {
        return error{fmt::format("'{}': {}", model_path, words.message())};
    }
    auto model = generate::llama_model::load(*file);
    if (!model) {
        return error{fmt::format("'{}': {}", model_path, model.message())};
    }
    if (words->size() > model->config.vocabulary) {
        return error{fmt::format("the tokenizer has {} tokens, the model knows {}", words->size(),
                                 model->config.vocabulary)};
    }
    return inputs{std::move(*text), std::move(*file), std::move(*words), std::move(*model)};
}

outcome<output> open_output(const std::string& path) {
    try {
        return path.empty() ? output() : std::make_unique<trace::output_file>(path);
    } catch (const trace::error& failure) {
        return error{failure.what()};
    }
}

outcome<nothing> write(const output& file, const std::string& content) {
    try {
        if (file != nullptr) {
            file->commit(std::as_bytes(std::span(content)));
        }
        return nothing{};
    } catch (const trace::error& failure) {
        return error{failure.what()};
    }
}

}  // namespace evaluate
