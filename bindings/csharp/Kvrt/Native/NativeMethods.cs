// Every function that libkvrt exports, one to one and without marshalling: pointers and fixed-width
// numbers only. kvrt.h documents them. A caller of this layer calls NativeLoader.Load first.
using System;
using System.Runtime.InteropServices;

#pragma warning disable 1591 // the header documents the functions

namespace Kvrt.Native
{
    /// <summary>The exported functions. kv_pool* and kv_step* are IntPtr, kv_seq is ulong,
    /// kv_status is int, const char* is a byte* of UTF-8.</summary>
    public static unsafe class NativeMethods
    {
        /// <summary>What NativeLoader, or mono's map in Kvrt.dll.config, resolves.</summary>
        public const string LibraryName = "kvrt";

        private const CallingConvention Cdecl = CallingConvention.Cdecl;

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern void kv_struct_init(void* instance, uint struct_size);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern uint kvrt_version();

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern byte* kv_status_name(int status);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_status_category(int status);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern UIntPtr kv_last_error(byte* buffer, UIntPtr capacity);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_model_apply_preset(
            kv_layer* layers, uint layer_count, uint preset);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_create(
            kv_pool_config* config, kv_model* model, IntPtr* out_pool);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern void kv_pool_release(IntPtr pool);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_pass_fence(IntPtr pool, ulong fence);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_check(IntPtr pool);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_create(IntPtr pool, kv_seq_config* config, ulong* out_seq);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_release(IntPtr pool, ulong seq);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_fork(
            IntPtr pool, ulong parent, uint count, ulong* out_children);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_truncate(IntPtr pool, ulong seq, ulong tokens_seen);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_set_policy(IntPtr pool, ulong seq, kv_policy* policy);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_pin(IntPtr pool, ulong seq, ulong first, ulong count);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_unpin(IntPtr pool, ulong seq);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_get_info(IntPtr pool, ulong seq, kv_seq_info* out_info);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_get_layer_info(
            IntPtr pool, ulong seq, uint layer, kv_seq_layer_info* out_info);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_get_retention(
            IntPtr pool, ulong seq, kv_retention_info* info);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_get_positions(
            IntPtr pool, ulong seq, uint layer, uint kv_head, ulong capacity, uint* out_positions,
            ulong* out_count);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_begin(IntPtr pool, IntPtr* out_step);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_append(
            IntPtr step, ulong seq, uint* token_ids, uint count, kv_append_info* out_info);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_append_batch(
            IntPtr step, uint items, ulong* seqs, uint* counts, uint* token_ids,
            kv_append_info* out_infos);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_reserve(IntPtr step, kv_reserve_report* report);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_remove(IntPtr step, ulong seq);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_accept(IntPtr step, ulong seq, uint count);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_accept_batch(
            IntPtr step, uint items, ulong* seqs, uint* counts);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_end(IntPtr step, kv_step_report* report);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_cancel(IntPtr step);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_step_export(IntPtr step, uint layer, kv_tables* tables);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_write(
            IntPtr step, uint layer, kv_tensor* keys, kv_tensor* values);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_attend(
            IntPtr step, uint layer, kv_tensor* queries, kv_tensor* results,
            kv_attend_options* options);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_compress(
            IntPtr pool, ulong seq, kv_compress_options* options, kv_compress_report* report);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_policy_footprint(
            IntPtr pool, kv_policy* policy, kv_policy_footprint* footprint);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_set_scores(
            IntPtr pool, ulong seq, uint layer, ulong first_position, ulong tokens, float* scores);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_get_scores(
            IntPtr pool, ulong seq, uint layer, uint kv_head, ulong capacity, float* out_scores,
            ulong* out_count);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_set_statistics(
            IntPtr pool, kv_query_statistics* statistics);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_get_statistics(
            IntPtr pool, ulong seq, kv_query_statistics* statistics);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_save_statistics(IntPtr pool, ulong seq, byte* path);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_load_statistics(IntPtr pool, byte* path);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_seq_fit_affine(IntPtr pool, ulong seq, kv_affine_fit* fit);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_get_stats(IntPtr pool, kv_pool_stats* out_stats);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_get_class_stats(
            IntPtr pool, uint class_index, kv_class_stats* out_stats);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_pool_get_layer_stats(IntPtr pool, kv_layer_stats* stats);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_plan(
            kv_pool_config* config, kv_model* model, kv_plan_report* report);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern int kv_capabilities(kv_capabilities_report* out_report);

        [DllImport(LibraryName, CallingConvention = Cdecl)]
        public static extern ulong kv_live_count(uint kind);
    }
}
