// The structs of kvrt.h and kv_cuda.h as Go sees them, for the test of their layout.

package kvrt

// #include "shims.h"
import "C"

// rawCUDAStructs are those of kv_cuda.h.
func rawCUDAStructs() map[string]any {
	return map[string]any{
		"kv_cuda_device": C.kv_cuda_device{},
		"kv_cuda_memory": C.kv_cuda_memory{},
		"kv_cuda_tables": C.kv_cuda_tables{},

		"kv_cuda_scoring":        C.kv_cuda_scoring{},
		"kv_cuda_scoring_report": C.kv_cuda_scoring_report{},
	}
}

// rawStructs holds a value of each, by its C name.
func rawStructs() map[string]any {
	return map[string]any{
		"kv_struct_header":       C.kv_struct_header{},
		"kv_hooks":               C.kv_hooks{},
		"kv_rope":                C.kv_rope{},
		"kv_storage":             C.kv_storage{},
		"kv_layer":               C.kv_layer{},
		"kv_model":               C.kv_model{},
		"kv_pool_config":         C.kv_pool_config{},
		"kv_seq_config":          C.kv_seq_config{},
		"kv_seq_info":            C.kv_seq_info{},
		"kv_seq_layer_info":      C.kv_seq_layer_info{},
		"kv_retention_info":      C.kv_retention_info{},
		"kv_append_info":         C.kv_append_info{},
		"kv_reserve_report":      C.kv_reserve_report{},
		"kv_step_report":         C.kv_step_report{},
		"kv_tables":              C.kv_tables{},
		"kv_tensor":              C.kv_tensor{},
		"kv_attend_options":      C.kv_attend_options{},
		"kv_policy":              C.kv_policy{},
		"kv_compress_options":    C.kv_compress_options{},
		"kv_compress_report":     C.kv_compress_report{},
		"kv_policy_footprint":    C.kv_policy_footprint{},
		"kv_query_statistics":    C.kv_query_statistics{},
		"kv_affine_fit":          C.kv_affine_fit{},
		"kv_class_stats":         C.kv_class_stats{},
		"kv_pool_stats":          C.kv_pool_stats{},
		"kv_layer_stats":         C.kv_layer_stats{},
		"kv_plan_report":         C.kv_plan_report{},
		"kv_capabilities_report": C.kv_capabilities_report{},
	}
}
