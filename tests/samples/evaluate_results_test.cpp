// The table, the report and the plot: their numbers, and that any reader takes them.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

#include "evaluate/plot.hpp"
#include "evaluate/results.hpp"
#include "wellformed.hpp"

using evaluate::evaluation;
using evaluate::result;

namespace {

result a_result(const char* name, double bytes, double divergence) {
    result one;
    one.configuration = name;
    one.bytes_per_token = bytes;
    one.perplexity = 21.5;
    one.mean_divergence = divergence;
    one.percentile_99_divergence = 10 * divergence;
    one.agreement = 0.975;
    one.seconds = 1.5;
    return one;
}

evaluation an_evaluation() {
    evaluation done;
    done.model = "m \"1\" <&>.gguf";
    done.text = "t\n\x01\xff.txt";
    done.tokens = 4096;
    done.scored = 2048;
    done.window = 2048;
    done.chunk = 128;
    done.reference = a_result("f16", 2000, 0);
    done.results = {a_result("f16", 2000, 0), a_result("q8_0", 1062, 3.25e-4),
                    a_result("q4_0", 562, 0.125), a_result("q4_1@2", 700, 0.0625),
                    a_result("f32", 4000, 1e-7)};
    return done;
}

void add_tasks(evaluation& done) {
    evaluate::task_scores scores;
    scores.needle = {{{1, 2}, {0, 2}, {2, 2}, {1, 2}, {2, 2}}};
    scores.copy = {{{3, 8}, {8, 8}, {8, 8}, {8, 8}, {8, 8}}};
    done.reference.tasks = scores;
    for (result& one : done.results) {
        one.tasks = scores;
    }
}

bool has(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

std::size_t count(const std::string& text, std::string_view part) {
    std::size_t found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
        ++found;
    }
    return found;
}

}  // namespace

TEST_CASE("well-formedness: what is and what is not") {
    for (const char* text : {"{}", "[ ]", "[1, -2.5e-07, null, \"a\\u00e9\\n\"]",
                             "{\"a\": {\"b\": [true, false]}, \"c\": 0}", " 0 "}) {
        CAPTURE(text);
        CHECK(wellformed::is_json(text));
    }
    for (const char* text :
         {"", "{", "[1,]", "[1 2]", "{\"a\" 1}", "{a: 1}", "[nan]", "[inf]", "01", "1.", "\"a",
          "\"\n\"", "\"\\x\"", "{} {}", "[.5]", "\"\\u00g0\""}) {
        CAPTURE(text);
        CHECK_FALSE(wellformed::is_json(text));
    }
    for (const char* text : {"<a/>", "<a b=\"1\" c-d=\"x &amp; y\">t<e></e>u</a>\n"}) {
        CAPTURE(text);
        CHECK(wellformed::is_xml(text));
    }
    for (const char* text : {"", "<a>", "<a></b>", "<a b=1/>", "<a b=\"1\" b=\"2\"/>", "<a/><b/>",
                             "<a>&</a>", "<a b=\"<\"/>", "<a>\x01</a>", "<a><b></a></b>", "t"}) {
        CAPTURE(text);
        CHECK_FALSE(wellformed::is_xml(text));
    }
}

TEST_CASE("results: the table") {
    evaluation done = an_evaluation();
    const std::string plain = evaluate::table(done);
    CHECK(has(plain, "| stored as | bytes per token | of f16's | perplexity |"));
    CHECK(has(plain, "| f16       |            2000 |    1.000 |     21.500 |        0 |"));
    CHECK(has(plain, "| q8_0      |            1062 |    0.531 |     21.500 | 3.25e-04 |"));
    CHECK(has(plain, "| q4_0      |             562 |    0.281 |     21.500 |    0.125 |"));
    CHECK(has(plain, "97.50 %"));
    CHECK_FALSE(has(plain, "needles"));
    CHECK(count(plain, "\n") == 7);
    CHECK(count(plain, "|") == 7 * 8);

    add_tasks(done);
    const std::string with_tasks = evaluate::table(done);
    CHECK(has(with_tasks, "| needles recalled | copied right |\n"));
    CHECK(has(with_tasks, "|          6 of 10 |      87.50 % |\n"));
    CHECK(count(with_tasks, "|") == 7 * 10);
}

