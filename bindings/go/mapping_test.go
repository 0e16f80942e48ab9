// Every field of Go's structs meets the field of the same name in C, in both directions: the tests
// of behaviour would not notice two counters that changed places.

package kvrt

import (
	"reflect"
	"regexp"
	"strings"
	"testing"
	"unsafe"
)

var (
	wordEnd    = regexp.MustCompile(`([a-z0-9])([A-Z])`)
	acronymEnd = regexp.MustCompile(`([A-Z])([A-Z][a-z])`)
)

// cName is the name in C of a field: KVHeads is kv_heads.
func cName(name string) string {
	name = acronymEnd.ReplaceAllString(name, "${1}_${2}")
	return strings.ToLower(wordEnd.ReplaceAllString(name, "${1}_${2}"))
}

// settable is a field of an addressable struct, also one that is not exported.
func settable(field reflect.Value) reflect.Value {
	return reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem()
}

// number is a field's value as a number, false if it is none.
func number(field reflect.Value) (float64, bool) {
	switch field.Kind() {
	case reflect.Uint32, reflect.Uint64:
		return float64(field.Uint()), true
	case reflect.Int32, reflect.Int64:
		return float64(field.Int()), true
	case reflect.Float32, reflect.Float64:
		return field.Float(), true
	case reflect.Bool:
		if field.Bool() {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}

// distinct sets every number of a struct to another value.
func distinct(target reflect.Value) {
	for i := 0; i < target.NumField(); i++ {
		field := settable(target.Field(i))
		switch field.Kind() {
		case reflect.Uint32, reflect.Uint64:
			field.SetUint(uint64(i + 1))
		case reflect.Int32, reflect.Int64:
			field.SetInt(int64(i + 1))
		case reflect.Float32, reflect.Float64:
			field.SetFloat(float64(i + 1))
		}
	}
}

// sameFields compares the numbers of two structs by name, `ignored` apart.
func sameFields(t *testing.T, ours, theirs reflect.Value, ignored ...string) {
	t.Helper()
	skip := map[string]bool{"struct_size": true, "reserved0": true, "reserved1": true}
	for _, name := range ignored {
		skip[name] = true
	}
	met := map[string]bool{}
	for i := 0; i < ours.NumField(); i++ {
		name := cName(ours.Type().Field(i).Name)
		value, isNumber := number(ours.Field(i))
		if !isNumber || skip[name] {
			continue
		}
		met[name] = true
		other := theirs.FieldByName(name)
		if !other.IsValid() {
			t.Errorf("%s has no field %s", theirs.Type(), name)
			continue
		}
		wanted, _ := number(other)
		if ours.Field(i).Kind() == reflect.Bool && wanted != 0 {
			wanted = 1
		}
		if value != wanted {
			t.Errorf("%s is %v in Go and %v in C", name, value, wanted)
		}
	}
	for i := 0; i < theirs.NumField(); i++ {
		name := theirs.Type().Field(i).Name
		if _, isNumber := number(theirs.Field(i)); isNumber && !met[name] && !skip[name] {
			t.Errorf("%s of C has no field in Go", name)
		}
	}
}

func TestResultsKeepTheirPlaces(t *testing.T) {
	for name, result := range map[string]struct {
		convert any
		ignored []string // what Go has elsewhere
	}{
		"kv_seq_info":            {sequenceInfoOf, []string{"flags"}},
		"kv_seq_layer_info":      {layerInfoOf, []string{"flags"}},
		"kv_retention_info":      {retentionInfoOf, []string{"flags"}},
		"kv_append_info":         {appendInfoOf, []string{"flags"}},
		"kv_reserve_report":      {reserveReportOf, []string{"flags", "item_status_capacity"}},
		"kv_step_report":         {stepReportOf, []string{"flags"}},
		"kv_compress_report":     {compressReportOf, []string{"flags"}},
		"kv_policy_footprint":    {policyFootprintOf, []string{"flags"}},
		"kv_pool_stats":          {poolStatsOf, []string{"flags"}},
		"kv_class_stats":         {classStatsOf, []string{"flags"}},
		"kv_plan_report":         {planOf, []string{"flags", "reserved0"}},
		"kv_capabilities_report": {capabilitiesOf, []string{"flags"}},
		"kv_tables": {tablesOf, []string{"flags", "block_table_stride", "block_table_capacity",
			"indices_capacity", "item_capacity", "token_capacity", "slot_positions_capacity"}},
	} {
		t.Run(name, func(t *testing.T) {
			theirs := reflect.New(reflect.TypeOf(rawStructs()[name]))
			distinct(theirs.Elem())
			ours := reflect.ValueOf(result.convert).Call([]reflect.Value{theirs})[0]
			sameFields(t, ours, theirs.Elem(), result.ignored...)
		})
	}
}

func TestArgumentsKeepTheirPlaces(t *testing.T) {
	var memory transfer
	defer memory.free()
	var policy Policy
	distinct(reflect.ValueOf(&policy).Elem())
	sameFields(t, reflect.ValueOf(policy), reflect.ValueOf(policy.native()).Elem())

	var config Config
	distinct(reflect.ValueOf(&config).Elem())
	sameFields(t, reflect.ValueOf(config), reflect.ValueOf(memory.config(config)).Elem())

	var rope Rope
	distinct(reflect.ValueOf(&rope).Elem())
	sameFields(t, reflect.ValueOf(rope), reflect.ValueOf(memory.rope(&rope)).Elem(),
		"flags")

	layer := Layer{
		KeyStorage: &Storage{Flags: StorageScaleOne, Scales: []float32{2, 3}, ChannelHeads: 1,
			ChannelDim: 2, ChannelMeans: []float32{5, 6}, ChannelScales: []float32{7, 8}},
		ValueStorage:        &Storage{Flags: StorageRotate, Scales: []float32{4}},
		DemotedKeyStorage:   &Storage{Scales: []float32{9}},
		DemotedValueStorage: &Storage{Scales: []float32{10, 11}}}
	distinct(reflect.ValueOf(&layer).Elem())
	model, err := memory.model(Model{Layers: []Layer{{}, layer}})
	must(t, err)
	if model.layer_count != 2 {
		t.Errorf("%d layers", model.layer_count)
	}
	second := unsafe.Slice(model.layers, 2)[1]
	sameFields(t, reflect.ValueOf(layer), reflect.ValueOf(second))
	keys, values := second.key_storage, second.value_storage
	sameFields(t, reflect.ValueOf(*layer.KeyStorage), reflect.ValueOf(*keys), "scale_count")
	sameFields(t, reflect.ValueOf(*layer.ValueStorage), reflect.ValueOf(*values), "scale_count")
	if keys.scale_count != 2 || values.scale_count != 1 || *values.scales != 4 ||
		unsafe.Slice(keys.scales, 2)[0] != 2 || unsafe.Slice(keys.scales, 2)[1] != 3 {
		t.Errorf("scales: %+v, %+v", keys, values)
	}
	if a, b := second.demoted_key_storage, second.demoted_value_storage; a.scale_count != 1 ||
		*a.scales != 9 || b.scale_count != 2 || unsafe.Slice(b.scales, 2)[1] != 11 {
		t.Errorf("scales of demoted rows: %+v, %+v", a, b)
	}
	means, scales := unsafe.Slice(keys.channel_means, 2), unsafe.Slice(keys.channel_scales, 2)
	if means[0] != 5 || means[1] != 6 || scales[0] != 7 || scales[1] != 8 ||
		values.channel_means != nil || values.channel_scales != nil {
		t.Errorf("constants of channels: %+v, %+v", keys, values)
	}

	statistics := QueryStatistics{Layer: 1, QueryHeads: 2, Bands: 3, Tokens: 4,
		MeanReal: make([]float32, 6), MeanImaginary: make([]float32, 6),
		MeanMagnitude: make([]float32, 6),
		VarianceReal:  make([]float32, 6), VarianceImaginary: make([]float32, 6),
		Covariance: make([]float32, 6)}
	native, err := statistics.native()
	must(t, err)
	sameFields(t, reflect.ValueOf(statistics), reflect.ValueOf(native))
	if unsafe.Pointer(native.mean_real) != unsafe.Pointer(&statistics.MeanReal[0]) ||
		unsafe.Pointer(native.mean_imaginary) != unsafe.Pointer(&statistics.MeanImaginary[0]) ||
		unsafe.Pointer(native.mean_magnitude) != unsafe.Pointer(&statistics.MeanMagnitude[0]) ||
		unsafe.Pointer(native.variance_real) != unsafe.Pointer(&statistics.VarianceReal[0]) ||
		unsafe.Pointer(native.variance_imaginary) !=
			unsafe.Pointer(&statistics.VarianceImaginary[0]) ||
		unsafe.Pointer(native.covariance) != unsafe.Pointer(&statistics.Covariance[0]) {
		t.Error("the arrays of statistics have changed places")
	}
}
