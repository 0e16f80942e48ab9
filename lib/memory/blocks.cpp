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
        target.numbering = block_numbering(stride / block_unit);
        target.positions_per_block = classes[c].positions_per_block;
        const uint64_t blocks = blocks_in_class(c);
        KVRT_TRY(target.records.allocate(allocator, blocks, "block records"));
        KVRT_TRY(target.positions.allocate(allocator, blocks * target.positions_per_block,
                                           "slot positions", memory_contents::undefined));
    }
    if (settings.debug && settings.inspected != nullptr) {
        KVRT_TRY(guards_.allocate(allocator, uint64_t{max_blocks_per_slab} * guard_bytes,
                                  "guards that are read back"));
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

class_counters block_store::counters(uint32_t class_index) const {
    const block_class& source = classes_[class_index];
    class_counters result;
    result.slabs = source.slabs;
    result.total = source.total;
    result.pinned = source.allocated - source.returned;
    result.parked = source.parked;
    result.free = result.total - result.pinned - result.parked;
    return result;
}

block_counters block_store::totals() const {
    block_counters result;
    for (uint32_t c = 0; c < class_count_; ++c) {
        const block_class& source = classes_[c];
        result.allocated += source.allocated;
        result.returned += source.returned;
        result.returned_bytes += source.returned * source.block_bytes;
        result.pinned_bytes += (source.allocated - source.returned) * source.block_bytes;
    }
    result.slabs_given_back = slabs_given_back_;
    result.pinned = pinned_;
    result.peak_pinned = peak_pinned_;
    return result;
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
        if (here != 0) record.summary |= uint64_t{1} << word;
    }
    ++owner.slabs;
    owner.total += blocks;
    link_partial(index);
    return true;
}

void block_store::return_slab(uint32_t slab_index) {
    slab& record = slabs_[slab_index];
    unlink_partial(slab_index);
    block_class& owner = classes_[record.class_index];
    --owner.slabs;
    owner.total -= owner.numbering.blocks_per_slab;
    record.class_index = no_class;
    if (settings_.elastic && resident_free_count_ >= kept_resident_slabs) {
        device_->give_back(uint64_t{slab_index} * slab_bytes, slab_bytes);
        record.resident = false;
        --resident_slab_count_;
        ++slabs_given_back_;
    } else {
        ++resident_free_count_;
    }
    uint32_t& list = record.resident ? first_resident_free_ : first_empty_free_;
    record.next = list;
    list = slab_index;
    ++free_slab_count_;
}

void block_store::fill(block_id id, uint64_t offset, uint64_t bytes, unsigned char value) {
    if (settings_.inspected != nullptr) {
        settings_.inspected->fill(uint64_t{id} * block_unit + offset, bytes, value);
    } else {
        std::memset(block_address(arena_, id) + offset, value, bytes);
    }
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
        record.summary &= ~(uint64_t{1} << word);
    }
    if (--record.free_blocks == 0) unlink_partial(slab_index);

    const uint32_t block = word * 64 + bit;
    const block_id id = slab_index * units_per_slab + block * owner.numbering.units_per_block;
    owner.records[owner.numbering.index(slab_index, block)] = {1, no_block, 0};
    ++owner.allocated;
    if (++pinned_ > peak_pinned_) peak_pinned_ = pinned_;
    if (settings_.debug) {
        fill(id, 0, owner.block_bytes, fresh_byte);
        fill(id, owner.block_bytes, guard_bytes, guard_byte);
    }
    return id;
}

void block_store::retain(block_id id) { ++record_of(id).references; }

uint32_t block_store::references(block_id id) const { return record_of(id).references; }

uint64_t block_store::last_reader(block_id id) const { return record_of(id).last_reader; }

bool block_store::drop(block_id id, uint64_t fence, const fence_clock& clock) {
    block_class& owner = classes_[class_of(id)];
    block_record& record = record_of(id);
    if (fence > record.last_reader) record.last_reader = fence;
    if (--record.references != 0) return false;

    --pinned_;
    ++owner.returned;
    if (clock.passed(record.last_reader)) {
        free_block(id);
        return true;
    }
    ++owner.parked;
    park(id);
    return true;
}

void block_store::park(block_id id) {
    block_record& record = record_of(id);
    record.next_parked = no_block;
    oldest_parked_fence_ = std::min(oldest_parked_fence_, record.last_reader);
    if (last_parked_ == no_block) {
        first_parked_ = id;
    } else {
        record_of(last_parked_).next_parked = id;
    }
    last_parked_ = id;
}

