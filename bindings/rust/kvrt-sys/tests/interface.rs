//! The declarations against the golden files that the C compiler keeps true: sizes and offsets of
//! every struct, the value of every constant, the name and address of every function.

use std::fmt::Write;
use std::mem::{align_of, size_of, MaybeUninit};
use std::path::PathBuf;
use std::ptr::addr_of;

use kvrt_sys::*;

fn golden(name: &str) -> String {
    let folder = std::env::var_os("KVRT_GOLDEN_DIR")
        .expect("KVRT_GOLDEN_DIR must name the folder of the golden files (tests/abi/golden)");
    let path = PathBuf::from(folder).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every line that only one side has, so that a gap is named.
fn assert_same_lines(ours: &str, golden: &str, what: &str) {
    let ours: Vec<&str> = ours.lines().collect();
    let golden: Vec<&str> = golden.lines().collect();
    let missing: Vec<_> = golden.iter().filter(|line| !ours.contains(line)).collect();
    let surplus: Vec<_> = ours.iter().filter(|line| !golden.contains(line)).collect();
    assert!(
        missing.is_empty() && surplus.is_empty(),
        "{what}\n  only in the golden file: {missing:#?}\n  only here: {surplus:#?}"
    );
    assert_eq!(ours, golden, "{what}: the order differs");
}

fn size_behind<T>(_: *const T) -> usize {
    size_of::<T>()
}

macro_rules! layouts {
    ($($name:ident { $($field:ident),* })*) => {{
        let mut text = String::new();
        $(
            let (size, alignment) = (size_of::<$name>(), align_of::<$name>());
            writeln!(text, "{} size={size} alignment={alignment}", stringify!($name)).unwrap();
            let place = MaybeUninit::<$name>::uninit();
            let start = place.as_ptr();
            $(
                // SAFETY: the field's address is taken, nothing is read.
                let field = unsafe { addr_of!((*start).$field) };
                let (offset, size) = (field as usize - start as usize, size_behind(field));
                writeln!(text, "  {} offset={offset} size={size}", stringify!($field)).unwrap();
            )*
        )*
        text
    }};
}

macro_rules! constants {
    ($($name:ident)*) => {
        [$(format!("{} {}\n", stringify!($name), $name)),*].concat()
    };
}

macro_rules! functions {
    ($($name:ident)*) => {
        [$((stringify!($name), $name as *const ())),*]
    };
}

#[test]
fn structs_lie_as_the_c_compiler_lays_them() {
    let text = layouts! {
        kv_struct_header { struct_size, flags, next }
        kv_hooks { struct_size, flags, next, user, allocate, release, log, now, parallel_for
            }
        kv_rope { struct_size, flags, next, style, dimensions, theta, attention_factor,
            inverse_frequencies }
        kv_storage { struct_size, flags, next, scales, scale_count, reserved0, channel_means,
            channel_scales, channel_heads, channel_dim }
        kv_layer { struct_size, flags, next, query_heads, kv_heads, key_dim, value_dim,
            key_format, value_format, shared_layer, window, window_sinks, reserved0,
            softmax_scale, logit_softcap, sink_logits, alibi_slopes, rope, key_storage,
            value_storage, demoted_key_format, demoted_value_format, demote_after, reserved1,
            demoted_key_storage, demoted_value_storage }
        kv_model { struct_size, flags, next, layers, layer_count, reserved0 }
        kv_pool_config { struct_size, flags, next, arena_bytes, device, layout,
            block_tokens, max_sequences, max_tokens_per_sequence, max_step_sequences,
            max_step_tokens, threads, hooks, max_observed_sequences, pressure_percent }
        kv_seq_config { struct_size, flags, next, policy, user_data }
        kv_seq_info { struct_size, flags, next, capacity, written, accepted, published,
            blocks, bytes, user_data, in_step, compactions, rounds_skipped, last_outcome,
            last_failure }
        kv_seq_layer_info { struct_size, flags, next, retained, blocks, shared_blocks }
        kv_retention_info { struct_size, flags, next, layer, kv_head, rounds, tokens_removed,
            blocks_returned, lost_attention, lost_attention_sum }
        kv_append_info { struct_size, flags, next, first_position, item, first_row }
        kv_reserve_report { struct_size, flags, next, need_blocks, need_bytes,
            free_bytes_now, free_bytes_after_fence, items_that_fit, item_status_capacity,
            item_statuses }
        kv_step_report { struct_size, flags, next, fence, accepted_tokens,
            window_blocks_returned, compactions, compactions_skipped, blocks_returned,
            bytes_returned, pressure_rounds, last_skip_outcome, last_skip_status, demoted_blocks,
            demoted_bytes }
        kv_tables { struct_size, flags, next, block_table, block_table_stride,
            block_table_capacity, indptr, indices, last_page_len, slot_mapping, query_start,
            kv_len, positions, slot_positions, slot_indptr, indices_capacity, item_capacity,
            token_capacity, slot_positions_capacity, indices_count, slot_positions_count,
            item_count, token_count, max_blocks, layout, key_format, value_format,
            block_tokens, slot_group, base, block_stride, block_bytes, key_offset,
            value_offset, key_stride_group, key_stride_slot, key_stride_head,
            key_stride_dim, value_stride_group, value_stride_slot, value_stride_head,
            value_stride_dim, key_scales, value_scales, fence, key_words, value_words,
            key_word_bytes, value_word_bytes, sealed_key_format, sealed_value_format,
            sealed_blocks, sealed_block_bytes, sealed_key_offset, sealed_value_offset,
            sealed_key_head_bytes, sealed_value_head_bytes, key_identity, value_identity,
            kv_head, reserved0, sealed_key_words, sealed_value_words, sealed_key_word_bytes,
            sealed_value_word_bytes, sealed_key_stride_group, sealed_key_stride_slot,
            sealed_key_stride_head, sealed_key_stride_dim, sealed_value_stride_group,
            sealed_value_stride_slot, sealed_value_stride_head, sealed_value_stride_dim,
            sealed_key_scales, sealed_value_scales }
        kv_tensor { struct_size, flags, next, data, dtype, reserved0, rows, heads, dim,
            row_stride, head_stride, dim_stride }
        kv_attend_options { struct_size, flags, next, log_sum_exp }
        kv_policy { struct_size, flags, next, scorer, selection, budget, every,
            prompt_tokens, sinks, recent, offset_max, skip_layers, reserved0, seed, allocator,
            slack, window, pool_width, observe_every, decay, prior_share, redundancy,
            similarity, floor_share, threshold, steepness, value_reserve, segments,
            segment_quota, reserved1 }
        kv_compress_options { struct_size, flags, next, policy }
        kv_compress_report { struct_size, flags, next, outcome, layers, tokens_before,
            tokens_after, blocks_before, blocks_after, bytes_before, bytes_after,
            blocks_returned, bytes_returned, blocks_copied, slabs_given_back, nanoseconds,
            recoded_rows, recoding_error, lost_attention }
        kv_policy_footprint { struct_size, flags, next, step_tokens, tokens,
            tokens_after_round, tokens_steady, blocks_steady, bytes_steady }
        kv_query_statistics { struct_size, flags, next, layer, query_heads, bands,
            reserved0, tokens, mean_real, mean_imaginary, mean_magnitude,
            variance_real, variance_imaginary, covariance }
        kv_affine_fit { struct_size, flags, next, layer, kv_heads, key_dim, reserved0,
            first_position, tokens, channel_means, channel_scales, tokens_used, identity }
        kv_class_stats { struct_size, flags, next, block_bytes, blocks_per_slab, slabs,
            total, free, cached, pinned, parked, loading }
        kv_pool_stats { struct_size, flags, next, slab_bytes, slabs_total, slabs_free,
            slabs_resident, arena_bytes, live_bytes, live_blocks, peak_live_blocks, total,
            free, cached, pinned, parked, loading, blocks_allocated, blocks_returned,
            bytes_returned, blocks_returned_by_compaction, bytes_returned_by_compaction,
            compactions, compactions_skipped, slabs_given_back, steps_ended,
            steps_cancelled, tokens_accepted, host_allocations, sequences, open_steps,
            classes, reserved0, metadata_bytes }
        kv_layer_stats { struct_size, flags, next, layer, head_capacity, kv_heads, reserved0,
            saturated_keys, saturated_values, recoded_rows, recoding_error }
        kv_plan_report { struct_size, flags, next, sequences, tokens_per_sequence,
            bytes_per_token, bytes_per_sequence, arena_bytes_needed, sequences_that_fit,
            tokens_that_fit, metadata_bytes, bytes_per_block, blocks_per_sequence,
            full_bytes_per_token, constant_bytes_per_sequence, tokens_that_fit_each,
            tokens_by_bytes, layer, reserved0, layer_bytes_per_block,
            layer_bytes_per_sequence }
        kv_capabilities_report { struct_size, flags, next, formats, devices, layouts,
            scorers, selections, min_head_dim, max_head_dim, head_dim_multiple, max_layers,
            simd_target }
    };
    assert_same_lines(&text, &golden("layout.txt"), "layout.txt");
}

#[test]
fn structs_of_cuda_lie_as_the_c_compiler_lays_them() {
    let text = layouts! {
        kv_cuda_device { struct_size, flags, next, memory_bytes, ordinal, compute_major,
            compute_minor, multiprocessors, driver_version, elastic, has_kernels, reserved0,
            name, reason }
        kv_cuda_memory { struct_size, flags, next, user, allocate, release }
        kv_cuda_tables { struct_size, flags, next, kv_head, place, block_table, slot_mapping,
            query_start, kv_len, positions, block_table_stride }
        kv_cuda_scoring { struct_size, flags, next, method, reserved0, workspace_bytes }
        kv_cuda_scoring_report { struct_size, flags, next, method, library_version,
            workspace_bytes, kernel_cohorts, product_cohorts, shape_hits, shape_misses,
            kernel_kinds, product_kinds, open_kinds, scoring_flags, reason }
    };
    assert_same_lines(&text, &golden("cuda_layout.txt"), "cuda_layout.txt");
}

#[test]
fn constants_have_the_values_of_the_header() {
    let text = constants! {
        KVRT_VERSION_MAJOR KVRT_VERSION_MINOR KVRT_VERSION_PATCH KVRT_VERSION KV_OK
        KV_INVALID KV_UNSUPPORTED KV_STALE KV_NO_SNAPSHOT KV_AGAIN KV_TOO_LARGE KV_LIMIT
        KV_NO_MEMORY KV_DEVICE KV_IO KV_CORRUPT KV_INTERNAL KV_CATEGORY_OK
        KV_CATEGORY_ARGUMENT KV_CATEGORY_STATE KV_CATEGORY_CAPACITY KV_CATEGORY_DEVICE
        KV_CATEGORY_IO KV_CATEGORY_INTERNAL KV_LOG_DEBUG KV_LOG_INFO KV_LOG_WARNING
        KV_LOG_ERROR KV_FORMAT_DEFAULT KV_FORMAT_F32 KV_FORMAT_F16 KV_FORMAT_BF16
        KV_FORMAT_FP8_E4M3 KV_FORMAT_FP8_E5M2 KV_FORMAT_FP8_TOKEN KV_FORMAT_INT8_TOKEN
        KV_FORMAT_INT4_TOKEN KV_FORMAT_Q8_0 KV_FORMAT_Q4_0 KV_FORMAT_Q4_1 KV_FORMAT_NVFP4
        KV_FORMAT_MXFP4 KV_FORMAT_KIVI4 KV_FORMAT_KIVI2 KV_FORMAT_KVARN4 KV_FORMAT_KVARN2
        KV_FORMAT_TURBO4 KV_FORMAT_TURBO3 KV_FORMAT_AFFINE4 KV_STORAGE_SCALE_ONE
        KV_STORAGE_ROTATE KV_ROPE_NONE KV_ROPE_HALF
        KV_ROPE_INTERLEAVED KV_LAYER_SHARED KV_LAYER_LANE_PER_HEAD KV_LAYER_CACHE_POSITIONS
        KV_PRESET_NEAR_LOSSLESS KV_PRESET_BALANCED KV_PRESET_SMALLEST KV_DEVICE_DEFAULT
        KV_DEVICE_CPU KV_DEVICE_CUDA KV_LAYOUT_NATIVE KV_LAYOUT_HND KV_LAYOUT_NHD
        KV_POOL_ELASTIC KV_POOL_THREAD_SAFE KV_POOL_DEBUG KV_POOL_HOST_FENCES
        KV_SEQ_GATHER_STATISTICS KV_DTYPE_F32 KV_DTYPE_F16 KV_DTYPE_BF16
        KV_ATTEND_NO_STATISTICS KV_SCORER_NONE KV_SCORER_TRIATTENTION KV_SCORER_STREAMING
        KV_SCORER_KEY_NORM KV_SCORER_RANDOM KV_SCORER_H2O KV_SCORER_SCISSORHANDS
        KV_SCORER_TOVA KV_SCORER_SNAPKV KV_SCORER_RKV KV_SCORER_VASE_ATTENTION
        KV_SCORER_VASE_SKETCH KV_SCORER_KEYDIFF KV_SCORER_LAGKV
        KV_SCORER_EXPECTED_ATTENTION KV_SCORER_HOST KV_SCORER_BLEND KV_SELECT_DEFAULT
        KV_SELECT_PER_LAYER_PER_HEAD KV_SELECT_PER_HEAD KV_SELECT_UNION
        KV_SELECT_PER_LAYER KV_ALLOCATE_DEFAULT KV_ALLOCATE_UNIFORM KV_ALLOCATE_PYRAMID
        KV_ALLOCATE_ADAPTIVE KV_ALLOCATE_THRESHOLD KV_POLICY_PROTECT_PROMPT
        KV_POLICY_PROMPT_ON_TOP KV_POLICY_OFFSETS_MAX KV_POLICY_STATISTICS_ONLINE
        KV_POLICY_SAMPLE KV_POLICY_POOL_MAX KV_POLICY_EXACT_REDUNDANCY
        KV_POLICY_AT_PROMPT_END KV_COMPRESS_DONE KV_COMPRESS_NOTHING KV_COMPRESS_DEFERRED
        KV_COMPRESS_NO_STATISTICS KV_COMPRESS_NO_OBSERVATIONS KV_LIVE_POOLS
        KV_LIVE_SEQUENCES KV_LIVE_STEPS KV_CUDA_TABLES_ATTENDED KV_CUDA_SCORE_KERNEL
        KV_CUDA_SCORE_PRODUCTS KV_CUDA_SCORE_MEASURED KV_CUDA_SCORING_TF32
    };
    assert_same_lines(&text, &golden("constants.txt"), "constants.txt");
}

/// Linking this test shows that the library has each of them.
#[test]
fn every_function_of_the_library_is_declared() {
    let functions = functions! {
        kv_attend kv_capabilities kv_compress kv_last_error kv_live_count kv_model_apply_preset
        kv_plan
        kv_pool_check kv_pool_create kv_pool_get_class_stats kv_pool_get_layer_stats
        kv_pool_get_stats
        kv_pool_load_statistics kv_pool_pass_fence kv_pool_policy_footprint kv_pool_release
        kv_pool_set_statistics
        kv_seq_append kv_seq_create kv_seq_fit_affine kv_seq_fork kv_seq_get_info
        kv_seq_get_layer_info
        kv_seq_get_positions kv_seq_get_retention kv_seq_get_scores kv_seq_get_statistics
        kv_seq_pin kv_seq_release kv_seq_save_statistics kv_seq_set_policy kv_seq_set_scores
        kv_seq_truncate kv_seq_unpin
        kv_status_category kv_status_name kv_step_accept kv_step_accept_batch
        kv_step_append_batch kv_step_begin kv_step_cancel kv_step_end kv_step_export
        kv_step_remove kv_step_reserve kv_struct_init kv_write kvrt_version
    };
    let mut names = String::new();
    for (name, address) in functions {
        assert!(!address.is_null(), "{name}");
        writeln!(names, "{name}").unwrap();
    }
    assert_same_lines(&names, &golden("symbols.txt"), "symbols.txt");
}

#[test]
fn every_function_of_cuda_is_declared() {
    let functions = functions! {
        kv_cuda_get_device kv_cuda_pool_create kv_cuda_pool_get_scoring kv_cuda_pool_memory
        kv_cuda_pool_set_scoring kv_cuda_seq_set_scores kv_cuda_step_tables kv_cuda_step_use_stream
    };
    let mut names = String::new();
    for (name, address) in functions {
        assert!(!address.is_null(), "{name}");
        writeln!(names, "{name}").unwrap();
    }
    assert_same_lines(&names, &golden("cuda_symbols.txt"), "cuda_symbols.txt");
}

#[test]
fn initial_values_are_those_of_kv_struct_init() {
    macro_rules! compare {
        ($($name:ident)*) => {$(
            let ours = $name::default();
            let size = size_of::<$name>();
            let mut theirs = MaybeUninit::<$name>::uninit();
            // SAFETY: the library zeroes `size` bytes of it; both are compared as plain bytes, and
            // no struct of the interface has padding.
            unsafe {
                kv_struct_init(theirs.as_mut_ptr().cast(), size as u32);
                let ours = std::slice::from_raw_parts((&ours as *const $name).cast::<u8>(), size);
                let theirs = std::slice::from_raw_parts(theirs.as_ptr().cast::<u8>(), size);
                assert_eq!(ours, theirs, stringify!($name));
            }
        )*};
    }
    compare! {
        kv_struct_header kv_hooks kv_storage kv_rope kv_layer kv_model kv_pool_config
        kv_seq_config kv_seq_info kv_seq_layer_info kv_retention_info kv_append_info
        kv_reserve_report kv_step_report kv_tables kv_tensor kv_attend_options kv_policy
        kv_compress_options kv_compress_report kv_policy_footprint kv_query_statistics
        kv_affine_fit kv_class_stats kv_pool_stats kv_layer_stats kv_plan_report
        kv_capabilities_report kv_cuda_device kv_cuda_memory kv_cuda_tables
        kv_cuda_scoring kv_cuda_scoring_report
    }
}

#[test]
fn names_and_categories_of_statuses_are_those_of_the_golden_file() {
    let mut text = String::new();
    for line in golden("statuses.txt").lines() {
        let code: i32 = line.split(' ').nth(1).and_then(|code| code.parse().ok()).expect(line);
        // SAFETY: the library returns a literal.
        let name = unsafe { std::ffi::CStr::from_ptr(kv_status_name(code)) }.to_str().unwrap();
        // SAFETY: a plain function.
        let category = unsafe { kv_status_category(code) };
        writeln!(text, "{name} {code} category {category}").unwrap();
    }
    assert_same_lines(&text, &golden("statuses.txt"), "statuses.txt");
}

#[test]
fn the_library_is_the_version_that_is_declared() {
    // SAFETY: a plain function.
    let version = unsafe { kvrt_version() };
    assert_eq!(version / 100, KVRT_VERSION / 100, "major and minor version");
}
