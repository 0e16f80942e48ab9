// The program: reads the arguments, loads the model, and writes one text, the demo's two, or
// one for each prompt of a trace.
//
// The text goes to standard output, everything else to standard error. Exit status: 0 done, 1 the
// model or the writing failed, 2 the arguments were wrong.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "arguments.hpp"
#include "chat.hpp"
#include "cuda_driver.hpp"
#include "gguf.hpp"
#include "llama.hpp"
#include "recorder.hpp"
#include "report.hpp"
#include "tokenizer.hpp"
#include "unicode.hpp"
#include "writer.hpp"

namespace generate {

namespace {

// A conversation, so that a small model has something new to say all the time.
constexpr const char* demo_questions[] = {
    "What does a lighthouse do, and who works there?",
    "Write a short story about a lighthouse keeper and a storm.",
    "What happened to the keeper the next morning? Continue the story.",
    "How do ships find their way across the sea?",
    "Write a letter from a sailor to his family.",
    "Why are there tides?",
    "What should a sailor take along on a long voyage?",
    "How do whales talk to each other?",
    "Tell me more about the sea.",
};

// A line that is overwritten on a terminal, or a line every hundred tokens elsewhere.
void show_progress(const writing_progress& now) {
    static const bool terminal = ::isatty(STDERR_FILENO) == 1;
    const bool last = now.written == now.wanted;
    if (!terminal && now.written % 100 != 0 && !last) {
        return;
    }
    const std::string line =
        fmt::format("{:5} of {} tokens   {:6.1f} tokens/s   cache {:>10}", now.written, now.wanted,
                    now.tokens_per_second, readable_bytes(now.live_bytes));
    std::fprintf(stderr, "%s%s%s", terminal ? "\r" : "", line.c_str(),
                 terminal && !last ? "" : "\n");
}

void show_text(const writing_progress& now) {
    std::fwrite(now.bytes.data(), 1, now.bytes.size(), stdout);
    std::fflush(stdout);
}

struct loaded {
    gguf_file file;
    tokenizer words;
    llama_model model;
};

outcome<loaded> load(const std::string& path) {
    auto file = gguf_file::open(path);
    if (!file) {
        return file.failure();
    }
    auto words = tokenizer::from_gguf(*file);
    if (!words) {
        return error{fmt::format("'{}': {}", path, words.message())};
    }
    auto model = llama_model::load(*file);
    if (!model) {
        return error{fmt::format("'{}': {}", path, model.message())};
    }
    return loaded{std::move(*file), std::move(*words), std::move(*model)};
}

outcome<std::vector<writing_result>> run_demo(const loaded& engine, const arguments& wanted) {
    const auto prompt =
        prompt_tokens(engine.file, engine.words, demo_questions[0], prompt_style::chat);
    if (!prompt) {
        return prompt.failure();
    }
    writing_options options = wanted.writing;
    options.temperature = 0.6;
    options.top_p = 0.9;
    options.repeat_penalty = 1.1;
    options.stop_at_end = false;
    for (const char* question : std::span(demo_questions).subspan(1)) {
        options.follow_ups.push_back({question, follow_up_tokens(engine.words, question)});
    }
    std::vector<writing_result> runs;
    for (const char* policy : {"full", "triattention"}) {
        options.policy = policy;
        const std::string heading =
            options.policy == "full"
                ? "with a full cache"
                : fmt::format("with TriAttention, {} tokens retained, a round every {}",
                              options.budget, options.every);
        std::fprintf(stderr, "%s\n", heading.c_str());
        auto result = write_text(engine.model, engine.words, *prompt, options, show_progress);
        if (!result) {
            return result.failure();
        }
        runs.push_back(std::move(*result));
    }
    std::printf("\n%s\n", report_table(runs).c_str());
    for (const writing_result& run : runs) {
        std::printf("---- %s ----\n> %s\n\n%s\n\n", run.policy.c_str(), demo_questions[0],
                    valid_utf8(run.text).c_str());
    }
    return runs;
}

outcome<std::vector<writing_result>> run_prompts(const loaded& engine, const arguments& wanted,
                                                 trace_recorder* recorder) {
    std::vector<writing_result> runs;
    for (const std::string& text : wanted.prompts) {
        const auto prompt = prompt_tokens(engine.file, engine.words, text, wanted.style);
        if (!prompt) {
            return prompt.failure();
        }
        auto result =
            write_text(engine.model, engine.words, *prompt, wanted.writing, show_text, recorder);
        if (!result) {
            return result.failure();
        }
        std::printf("\n");
        runs.push_back(std::move(*result));
    }
    std::fprintf(stderr, "\n%s", report_table(runs).c_str());
    return runs;
}

// Before anything long begins.
outcome<nothing> check_device(const std::string& device) {
    if (device == "cpu") {
        return nothing{};
    }
    const auto gpu = cuda_device::open();
    if (!gpu) {
        return gpu.failure();
    }
    std::fprintf(stderr, "the cache is on %s\n", (*gpu)->name().c_str());
    return nothing{};
}

outcome<nothing> run(const arguments& wanted) {
    if (auto checked = check_device(wanted.writing.device); !checked) {
        return checked;
    }
    std::unique_ptr<trace_recorder> recorder;
    if (!wanted.record.empty()) {
        auto opened = trace_recorder::open(wanted.record);
        if (!opened) {
            return opened.failure();
        }
        recorder = std::move(*opened);
    }
    auto engine = load(wanted.model);
    if (!engine) {
        return engine.failure();
    }
    if (recorder != nullptr) {
        auto described = recorder->describe_model(engine->model.config, wanted.record_layers);
        if (!described) {
            return described;
        }
    }
    const auto runs =
        wanted.demo ? run_demo(*engine, wanted) : run_prompts(*engine, wanted, recorder.get());
    if (!runs) {
        return runs.failure();
    }
    if (recorder != nullptr) {
        if (auto saved = recorder->save(); !saved) {
            return saved;
        }
    }
    return wanted.report.empty() ? nothing{} : write_report(wanted.report, *runs);
}

}  // namespace

}  // namespace generate

int main(int count, char** words) {
    const auto wanted = generate::parse_arguments(
        std::span<const char* const>(words, static_cast<std::size_t>(count)).subspan(1));
    if (!wanted) {
        std::fprintf(stderr, "generate: %s\n\n%s", wanted.message().c_str(), generate::usage());
        return 2;
    }
    if (wanted->help) {
        std::fputs(generate::usage(), stdout);
        return 0;
    }
    const auto done = generate::run(*wanted);
    if (!done) {
        std::fprintf(stderr, "generate: %s\n", done.message().c_str());
    }
    return done ? 0 : 1;
}
