#include "real_model.hpp"

#include <doctest/doctest.h>

#include "golden.hpp"

const real_engine& real_model() {
    static const real_engine engine = [] {
        generate::set_matrix_threads(1);
        auto file = generate::gguf_file::open(golden::model_path());
        REQUIRE_MESSAGE(file, (file ? std::string() : file.message()));
        auto words = generate::tokenizer::from_gguf(*file);
        REQUIRE_MESSAGE(words, (words ? std::string() : words.message()));
        auto model = generate::llama_model::load(*file);
        REQUIRE_MESSAGE(model, (model ? std::string() : model.message()));
        return real_engine{std::move(*file), std::move(*words), std::move(*model)};
    }();
    return engine;
}
