#include "replay.hpp"

#include <algorithm>

namespace batching {

namespace {

pool_handle create_pool(const trace::recording& model, const kv_pool_config& config) {
    kv_rope rope = KV_INIT(kv_rope);
    rope.style = model.rope_style;
    rope.dimensions = static_cast<std::uint32_t>(2 * model.inverse_frequencies.size());
    rope.inverse_frequencies = model.inverse_frequencies.data();

    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = model.query_heads;
    layer.kv_heads = model.kv_heads;
    layer.key_dim = model.head_dim;
    layer.key_format = model.format;
    layer.rope = model.inverse_frequencies.empty() ? nullptr : &rope;
    const std::vector<kv_layer> layers(model.layer_numbers.size(), layer);

    kv_model description = KV_INIT(kv_model);
    description.layers = layers.data();
    description.layer_count = static_cast<std::uint32_t>(layers.size());
    kv_pool* pool = nullptr;
    check(kv_pool_create(&config, &description, &pool));
    return pool_handle(pool);
}

kv_policy policy_of(const trace::recording& model, const trace::request& request) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.flags = model.policy_flags;
    policy.scorer = model.scorer;
    policy.selection = model.selection;
    policy.budget = model.budget;
    policy.every = model.every;
    policy.prompt_tokens = request.prompt_tokens;
    policy.sinks = model.sinks;
    policy.recent = model.recent;
    policy.offset_max = model.offset_max;
    policy.seed = model.seed;
    return policy;
}

kv_tensor dense_tensor(void* data, std::uint32_t dtype, std::size_t rows, std::uint32_t heads,
                       std::uint32_t dim) {
    kv_tensor tensor = KV_INIT(kv_tensor);
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.rows = rows;
    tensor.heads = heads;
    tensor.dim = dim;
    return tensor;
}

}  // namespace

replay::replay(const trace::recording& model, const limits& given, results& found)
    : model_(model),
      found_(found),
      slots_(std::min<std::size_t>(given.slots, model.requests.size())) {
    std::size_t most_rows = 0;    // of a turn
    std::size_t most_tokens = 0;  // of a request
    for (const trace::request& request : model.requests) {
        std::size_t tokens = 0;
        for (const trace::turn& turn : request.turns) {
            most_rows = std::max(most_rows, turn.token_ids.size());
            tokens += turn.token_ids.size();
        }
        most_tokens = std::max(most_tokens, tokens);
    }
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = std::uint64_t{given.arena_mib} << 20;
    config.block_tokens = 16;
    config.max_sequences = static_cast<std::uint32_t>(slots_);
    config.max_tokens_per_sequence = static_cast<std::uint32_t>(most_tokens);
    config.max_step_tokens = static_cast<std::uint32_t>(slots_ * most_rows);
    config.threads = given.threads;
    pool_ = create_pool(model, config);

    running_.reserve(slots_);
    sequences_.reserve(slots_);
    counts_.reserve(slots_);
    accepted_.reserve(slots_);
    token_ids_.reserve(config.max_step_tokens);
    queries_.reserve(config.max_step_tokens * model.query_size());
    keys_.reserve(config.max_step_tokens * model.kv_size());
    values_.reserve(config.max_step_tokens * model.kv_size());
    outputs_.resize(config.max_step_tokens * model.query_size());
}

void replay::run() {
    while (waiting_ < model_.requests.size() || !running_.empty()) {
        admit();
        step();
        retire();
    }
    found_.end(pool_.get());
}

// Gives free slots to waiting requests.
void replay::admit() {
    for (; running_.size() < slots_ && waiting_ < model_.requests.size(); ++waiting_) {
        const kv_policy policy = policy_of(model_, model_.requests[waiting_]);
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = policy.scorer == KV_SCORER_NONE ? nullptr : &policy;
        kv_seq sequence = 0;
        check(kv_seq_create(pool_.get(), &config, &sequence));
        running_.push_back({waiting_, sequence, 0});
    }
}

