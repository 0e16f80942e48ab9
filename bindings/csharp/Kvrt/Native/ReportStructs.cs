// The structs that the library fills. One to one with kvrt.h, which says what each field means:
// names, order and types are its own, so that tests compare sizes and offsets with the C
// compiler's.
using System.Runtime.InteropServices;

#pragma warning disable 1591 // the header documents the fields

namespace Kvrt.Native
{
    /// <summary>The lengths and blocks of a sequence.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_seq_info
    {
        public uint struct_size, flags;
        public void* next;
        public ulong capacity;
        public ulong written;
        public ulong accepted;
        public ulong published;
        public ulong blocks;
        public ulong bytes;
        public ulong user_data;
        public uint in_step;
        public uint compactions;
        public ulong rounds_skipped;
        public uint last_outcome;
        public int last_failure;
    }

    /// <summary>What one layer holds of a sequence.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_seq_layer_info
    {
        public uint struct_size, flags;
        public void* next;
        public ulong retained;
        public ulong blocks;
        public ulong shared_blocks;
    }

    /// <summary>What rounds have done to one layer and head of a sequence.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_retention_info
    {
        public uint struct_size, flags;
        public void* next;
        public uint layer, kv_head;
        public ulong rounds;
        public ulong tokens_removed;
        public ulong blocks_returned;
        public double lost_attention;
        public double lost_attention_sum;
    }

    /// <summary>Where appended tokens stand.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_append_info
    {
        public uint struct_size, flags;
        public void* next;
        public ulong first_position;
        public uint item;
        public uint first_row;
    }

    /// <summary>What reserve found.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_reserve_report
    {
        public uint struct_size, flags;
        public void* next;
        public ulong need_blocks;
        public ulong need_bytes;
        public ulong free_bytes_now;
        public ulong free_bytes_after_fence;
        public uint items_that_fit;
        public uint item_status_capacity;
        public int* item_statuses;
    }

    /// <summary>What a step brought when it ended.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_step_report
    {
        public uint struct_size, flags;
        public void* next;
        public ulong fence;
        public ulong accepted_tokens;
        public ulong window_blocks_returned;
        public ulong compactions;
        public ulong compactions_skipped;
        public ulong blocks_returned;
        public ulong bytes_returned;
        public ulong pressure_rounds;
        public uint last_skip_outcome;
        public int last_skip_status;
        public ulong demoted_blocks;
        public ulong demoted_bytes;
    }

    /// <summary>Buffers of the caller for one layer's tables, and the constants of its
    /// blocks.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_tables
    {
        public uint struct_size, flags;
        public void* next;
        public int* block_table;
        public ulong block_table_stride;
        public ulong block_table_capacity;
        public int* indptr;
        public int* indices;
        public int* last_page_len;
        public long* slot_mapping;
        public int* query_start;
        public int* kv_len;
        public int* positions;
        public int* slot_positions;
        public int* slot_indptr;
        public ulong indices_capacity;
        public ulong item_capacity;
        public ulong token_capacity;
        public ulong slot_positions_capacity;
        public ulong indices_count;
        public ulong slot_positions_count;
        public uint item_count;
        public uint token_count;
        public uint max_blocks;
        public uint layout;
        public uint key_format;
        public uint value_format;
        public uint block_tokens;
        public uint slot_group;
        public void* @base;
        public long block_stride;
        public long block_bytes;
        public long key_offset;
        public long value_offset;
        public long key_stride_group, key_stride_slot, key_stride_head, key_stride_dim;
        public long value_stride_group, value_stride_slot, value_stride_head, value_stride_dim;
        public float* key_scales;
        public float* value_scales;
        public ulong fence;
        public uint key_words, value_words;
        public uint key_word_bytes, value_word_bytes;
        public uint sealed_key_format, sealed_value_format;
        public int* sealed_blocks;
        public long sealed_block_bytes;
        public long sealed_key_offset, sealed_value_offset;
        public long sealed_key_head_bytes, sealed_value_head_bytes;
        public ulong key_identity, value_identity;
        public uint kv_head;
        public uint reserved0;
        public uint sealed_key_words, sealed_value_words;
        public uint sealed_key_word_bytes, sealed_value_word_bytes;
        public long sealed_key_stride_group, sealed_key_stride_slot;
        public long sealed_key_stride_head, sealed_key_stride_dim;
        public long sealed_value_stride_group, sealed_value_stride_slot;
        public long sealed_value_stride_head, sealed_value_stride_dim;
        public float* sealed_key_scales;
        public float* sealed_value_scales;
    }

