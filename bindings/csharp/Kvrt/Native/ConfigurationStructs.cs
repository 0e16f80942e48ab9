// The structs that a caller fills. One to one with kvrt.h, which says what each field means: names,
// order and types are its own, so that tests compare sizes and offsets with the C compiler's.
using System;
using System.Runtime.InteropServices;

#pragma warning disable 1591 // the header documents the fields

namespace Kvrt.Native
{
    /// <summary>What every sized struct begins with.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_struct_header
    {
        public uint struct_size;
        public uint flags;
        public void* next;
    }

    /// <summary>Function pointers of the host.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_hooks
    {
        public uint struct_size, flags;
        public void* next;
        public void* user;
        public IntPtr allocate; // function pointers of cdecl, NULL: none
        public IntPtr release;
        public IntPtr log;
        public IntPtr now;
        public IntPtr parallel_for;
    }

    /// <summary>How the engine rotated keys and queries.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_rope
    {
        public uint struct_size, flags;
        public void* next;
        public uint style;
        public uint dimensions;
        public double theta;
        public double attention_factor;
        public double* inverse_frequencies;
    }

    /// <summary>What keys or values are stored with, besides their format.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_storage
    {
        public uint struct_size, flags;
        public void* next;
        public float* scales;
        public uint scale_count;
        public uint reserved0;
        public float* channel_means;
        public float* channel_scales;
        public uint channel_heads;
        public uint channel_dim;
    }

    /// <summary>One layer of a model.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_layer
    {
        public uint struct_size, flags;
        public void* next;
        public uint query_heads;
        public uint kv_heads;
        public uint key_dim;
        public uint value_dim;
        public uint key_format;
        public uint value_format;
        public uint shared_layer;
        public uint window;
        public uint window_sinks;
        public uint reserved0;
        public float softmax_scale;
        public float logit_softcap;
        public float* sink_logits;
        public float* alibi_slopes;
        public kv_rope* rope;
        public kv_storage* key_storage;
        public kv_storage* value_storage;
        public uint demoted_key_format;
        public uint demoted_value_format;
        public uint demote_after;
        public uint reserved1;
        public kv_storage* demoted_key_storage;
        public kv_storage* demoted_value_storage;
    }

    /// <summary>The layers of a model.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_model
    {
        public uint struct_size, flags;
        public void* next;
        public kv_layer* layers;
        public uint layer_count;
        public uint reserved0;
    }

    /// <summary>The limits of a pool.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_pool_config
    {
        public uint struct_size, flags;
        public void* next;
        public ulong arena_bytes;
        public uint device;
        public uint layout;
        public uint block_tokens;
        public uint max_sequences;
        public uint max_tokens_per_sequence;
        public uint max_step_sequences;
        public uint max_step_tokens;
        public uint threads;
        public kv_hooks* hooks;
        public uint max_observed_sequences;
        public uint pressure_percent;
    }

    /// <summary>What a sequence is created with.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_seq_config
    {
        public uint struct_size, flags;
        public void* next;
        public kv_policy* policy;
        public ulong user_data;
    }

    /// <summary>[rows, heads, dim] in the caller's memory; strides in elements.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_tensor
    {
        public uint struct_size, flags;
        public void* next;
        public void* data;
        public uint dtype;
        public uint reserved0;
        public ulong rows, heads, dim;
        public long row_stride, head_stride, dim_stride;
    }

    /// <summary>Options of kv_attend.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_attend_options
    {
        public uint struct_size, flags;
        public void* next;
        public float* log_sum_exp;
    }

    /// <summary>Which tokens to retain.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_policy
    {
        public uint struct_size, flags;
        public void* next;
        public uint scorer;
        public uint selection;
        public uint budget;
        public uint every;
        public uint prompt_tokens;
        public uint sinks;
        public uint recent;
        public uint offset_max;
        public uint skip_layers;
        public uint reserved0;
        public ulong seed;
        public uint allocator;
        public uint slack;
        public uint window;
        public uint pool_width;
        public uint observe_every;
        public float decay;
        public float prior_share;
        public float redundancy;
        public float similarity;
        public float floor_share;
        public float threshold;
        public uint steepness;
        public uint value_reserve;
        public uint segments;
        public uint segment_quota;
        public uint reserved1;
    }

    /// <summary>Options of kv_compress.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_compress_options
    {
        public uint struct_size, flags;
        public void* next;
        public kv_policy* policy;
    }

    /// <summary>Means and covariances of a layer's queries; the arrays are [query_heads,
    /// bands].</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_query_statistics
    {
        public uint struct_size, flags;
        public void* next;
        public uint layer;
        public uint query_heads;
        public uint bands;
        public uint reserved0;
        public ulong tokens;
        public float* mean_real;
        public float* mean_imaginary;
        public float* mean_magnitude;
        public float* variance_real;
        public float* variance_imaginary;
        public float* covariance;
    }

    /// <summary>Constants of channels, measured on a layer's keys; the arrays are [kv_heads,
    /// key_dim].</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_affine_fit
    {
        public uint struct_size, flags;
        public void* next;
        public uint layer;
        public uint kv_heads;
        public uint key_dim;
        public uint reserved0;
        public ulong first_position;
        public ulong tokens;
        public float* channel_means;
        public float* channel_scales;
        public ulong tokens_used;
        public ulong identity;
    }
}
