// The model that the tests run, loaded once.
#pragma once

#include "gguf.hpp"
#include "llama.hpp"
#include "tokenizer.hpp"

struct real_engine {
    generate::gguf_file file;
    generate::tokenizer words;
    generate::llama_model model;
};

// Fails the test if the model is not there or cannot be read. Matrix products run on one thread.
const real_engine& real_model();
