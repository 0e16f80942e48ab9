#include "chat.hpp"

namespace generate {

namespace {

// The system message that the template begins with where the conversation has none of its own;
// empty if it has no such message.
std::string default_system_message(std::string_view chat_template) {
    constexpr std::string_view start = "'<|im_start|>system\n";
    constexpr std::string_view end = "<|im_end|>";
    std::size_t from = chat_template.find(start);
    if (from == std::string_view::npos) {
        return {};
    }
    from += start.size();
    const std::size_t to = chat_template.find(end, from);
    if (to == std::string_view::npos) {
        return {};
    }
    const std::string_view message = chat_template.substr(from, to - from);
    // A quote or a brace means that the template computes the message.
    return message.find_first_of("'{}") == std::string_view::npos ? std::string(message)
                                                                  : std::string();
}

void append(const tokenizer& words, std::string_view part, special_tokens treatment,
            std::vector<token_id>& tokens) {
    const auto encoded = words.encode(part, treatment);
    tokens.insert(tokens.end(), encoded.begin(), encoded.end());
}

void append_question(const tokenizer& words, std::string_view text, std::vector<token_id>& tokens) {
    append(words, "<|im_start|>user\n", special_tokens::recognised, tokens);
    append(words, text, special_tokens::as_text, tokens);
    append(words, "<|im_end|>\n<|im_start|>assistant\n", special_tokens::recognised, tokens);
}

}  // namespace

outcome<std::vector<token_id>> prompt_tokens(const gguf_file& file, const tokenizer& words,
                                             std::string_view text, prompt_style style) {
    std::vector<token_id> tokens;
    if (words.begins_with_marker() && words.begin_of_text()) {
        tokens.push_back(*words.begin_of_text());
    }
    if (style == prompt_style::raw) {
        append(words, text, special_tokens::as_text, tokens);
    } else {
        const auto chat_template = file.text("tokenizer.chat_template", "");
        if (!chat_template) {
            return chat_template.failure();
        }
        const bool known = chat_template->find("<|im_start|>") != std::string::npos &&
                           words.find_special("<|im_start|>") && words.find_special("<|im_end|>");
        if (!known) {
            return error{"the model has no ChatML chat template: use --raw to continue plain text"};
        }
        if (const auto system = default_system_message(*chat_template); !system.empty()) {
            append(words, "<|im_start|>system\n" + system + "<|im_end|>\n",
                   special_tokens::recognised, tokens);
        }
        append_question(words, text, tokens);
    }
    if (tokens.empty()) {
        return error{"the prompt is empty"};
    }
    return tokens;
}

std::vector<token_id> follow_up_tokens(const tokenizer& words, std::string_view text) {
    std::vector<token_id> tokens;
    append(words, "<|im_end|>\n", special_tokens::recognised, tokens);
    append_question(words, text, tokens);
    return tokens;
}

}  // namespace generate
