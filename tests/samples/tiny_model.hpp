// A tiny Llama with made-up weights, written as GGUF. Tests change its plan before it is written.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gguf_builder.hpp"

struct tensor_plan {
    std::string name;
    std::vector<std::uint64_t> shape;
};

// A model of one layer, embedding 8, two query heads on one KV head of 4, feed-forward 6, four
// tokens. Tests change it before it is written.
struct tiny_model {
    std::map<std::string, std::uint32_t> sizes = {
        {"llama.block_count", 1},          {"llama.embedding_length", 8},
        {"llama.attention.head_count", 2}, {"llama.attention.head_count_kv", 1},
        {"llama.feed_forward_length", 6},  {"llama.context_length", 32},
    };
    std::map<std::string, float> numbers = {{"llama.attention.layer_norm_rms_epsilon", 1e-5f}};
    std::map<std::string, std::string> texts = {{"general.architecture", "llama"}};
    std::vector<tensor_plan> tensors = {
        {"token_embd.weight", {8, 4}},        {"output_norm.weight", {8}},
        {"blk.0.attn_norm.weight", {8}},      {"blk.0.attn_q.weight", {8, 8}},
        {"blk.0.attn_k.weight", {8, 4}},      {"blk.0.attn_v.weight", {8, 4}},
        {"blk.0.attn_output.weight", {8, 8}}, {"blk.0.ffn_norm.weight", {8}},
        {"blk.0.ffn_gate.weight", {8, 6}},    {"blk.0.ffn_up.weight", {8, 6}},
        {"blk.0.ffn_down.weight", {6, 8}},
    };

    std::vector<std::uint64_t>& shape(const std::string& name) {
        for (tensor_plan& plan : tensors) {
            if (plan.name == name) {
                return plan.shape;
            }
        }
        return tensors.emplace_back(tensor_plan{name, {}}).shape;
    }

    gguf_builder write() const {
        gguf_builder built;
        built.header(tensors.size(), sizes.size() + numbers.size() + texts.size());
        for (const auto& [key, value] : sizes) {
            built.key_u32(key, value);
        }
        for (const auto& [key, value] : numbers) {
            built.key_f32(key, value);
        }
        for (const auto& [key, value] : texts) {
            built.key_text(key, value);
        }
        std::uint64_t offset = 0;
        for (const tensor_plan& plan : tensors) {
            built.tensor(plan.name, plan.shape, 0, offset);
            std::uint64_t size = 4;
            for (const std::uint64_t extent : plan.shape) {
                size *= extent;
            }
            offset += (size + 31) / 32 * 32;
        }
        built.data(0);
        for (std::uint64_t i = 0; i < offset / 4; ++i) {
            built.raw(static_cast<float>(std::sin(0.7 * static_cast<double>(i)) * 0.5));
        }
        return built;
    }
};
