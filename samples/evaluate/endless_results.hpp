// What was found of text without an end, and its forms: a table in Markdown, a report in JSON.
#pragma once

#include <cstdint>
#include <string>

#include "evaluate/endless_text.hpp"

namespace evaluate {

struct endless_found {
    std::string model;  // names of files, without their folders
    std::string text;
    endless_options options;
    endless_scores scores;
    double seconds = 0;
};

// A row a stretch. Where a stretch has nothing to be compared with, there is a dash.
std::string table(const endless_found& found);
// Numbers that are not finite are null.
std::string report(const endless_found& found);

}  // namespace evaluate