// One forward pass over the next turn of every running request.
void replay::step() {
    kv_step* opened = nullptr;
    check(kv_step_begin(pool_.get(), &opened));
    step_handle step(opened);
    gather();
    check(kv_step_append_batch(step.get(), static_cast<std::uint32_t>(sequences_.size()),
                               sequences_.data(), counts_.data(), token_ids_.data(), nullptr));
    reserve(step.get());
    for (std::size_t layer = 0; layer < model_.layer_numbers.size(); ++layer) {
        run_layer(step.get(), layer);
    }
    check(kv_step_accept_batch(step.get(), static_cast<std::uint32_t>(sequences_.size()),
                               sequences_.data(), accepted_.data()));
    check(kv_step_end(step.release(), nullptr));
    for (std::size_t item = 0; item < sequences_.size(); ++item) {
        ++running_[item].next_turn;
    }
    found_.count_step();
}

void replay::gather() {
    sequences_.clear();
    counts_.clear();
    accepted_.clear();
    token_ids_.clear();
    for (const running_request& one : running_) {
        const trace::turn& turn = turn_of(one);
        sequences_.push_back(one.sequence);
        counts_.push_back(turn.rows());
        accepted_.push_back(turn.accepted);
        token_ids_.insert(token_ids_.end(), turn.token_ids.begin(), turn.token_ids.end());
    }
}

// Where blocks are short, the youngest wait for a later step: older ones will return theirs.
void replay::reserve(kv_step* step) {
    kv_status status = kv_step_reserve(step, nullptr);
    while (status == KV_AGAIN && sequences_.size() > 1) {
        check(kv_step_remove(step, sequences_.back()));
        sequences_.pop_back();
        accepted_.pop_back();
        status = kv_step_reserve(step, nullptr);
    }
    check(status);
}

void replay::run_layer(kv_step* step, std::size_t layer) {
    // Here an engine computes; the rows of the sequences follow each other.
    queries_.clear();
    keys_.clear();
    values_.clear();
    for (std::size_t item = 0; item < sequences_.size(); ++item) {
        const trace::layer_rows& rows = turn_of(running_[item]).layers[layer];
        queries_.insert(queries_.end(), rows.queries.begin(), rows.queries.end());
        keys_.insert(keys_.end(), rows.keys.begin(), rows.keys.end());
        values_.insert(values_.end(), rows.values.begin(), rows.values.end());
    }
    const std::size_t rows = queries_.size() / model_.query_size();
    const auto tensor = [&](void* data, std::uint32_t dtype, std::uint32_t heads) {
        return dense_tensor(data, dtype, rows, heads, model_.head_dim);
    };
    const kv_tensor keys = tensor(keys_.data(), KV_DTYPE_F16, model_.kv_heads);
    const kv_tensor values = tensor(values_.data(), KV_DTYPE_F16, model_.kv_heads);
    const kv_tensor queries = tensor(queries_.data(), KV_DTYPE_F16, model_.query_heads);
    const kv_tensor outputs = tensor(outputs_.data(), KV_DTYPE_F32, model_.query_heads);
    const auto index = static_cast<std::uint32_t>(layer);
    check(kv_write(step, index, &keys, &values));
    check(kv_attend(step, index, &queries, &outputs, nullptr));

    const float* first = outputs_.data();
    for (std::size_t item = 0; item < sequences_.size(); ++item) {
        const running_request& one = running_[item];
        found_.compare(one.index, turn_of(one), layer, first);
        first += turn_of(one).rows() * model_.query_size();
    }
}

// Ends the sequences whose turns are done; the others keep their order.
void replay::retire() {
    std::erase_if(running_, [&](const running_request& one) {
        if (one.next_turn < model_.requests[one.index].turns.size()) {
            return false;
        }
        found_.finish(one.index, pool_.get(), one.sequence);
        check(kv_seq_release(pool_.get(), one.sequence));
        return true;
    });
}

}  // namespace batching
