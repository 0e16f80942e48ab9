#include "memory/blocks.hpp"

#include <algorithm>
#include <bit>

namespace kvrt {

namespace {

constexpr unsigned char fresh_byte = 0xff;  // NaN in every element format
constexpr unsigned char guard_byte = 0xa5;

}  // namespace

status block_store::create(host_allocator& allocator, device_memory& device,
                           const options& settings, const class_description* classes,
                           uint32_t class_count) {
    settings_ = settings;
    device_ = &device;
    class_count_ = class_count;
    KVRT_TRY(slabs_.allocate(allocator, settings.slabs, "slab records"));
    for (uint32_t c = 0; c < class_count; ++c) {
        block_class& target = classes_[c];
        target.block_bytes = classes[c].block_bytes;
        const uint32_t stride = classes[c].block_bytes + (settings.debug ? guard_bytes : 0);
        target.numbering.units_per_block = stride / block_unit;
        target.numbering.blocks_per_slab = units_per_slab / target.numbering.units_per_block;
        target.positions_per_block = classes[c].positions_per_block;
        const uint64_t blocks = blocks_in_class(c);
        KVRT_TRY(target.references.allocate(allocator, blocks, "block reference counts"));
        KVRT_TRY(target.last_reader.allocate(allocator, blocks, "block fences"));
        KVRT_TRY(target.next_parked.allocate(allocator, blocks, "parked blocks"));
        KVRT_TRY(target.positions.allocate(allocator, blocks * target.positions_per_block,
                                           "slot positions", memory_contents::undefined));
    }
    KVRT_TRY(device.reserve(settings.slabs * slab_bytes, slab_bytes, &arena_));

    free_slab_count_ = settings.slabs;
    for (uint64_t i = settings.slabs; i-- > 0;) {
        slabs_[i].class_index = no_class;
        slabs_[i].next = first_empty_free_;
        first_empty_free_ = static_cast<uint32_t>(i);
    }
    return KV_OK;
}

position_store block_store::positions(uint32_t class_index, uint32_t block_tokens) const {
    const block_class& source = classes_[class_index];
    position_store store;
    store.base = const_cast<uint32_t*>(source.positions.data());
    store.numbering = source.numbering;
    store.block_stride = source.positions_per_block;
    store.block_tokens = block_tokens;
    return store;
}

void block_store::link_partial(uint32_t slab_index) {
    block_class& owner = classes_[slabs_[slab_index].class_index];
    slabs_[slab_index].previous = no_slab;
    slabs_[slab_index].next = owner.first_partial;
    if (owner.first_partial != no_slab) slabs_[owner.first_partial].previous = slab_index;
    owner.first_partial = slab_index;
}

void block_store::unlink_partial(uint32_t slab_index) {
    const slab& record = slabs_[slab_index];
    if (record.previous != no_slab) {
        slabs_[record.previous].next = record.next;
    } else {
        classes_[record.class_index].first_partial = record.next;
    }
    if (record.next != no_slab) slabs_[record.next].previous = record.previous;
}

bool block_store::take_slab(uint32_t class_index) {
    uint32_t& list = first_resident_free_ != no_slab ? first_resident_free_ : first_empty_free_;
    if (list == no_slab) return false;
    const uint32_t index = list;
    slab& record = slabs_[index];
    if (record.resident) {
        --resident_free_count_;
    } else {
        if (device_->commit(uint64_t{index} * slab_bytes, slab_bytes) < 0) return false;
        record.resident = true;
        ++resident_slab_count_;
    }
    list = record.next;
    --free_slab_count_;

    block_class& owner = classes_[class_index];
    const uint32_t blocks = owner.numbering.blocks_per_slab;
    record.class_index = class_index;
    record.free_blocks = blocks;
    record.summary = 0;
    for (uint32_t word = 0; word < max_blocks_per_slab / 64; ++word) {
        const uint32_t first = word * 64;
        const uint32_t here = first >= blocks ? 0 : (blocks - first < 64 ? blocks - first : 64);
        record.free_bits[word] = here == 64 ? ~uint64_t{0} : (uint64_t{1} << here) - 1;
        if (here != 0) record.summary = static_cast<uint16_t>(record.summary | (1u << word));
    }
    ++owner.counters.slabs;
    owner.counters.total += blocks;
    owner.counters.free += blocks;
    link_partial(index);
    return true;
}

void block_store::return_slab(uint32_t slab_index) {
    slab& record = slabs_[slab_index];
    unlink_partial(slab_index);
    class_counters& counters = classes_[record.class_index].counters;
    const uint32_t blocks = classes_[record.class_index].numbering.blocks_per_slab;
    --counters.slabs;
    counters.total -= blocks;
    counters.free -= blocks;
    record.class_index = no_class;
    if (settings_.elastic && resident_free_count_ >= kept_resident_slabs) {
        device_->give_back(uint64_t{slab_index} * slab_bytes, slab_bytes);
        record.resident = false;
        --resident_slab_count_;
        ++totals_.slabs_given_back;
    } else {
        ++resident_free_count_;
    }
    uint32_t& list = record.resident ? first_resident_free_ : first_empty_free_;
    record.next = list;
    list = slab_index;
    ++free_slab_count_;
}

block_id block_store::allocate(uint32_t class_index) {
    block_class& owner = classes_[class_index];
    if (owner.first_partial == no_slab && !take_slab(class_index)) return no_block;
    const uint32_t slab_index = owner.first_partial;
    slab& record = slabs_[slab_index];
    const uint32_t word = static_cast<uint32_t>(std::countr_zero(record.summary));
    const uint32_t bit = static_cast<uint32_t>(std::countr_zero(record.free_bits[word]));
    record.free_bits[word] &= record.free_bits[word] - 1;
    if (record.free_bits[word] == 0) {
        record.summary = static_cast<uint16_t>(record.summary & ~(1u << word));
    }
    if (--record.free_blocks == 0) unlink_partial(slab_index);

    const block_id id =
        slab_index * units_per_slab + (word * 64 + bit) * owner.numbering.units_per_block;
    owner.references[owner.numbering.index(id)] = 1;
    owner.last_reader[owner.numbering.index(id)] = 0;
    --owner.counters.free;
    ++owner.counters.pinned;
    ++totals_.allocated;
    totals_.pinned_bytes += owner.block_bytes;
    if (++totals_.pinned > totals_.peak_pinned) totals_.peak_pinned = totals_.pinned;
    if (settings_.debug) {
        std::byte* block = block_address(arena_, id);
        std::memset(block, fresh_byte, owner.block_bytes);
        std::memset(block + owner.block_bytes, guard_byte, guard_bytes);
    }
    return id;
}

void block_store::retain(uint32_t class_index, block_id id) {
    ++classes_[class_index].references[classes_[class_index].numbering.index(id)];
}

uint32_t block_store::references(uint32_t class_index, block_id id) const {
    return classes_[class_index].references[classes_[class_index].numbering.index(id)];
}

uint64_t block_store::last_reader(uint32_t class_index, block_id id) const {
    return classes_[class_index].last_reader[classes_[class_index].numbering.index(id)];
}

bool block_store::drop(uint32_t class_index, block_id id, uint64_t fence,
                       const fence_clock& clock) {
    block_class& owner = classes_[class_index];
    const uint64_t index = owner.numbering.index(id);
    if (fence > owner.last_reader[index]) owner.last_reader[index] = fence;
    if (--owner.references[index] != 0) return false;

    --owner.counters.pinned;
    --totals_.pinned;
    totals_.pinned_bytes -= owner.block_bytes;
    ++totals_.returned;
    totals_.returned_bytes += owner.block_bytes;
    if (clock.passed(owner.last_reader[index])) {
        free_block(class_index, id);
        return true;
    }
    ++owner.counters.parked;
    park(class_index, id);
    return true;
}

void block_store::park(uint32_t class_index, block_id id) {
    block_class& owner = classes_[class_index];
    const uint64_t index = owner.numbering.index(id);
    owner.next_parked[index] = no_block;
    oldest_parked_fence_ = std::min(oldest_parked_fence_, owner.last_reader[index]);
    if (last_parked_ == no_block) {
        first_parked_ = id;
    } else {
        const uint32_t last_class = slabs_[last_parked_ / units_per_slab].class_index;
        classes_[last_class].next_parked[block_index(last_class, last_parked_)] = id;
    }
    last_parked_ = id;
}

void block_store::take_back(uint32_t class_index, block_id id, uint64_t fence,
                            const fence_clock& clock) {
    if (!drop(class_index, id, fence, clock)) return;
    --totals_.allocated;
    --totals_.returned;
    totals_.returned_bytes -= classes_[class_index].block_bytes;
}

void block_store::collect(const fence_clock& clock) {
    // The host passes fences in order, so while the oldest has not passed none has.
    if (clock.by_host && !clock.passed(oldest_parked_fence_)) return;
    // Blocks lie in the order in which they were dropped, which need not be that of their fences.
    block_id id = first_parked_;
    first_parked_ = no_block;
    last_parked_ = no_block;
    oldest_parked_fence_ = no_fence;
    while (id != no_block) {
        const uint32_t class_index = slabs_[id / units_per_slab].class_index;
        block_class& owner = classes_[class_index];
        const uint64_t index = owner.numbering.index(id);
        const block_id next = owner.next_parked[index];
        if (clock.passed(owner.last_reader[index])) {
            --owner.counters.parked;
            free_block(class_index, id);
        } else {
            park(class_index, id);
        }
        id = next;
    }
}

void block_store::free_block(uint32_t class_index, block_id id) {
    block_class& owner = classes_[class_index];
    if (settings_.debug) std::memset(block_address(arena_, id), fresh_byte, owner.block_bytes);
    const uint32_t slab_index = id / units_per_slab;
    slab& record = slabs_[slab_index];
    const uint32_t block = owner.numbering.in_slab(id);
    record.free_bits[block / 64] |= uint64_t{1} << (block % 64);
    record.summary = static_cast<uint16_t>(record.summary | (1u << (block / 64)));
    ++owner.counters.free;
    if (record.free_blocks++ == 0) link_partial(slab_index);
    if (record.free_blocks == owner.numbering.blocks_per_slab) return_slab(slab_index);
}

bool block_store::fits(const uint64_t* needed, uint64_t slabs, bool count_free,
                       bool count_parked) const {
    for (uint32_t c = 0; c < class_count_; ++c) {
        const class_counters& counters = classes_[c].counters;
        const uint64_t here =
            (count_free ? counters.free : 0) + (count_parked ? counters.parked : 0);
        if (needed[c] <= here) continue;
        const uint64_t more = ceil_divide<uint64_t>(needed[c] - here, blocks_per_slab(c));
        if (more > slabs) return false;
        slabs -= more;
    }
    return true;
}

bool block_store::can_allocate(const uint64_t* needed, bool after_fences) const {
    return fits(needed, free_slab_count_, true, after_fences);
}

bool block_store::could_ever_allocate(const uint64_t* needed) const {
    return fits(needed, slabs_.size(), false, false);
}

uint64_t block_store::free_bytes(bool after_fences) const {
    uint64_t bytes = free_slab_count_ * slab_bytes;
    for (uint32_t c = 0; c < class_count_; ++c) {
        const class_counters& counters = classes_[c].counters;
        bytes += (counters.free + (after_fences ? counters.parked : 0)) * classes_[c].block_bytes;
    }
    return bytes;
}

status block_store::check_slab(uint32_t slab_index, uint64_t* free_blocks) const {
    const slab& record = slabs_[slab_index];
    const block_class& owner = classes_[record.class_index];
    uint32_t free_here = 0;
    for (uint32_t block = 0; block < owner.numbering.blocks_per_slab; ++block) {
        const block_id id = slab_index * units_per_slab + block * owner.numbering.units_per_block;
        const bool is_free = (record.free_bits[block / 64] >> (block % 64) & 1) != 0;
        const uint32_t references = owner.references[owner.numbering.index(id)];
        if (is_free && references != 0) {
            return fail(KV_INTERNAL, "block {} is free and has {} references", id, references);
        }
        free_here += is_free ? 1 : 0;
        if (!settings_.debug || is_free || references == 0) continue;
        const std::byte* guard = block_address(arena_, id) + owner.block_bytes;
        for (uint32_t i = 0; i < guard_bytes; ++i) {
            if (guard[i] != std::byte{guard_byte}) {
                return fail(KV_INTERNAL, "byte {} behind block {} was overwritten", i, id);
            }
        }
    }
    if (free_here != record.free_blocks) {
        return fail(KV_INTERNAL, "slab {} has {} free blocks and counts {}", slab_index, free_here,
                    record.free_blocks);
    }
    free_blocks[record.class_index] += free_here;
    return KV_OK;
}

status block_store::check(const host_array<uint32_t>* expected) const {
    uint64_t free_blocks[max_block_classes] = {};
    uint64_t free_slabs = 0;
    for (uint64_t i = 0; i < slabs_.size(); ++i) {
        if (slabs_[i].class_index == no_class) {
            ++free_slabs;
        } else {
            KVRT_TRY(check_slab(static_cast<uint32_t>(i), free_blocks));
        }
    }
    if (free_slabs != free_slab_count_) {
        return fail(KV_INTERNAL, "{} slabs are free, {} are counted", free_slabs, free_slab_count_);
    }
    for (uint32_t c = 0; c < class_count_; ++c) {
        const class_counters& counters = classes_[c].counters;
        if (counters.free != free_blocks[c] ||
            counters.total != counters.free + counters.pinned + counters.parked ||
            counters.total != counters.slabs * blocks_per_slab(c)) {
            return fail(KV_INTERNAL,
                        "class {}: total {} free {} pinned {} parked {} do not add up ({} in maps)",
                        c, counters.total, counters.free, counters.pinned, counters.parked,
                        free_blocks[c]);
        }
        uint64_t pinned = 0;
        for (uint64_t i = 0; i < classes_[c].references.size(); ++i) {
            const uint32_t references = classes_[c].references[i];
            pinned += references != 0 ? 1 : 0;
            if (expected != nullptr && expected[c][i] != references) {
                return fail(KV_INTERNAL, "class {} block index {}: {} references, tables hold {}",
                            c, i, references, expected[c][i]);
            }
        }
        if (pinned != counters.pinned) {
            return fail(KV_INTERNAL, "class {}: {} blocks have references, {} are counted", c,
                        pinned, counters.pinned);
        }
    }
    return KV_OK;
}

}  // namespace kvrt