void block_store::take_back(block_id id, uint64_t fence, const fence_clock& clock) {
    const uint32_t class_index = class_of(id);  // before the slab may go back to the arena
    if (!drop(id, fence, clock)) return;
    --classes_[class_index].allocated;
    --classes_[class_index].returned;
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
        const block_record& record = record_of(id);
        const block_id next = record.next_parked;
        if (clock.passed(record.last_reader)) {
            --classes_[class_of(id)].parked;
            free_block(id);
        } else {
            park(id);
        }
        id = next;
    }
}

void block_store::free_block(block_id id) {
    block_class& owner = classes_[class_of(id)];
    if (settings_.debug) fill(id, 0, owner.block_bytes, fresh_byte);
    const uint32_t slab_index = id / units_per_slab;
    slab& record = slabs_[slab_index];
    const uint32_t block = owner.numbering.in_slab(id);
    record.free_bits[block / 64] |= uint64_t{1} << (block % 64);
    record.summary |= uint64_t{1} << (block / 64);
    if (record.free_blocks++ == 0) link_partial(slab_index);
    if (record.free_blocks == owner.numbering.blocks_per_slab) return_slab(slab_index);
}

bool block_store::fits(const uint64_t* needed, uint64_t slabs, bool count_free,
                       bool count_parked) const {
    for (uint32_t c = 0; c < class_count_; ++c) {
        const class_counters counters = this->counters(c);
        const uint64_t here =
            (count_free ? counters.free : 0) + (count_parked ? counters.parked : 0);
        const uint64_t wanted = needed[c] + (count_free ? promised_[c] : 0);
        if (wanted <= here) continue;
        const uint64_t more = ceil_divide<uint64_t>(wanted - here, blocks_per_slab(c));
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
        const class_counters counters = this->counters(c);
        bytes += (counters.free + (after_fences ? counters.parked : 0)) * classes_[c].block_bytes;
    }
    return bytes;
}

status block_store::check_guards(uint32_t slab_index) const {
    const slab& record = slabs_[slab_index];
    const block_class& owner = classes_[record.class_index];
    const uint64_t first = uint64_t{slab_index} * slab_bytes + owner.block_bytes;
    const uint64_t stride = uint64_t{owner.numbering.units_per_block} * block_unit;
    const std::byte* guards = arena_ + first;
    uint64_t apart = stride;
    if (settings_.inspected != nullptr) {
        KVRT_TRY(settings_.inspected->read(first, stride, owner.numbering.blocks_per_slab,
                                           guard_bytes, guards_.data()));
        guards = guards_.data();
        apart = guard_bytes;
    }
    for (uint32_t block = 0; block < owner.numbering.blocks_per_slab; ++block) {
        const block_id id = slab_index * units_per_slab + block * owner.numbering.units_per_block;
        if (record_of(id).references == 0) continue;
        for (uint32_t i = 0; i < guard_bytes; ++i) {
            if (guards[block * apart + i] == std::byte{guard_byte}) continue;
            return fail(KV_INTERNAL, "byte {} behind block {} was overwritten", i, id);
        }
    }
    return KV_OK;
}

status block_store::check_slab(uint32_t slab_index, uint64_t* free_blocks) const {
    const slab& record = slabs_[slab_index];
    const block_class& owner = classes_[record.class_index];
    uint32_t free_here = 0;
    for (uint32_t block = 0; block < owner.numbering.blocks_per_slab; ++block) {
        const block_id id = slab_index * units_per_slab + block * owner.numbering.units_per_block;
        const bool is_free = (record.free_bits[block / 64] >> (block % 64) & 1) != 0;
        const uint32_t references = record_of(id).references;
        if (is_free && references != 0) {
            return fail(KV_INTERNAL, "block {} is free and has {} references", id, references);
        }
        free_here += is_free ? 1 : 0;
    }
    if (settings_.debug) KVRT_TRY(check_guards(slab_index));
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
        const class_counters counters = this->counters(c);
        if (counters.free != free_blocks[c] ||
            counters.total != counters.slabs * blocks_per_slab(c)) {
            return fail(KV_INTERNAL,
                        "class {}: total {} free {} pinned {} parked {} do not add up ({} in maps)",
                        c, counters.total, counters.free, counters.pinned, counters.parked,
                        free_blocks[c]);
        }
        uint64_t pinned = 0;
        for (uint64_t i = 0; i < classes_[c].records.size(); ++i) {
            const uint32_t references = classes_[c].records[i].references;
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