    /// <summary>What a round of compaction brought.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_compress_report
    {
        public uint struct_size, flags;
        public void* next;
        public uint outcome;
        public uint layers;
        public ulong tokens_before, tokens_after;
        public ulong blocks_before, blocks_after;
        public ulong bytes_before, bytes_after;
        public ulong blocks_returned;
        public ulong bytes_returned;
        public ulong blocks_copied;
        public ulong slabs_given_back;
        public ulong nanoseconds;
        public ulong recoded_rows;
        public double recoding_error;
        public double lost_attention;
    }

    /// <summary>What a sequence takes under a policy.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_policy_footprint
    {
        public uint struct_size, flags;
        public void* next;
        public ulong step_tokens;
        public ulong tokens;
        public ulong tokens_after_round;
        public ulong tokens_steady;
        public ulong blocks_steady;
        public ulong bytes_steady;
    }

    /// <summary>Counters of one class of blocks.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_class_stats
    {
        public uint struct_size, flags;
        public void* next;
        public ulong block_bytes;
        public ulong blocks_per_slab;
        public ulong slabs;
        public ulong total, free, cached, pinned, parked, loading;
    }

    /// <summary>Counters of a pool.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_pool_stats
    {
        public uint struct_size, flags;
        public void* next;
        public ulong slab_bytes;
        public ulong slabs_total, slabs_free, slabs_resident;
        public ulong arena_bytes;
        public ulong live_bytes;
        public ulong live_blocks, peak_live_blocks;
        public ulong total, free, cached, pinned, parked, loading;
        public ulong blocks_allocated, blocks_returned, bytes_returned;
        public ulong blocks_returned_by_compaction, bytes_returned_by_compaction;
        public ulong compactions, compactions_skipped;
        public ulong slabs_given_back;
        public ulong steps_ended, steps_cancelled, tokens_accepted;
        public ulong host_allocations;
        public uint sequences, open_steps, classes, reserved0;
        public ulong metadata_bytes;
    }

    /// <summary>Buffers of the caller for counters of one layer.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_layer_stats
    {
        public uint struct_size, flags;
        public void* next;
        public uint layer;
        public uint head_capacity;
        public uint kv_heads;
        public uint reserved0;
        public ulong* saturated_keys;
        public ulong* saturated_values;
        public ulong recoded_rows;
        public double recoding_error;
    }

    /// <summary>What a configuration needs and holds.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_plan_report
    {
        public uint struct_size, flags;
        public void* next;
        public ulong sequences;
        public ulong tokens_per_sequence;
        public ulong bytes_per_token;
        public ulong bytes_per_sequence;
        public ulong arena_bytes_needed;
        public ulong sequences_that_fit;
        public ulong tokens_that_fit;
        public ulong metadata_bytes;
        public ulong bytes_per_block;
        public ulong blocks_per_sequence;
        public ulong full_bytes_per_token;
        public ulong constant_bytes_per_sequence;
        public ulong tokens_that_fit_each;
        public ulong tokens_by_bytes;
        public uint layer;
        public uint reserved0;
        public ulong layer_bytes_per_block;
        public ulong layer_bytes_per_sequence;
    }

    /// <summary>What this library can do.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_capabilities_report
    {
        public uint struct_size, flags;
        public void* next;
        public ulong formats;
        public ulong devices;
        public ulong layouts;
        public ulong scorers;
        public ulong selections;
        public uint min_head_dim, max_head_dim, head_dim_multiple, max_layers;
        public fixed byte simd_target[32];
    }
}
