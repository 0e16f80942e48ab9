// The structs and functions of kv_cuda.h, one to one and without marshalling. A caller calls
// NativeLoader.Load first.
using System;
using System.Runtime.InteropServices;

#pragma warning disable 1591 // the header documents them

namespace Kvrt.Native
{
    /// <summary>A device that pools can be made on.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_cuda_device
    {
        public uint struct_size, flags;
        public void* next;
        public ulong memory_bytes;
        public uint ordinal, compute_major, compute_minor, multiprocessors, driver_version;
        public uint elastic, has_kernels, reserved0;
        public fixed byte name[64];
        public fixed byte reason[128];
    }

    /// <summary>Whose device memory a pool lives in; the functions are IntPtr.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_cuda_memory
    {
        public uint struct_size, flags;
        public void* next;
        public void* user;
        public IntPtr allocate;
        public IntPtr release;
    }

    /// <summary>Tables of a step in device memory.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_cuda_tables
    {
        public uint struct_size, flags;
        public void* next;
        public uint kv_head, place;
        public int* block_table;
        public long* slot_mapping;
        public int* query_start;
        public int* kv_len;
        public int* positions;
        public ulong block_table_stride;
    }

    /// <summary>How keys are scored by TriAttention.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_cuda_scoring
    {
        public uint struct_size, flags;
        public void* next;
        public uint method, reserved0;
        public ulong workspace_bytes;
    }

    /// <summary>How keys were scored.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public unsafe struct kv_cuda_scoring_report
    {
        public uint struct_size, flags;
        public void* next;
        public uint method, library_version;
        public ulong workspace_bytes, kernel_cohorts, product_cohorts, shape_hits, shape_misses;
        public uint kernel_kinds, product_kinds, open_kinds, scoring_flags;
        public fixed byte reason[128];
    }

    /// <summary>The exported functions of kv_cuda.h.</summary>
    public static unsafe class NativeCudaMethods
    {
        private const CallingConvention Cdecl = CallingConvention.Cdecl;

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_get_device(kv_cuda_device* device);

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_pool_create(
            kv_pool_config* config, kv_model* model, kv_cuda_memory* memory, IntPtr* out_pool);

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_step_use_stream(IntPtr step, IntPtr stream);

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_step_tables(
            IntPtr step, uint layer, kv_cuda_tables* tables);

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_pool_memory(IntPtr pool, ulong* out_bytes);

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_pool_set_scoring(IntPtr pool, kv_cuda_scoring* scoring);

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_pool_get_scoring(
            IntPtr pool, kv_cuda_scoring_report* report);

        [DllImport(NativeMethods.LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_cuda_seq_set_scores(
            IntPtr pool, ulong seq, uint layer, ulong first_position, ulong tokens, float* scores,
            IntPtr stream);
    }
}
