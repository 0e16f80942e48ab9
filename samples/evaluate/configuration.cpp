#include "evaluate/configuration.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace evaluate {

namespace {

// Static scales would have to be measured on a text beforehand. They are 1.0 here, which is what
// engines do whose checkpoints bring none.
constexpr std::uint32_t unscaled = KV_STORAGE_SCALE_ONE;

struct named_format {
    std::string_view name;
    operand_storage storage;
};

constexpr named_format formats[] = {
    {"f32", {KV_FORMAT_F32}},
    {"f16", {KV_FORMAT_F16}},
    {"bf16", {KV_FORMAT_BF16}},
    {"fp8_e4m3", {KV_FORMAT_FP8_E4M3, unscaled}},
    {"fp8_e5m2", {KV_FORMAT_FP8_E5M2, unscaled}},
    {"fp8_token", {KV_FORMAT_FP8_TOKEN}},
    {"int8_token", {KV_FORMAT_INT8_TOKEN}},
    {"int4_token", {KV_FORMAT_INT4_TOKEN}},
    {"q8_0", {KV_FORMAT_Q8_0}},
    {"q4_0", {KV_FORMAT_Q4_0}},
    {"q4_1", {KV_FORMAT_Q4_1}},
    {"nvfp4", {KV_FORMAT_NVFP4}},
    {"mxfp4", {KV_FORMAT_MXFP4}},
    {"kivi4", {KV_FORMAT_KIVI4}},
    {"kivi2", {KV_FORMAT_KIVI2}},
    {"kvarn4", {KV_FORMAT_KVARN4}},
    {"kvarn2", {KV_FORMAT_KVARN2}},
    {"turbo4", {KV_FORMAT_TURBO4}},
    {"turbo3", {KV_FORMAT_TURBO3}},
    {"affine4", {KV_FORMAT_AFFINE4}},
};

outcome<operand_storage> parse_operand(std::string_view text) {
    constexpr std::string_view rotate = "+rotate";
    const bool rotated = text.ends_with(rotate);
    const std::string_view name = text.substr(0, text.size() - (rotated ? rotate.size() : 0));
    const auto* found = std::find_if(std::begin(formats), std::end(formats),
                                     [&](const named_format& one) { return one.name == name; });
    if (found == std::end(formats)) {
        return error{fmt::format("'{}' is no format, there are: {}", name, format_names())};
    }
    operand_storage storage = found->storage;
    storage.flags |= rotated ? KV_STORAGE_ROTATE : 0;
    return storage;
}

}  // namespace

// Every format as it is; rotated, those that outliers hurt; more bits for keys than for values; the
// outermost layers left in f16, as the presets do.
const std::string_view default_configurations =
    "f32,f16,bf16,fp8_e4m3,fp8_e5m2,fp8_token,int8_token,q8_0,int4_token,q4_0,q4_1,nvfp4,mxfp4,"
    "kivi4,kivi2,kvarn4,kvarn2,kvarn4/kvarn2,turbo4,turbo3,affine4/q4_1,"
    "int8_token+rotate,int4_token+rotate,q4_1+rotate,int8_token+rotate/int4_token+rotate,"
    "affine4/int4_token+rotate,"
    "int8_token+rotate/int4_token+rotate@2,int4_token+rotate@2";

std::string format_names() {
    std::string names;
    for (const named_format& one : formats) {
        names += fmt::format("{}{}", names.empty() ? "" : ", ", one.name);
    }
    return names;
}

configuration reference_configuration() { return {"f16", {}, 0}; }

outcome<configuration> parse_configuration(std::string_view text) {
    configuration read;
    read.name = text;
    const auto wrong = [&](std::string_view what) {
        return error{fmt::format("configuration '{}': {}", text, what)};
    };
    std::string_view operands = text;
    if (const std::size_t at = text.find('@'); at != std::string_view::npos) {
        const std::string_view edge = text.substr(at + 1);
        const char* const end = edge.data() + edge.size();
        const auto [behind, status] = std::from_chars(edge.data(), end, read.edge_layers);
        if (status != std::errc() || behind != end || read.edge_layers == 0) {
            return wrong("behind @ stands how many layers at each end stay in f16, 1 or more");
        }
        operands = text.substr(0, at);
    }
    const std::size_t slash = operands.find('/');
    const auto keys = parse_operand(operands.substr(0, slash));
    if (!keys) {
        return wrong(keys.message());
    }
    read.storage = {*keys, *keys};
    if (slash != std::string_view::npos) {
        const auto values = parse_operand(operands.substr(slash + 1));
        if (!values) {
            return wrong(values.message());
        }
        read.storage.values = *values;
    }
    if (generate::takes_key_channels(read.storage.values)) {
        return wrong("affine4 is for keys alone: name a format of values behind a /");
    }
    return read;
}

outcome<std::vector<configuration>> parse_configurations(std::string_view list) {
    std::vector<configuration> read;
    for (std::size_t start = 0; start <= list.size();) {
        const std::size_t end = std::min(list.find(',', start), list.size());
        auto one = parse_configuration(list.substr(start, end - start));
        if (!one) {
            return one.failure();
        }
        for (const configuration& before : read) {
            if (before.name == one->name) {
                return error{fmt::format("configuration '{}' is there twice", one->name)};
            }
        }
        read.push_back(std::move(*one));
        start = end + 1;
    }
    return read;
}

bool is_stored(const configuration& one, std::uint64_t formats_stored) {
    const auto has = [&](const operand_storage& operand) {
        return (formats_stored >> operand.format & 1) != 0;
    };
    return has(one.storage.keys) && has(one.storage.values);
}

std::vector<layer_storage> storage_of_layers(const configuration& one, std::uint32_t layers) {
    std::vector<layer_storage> storage(layers, one.storage);
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
        if (layer < one.edge_layers || layers - 1 - layer < one.edge_layers) {
            storage[layer] = reference_configuration().storage;
        }
    }
    return storage;
}

}  // namespace evaluate