TEST_CASE("results: the report") {
    evaluation done = an_evaluation();
    const std::string plain = evaluate::report(done);
    CHECK(wellformed::is_json(plain));
    CHECK(has(plain, "\"model\": \"m \\\"1\\\" <&>.gguf\""));
    CHECK(has(plain, "\"tokens\": 4096,"));
    CHECK(has(plain, "\"mean_kl\": 0.000325,"));
    CHECK(has(plain, "\"relative_bytes\": 0.531,"));
    CHECK(has(plain, "\"top1_agreement\": 0.975,"));
    CHECK(count(plain, "\"configuration\"") == 6);
    CHECK_FALSE(has(plain, "needle_recall"));

    add_tasks(done);
    done.results[2].mean_divergence = std::numeric_limits<double>::infinity();
    done.results[2].perplexity = NAN;
    const std::string with_tasks = evaluate::report(done);
    CHECK(wellformed::is_json(with_tasks));
    CHECK(has(with_tasks, "\"perplexity\": null,\n      \"mean_kl\": null,"));
    CHECK(has(with_tasks, "\"needle_recall\": 0.6,\n"));
    CHECK(has(with_tasks, "\"needle_recall_by_depth\": [0.5, 0, 1, 0.5, 1],\n"));
    CHECK(has(with_tasks, "\"copy_accuracy_by_depth\": [0.375, 1, 1, 1, 1],\n"));

    done.results.clear();
    CHECK(wellformed::is_json(evaluate::report(done)));
}

TEST_CASE("plot: a labelled point for each result that diverges") {
    evaluation done = an_evaluation();
    const std::string svg = evaluate::plot(done);
    CHECK(wellformed::is_xml(svg));
    CHECK(has(svg, "m \"1\" &lt;&amp;&gt;.gguf, 4096 tokens"));
    for (const char* name : {">q8_0</text>", ">q4_0</text>", ">q4_1@2</text>"}) {
        CHECK(count(svg, name) == 1);
    }
    CHECK_FALSE(has(svg, ">f16</text>"));  // without divergence
    CHECK_FALSE(has(svg, ">f32</text>"));  // larger
    constexpr std::size_t of_legend = 4;
    CHECK(count(svg, "<circle") == of_legend + 3);

    done.results[1].mean_divergence = NAN;
    done.results[2].mean_divergence = std::numeric_limits<double>::infinity();
    const std::string fewer = evaluate::plot(done);
    CHECK(wellformed::is_xml(fewer));
    CHECK(count(fewer, "<circle") == of_legend + 1);
    done.results.clear();
    const std::string none = evaluate::plot(done);
    CHECK(wellformed::is_xml(none));
    CHECK(count(none, "<circle") == of_legend);
}

TEST_CASE("plot: fewer bytes lie further left, less divergence lower") {
    const auto place = [](const std::string& svg, std::size_t which) {
        std::size_t at = 0;
        for (std::size_t i = 0; i <= which; ++i) {
            at = svg.find("<circle", at + 1);
        }
        const auto number = [&](const char* name) {
            return std::stod(svg.substr(svg.find(name, at) + std::string_view(name).size()));
        };
        return std::pair(number("cx=\""), number("cy=\""));
    };
    evaluation done = an_evaluation();
    done.results = {a_result("a", 500, 1e-3), a_result("b", 1000, 1e-2)};
    // Points are drawn from the top down, behind four circles of the legend.
    const std::string svg = evaluate::plot(done);
    const auto [b_x, b_y] = place(svg, 4);
    const auto [a_x, a_y] = place(svg, 5);
    CHECK(a_x < b_x);
    CHECK(a_y > b_y);
    // A factor is the same distance everywhere on a logarithmic axis.
    done.results.push_back(a_result("c", 2000, 1e-1));
    const std::string three = evaluate::plot(done);
    const auto c = place(three, 4);
    const auto b = place(three, 5);
    const auto a = place(three, 6);
    CHECK(c.first - b.first == doctest::Approx(b.first - a.first).epsilon(1e-3));
    CHECK(b.second - c.second == doctest::Approx(a.second - b.second).epsilon(1e-3));
}

TEST_CASE("plot: labels do not cover each other") {
    evaluation done = an_evaluation();
    done.results.clear();
    for (int i = 0; i < 16; ++i) {
        done.results.push_back(a_result("same_place", 562 + i % 3, 0.125 + 0.001 * i));
    }
    const std::string svg = evaluate::plot(done);
    std::vector<std::pair<double, double>> places;
    const std::string_view end = ">same_place<";
    for (std::size_t at = svg.find(end); at != std::string::npos; at = svg.find(end, at + 1)) {
        const std::size_t start = svg.rfind("<text", at);
        const double x = std::stod(svg.substr(svg.find("x=\"", start) + 3));
        const double y = std::stod(svg.substr(svg.find("y=\"", start) + 3));
        const bool ends_there = svg.substr(start, at - start).find("\"end\"") != std::string::npos;
        places.emplace_back(ends_there ? x - 60 : x, y);
    }
    REQUIRE(places.size() == 16);
    for (std::size_t i = 0; i < places.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            CHECK((std::fabs(places[i].first - places[j].first) > 60 ||
                   std::fabs(places[i].second - places[j].second) >= 12.9));
        }
    }
}
